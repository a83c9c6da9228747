"""Run a table on several hosts: a SLURM job for each run, each waiting for the one before it."""

import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from end_to_end import outcome
from end_to_end.runner import WORKER
from end_to_end.tasks import WorkerTask
from evenrank.core import files
from evenrank.core.errors import ConfigError

_MARGIN_MINUTES = 10  # of a job, for starting and for ending a run that has reached its limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Which hosts jobs are given."""

    nodes: int
    """Hosts, at most."""
    gpus_per_node: int
    partition: str | None = None
    """None: SLURM's default."""
    account: str | None = None
    """None: SLURM's default."""

    @property
    def gpus(self) -> int:
        """GPUs, at most."""
        return self.nodes * self.gpus_per_node


def script_file(task: WorkerTask) -> Path:
    """Return where the script of a task is written."""
    return task.result.with_suffix(".sh")


def script_of(task: WorkerTask, cluster: Cluster, *, limit_seconds: float) -> str:
    """Return the script of a task.

    Raises:
        ConfigError: its processes are more than a host's and do not fill whole hosts.

    """
    gpus, per_node = task.gpus, min(task.gpus, cluster.gpus_per_node)
    if gpus % per_node:
        raise ConfigError(
            f"run {task.run.name!r} has {gpus} processes, which are no multiple of the {per_node} GPUs of a host; "
            "change gpus in the file, or --gpus-per-node"
        )
    folder = Path(__file__).resolve().parent / "templates"
    environment = Environment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template("slurm.sh.j2").render(
        task=task,
        cluster=cluster,
        nodes=gpus // per_node,
        per_node=per_node,
        job_name=f"{task.lengths}-{task.result.stem}",
        log=str(task.log).replace("%", "%%"),  # SLURM replaces %j and others
        minutes=math.ceil(limit_seconds / 60) + _MARGIN_MINUTES,
        limit_seconds=math.ceil(limit_seconds),
        python=sys.executable,
        worker=WORKER,
        outcome=outcome.__file__,
    )


def sbatch_command(task: WorkerTask, waits_for: str | None) -> list[str]:
    """Return the command that submits a task.

    Args:
        task: whose script is written.
        waits_for: id of the job that must have ended, whether it failed or not; None: none.

    """
    dependency = [] if waits_for is None else [f"--dependency=afterany:{waits_for}"]
    return ["sbatch", "--parsable", *dependency, str(script_file(task))]


def check_sbatch() -> None:
    """Check that jobs can be submitted.

    Raises:
        ConfigError: they cannot.

    """
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no sbatch on the PATH; use a host that submits jobs, or --dry-run for the scripts")


def submit(tasks: Sequence[WorkerTask], cluster: Cluster, *, limit_seconds: float) -> tuple[str, ...]:
    """Submit a job for each task; return their ids.

    They run one after the other: none disturbs the times of another, and a cost is fitted once there are times. The job
    after one that failed runs all the same.

    Raises:
        ConfigError: a task cannot be submitted; those before it are.

    """
    scripts = [script_of(task, cluster, limit_seconds=limit_seconds) for task in tasks]
    jobs: list[str] = []
    for task, script in zip(tasks, scripts, strict=True):
        files.write_text(script_file(task), script)
        submitted = subprocess.run(
            sbatch_command(task, jobs[-1] if jobs else None), capture_output=True, text=True, check=False
        )
        if submitted.returncode:
            message = " ".join(submitted.stderr.split()) or f"exit code {submitted.returncode}"
            running = f"jobs {', '.join(jobs)} are submitted" if jobs else "no job is submitted"
            raise ConfigError(f"sbatch refuses {task.title!r}: {message}; {running}")
        jobs.append(submitted.stdout.strip().split(";")[0])  # `id;cluster` where there are several clusters
        print(f"job {jobs[-1]}: {task.title}", flush=True)
    return tuple(jobs)
