"""Run a table on one host: one run after the other, each by torchrun, with a time limit."""

import contextlib
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from end_to_end import outcome
from end_to_end.outcome import TIMED_OUT, conclude, save_failure
from end_to_end.results import RunResult
from end_to_end.tasks import WorkerTask
from evenrank.cli import console
from evenrank.core import files
from evenrank.core.errors import ConfigError, DataError

WORKER = Path(__file__).resolve().parent / "worker.py"
_GRACE_SECONDS = 60  # torchrun gives its processes 30 to end

Command = Callable[[WorkerTask], list[str]]


def torchrun(task: WorkerTask) -> list[str]:
    """Return the command of a task on one host."""
    processes = ("--standalone", "--nproc_per_node", str(task.gpus))
    return [sys.executable, "-P", "-m", "torch.distributed.run", *processes, str(WORKER), str(task.task_file)]


@contextlib.contextmanager
def hold(out: Path) -> Iterator[None]:
    """Hold the folder of a table while the context is open: two commands would disturb each other's times.

    Raises:
        ConfigError: another process holds it.
    """
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.locked(out / ".lock", seconds=0.1))
        except TimeoutError as error:
            raise ConfigError(
                f"another command runs the table in {out}; wait for it, or choose another --out"
            ) from error
        yield


def run_tasks(
    tasks: Sequence[WorkerTask], *, limit_seconds: float, command: Command = torchrun
) -> tuple[RunResult, ...]:
    """Run tasks one after the other, printing a line for each; a failed one has a result that says why.

    Args:
        tasks: a run comes after the one to whose times its cost is fitted.
        limit_seconds: of each run; one that takes longer is ended, and has failed.
        command: of a task.
    """
    results = []
    for number, task in enumerate(tasks, 1):
        started = time.monotonic()
        title = f"[{number}/{len(tasks)}] {task.title}"
        try:
            with console.stages() as show:
                show(f"{title} (log: {task.log})")
                result = _run(task, command(task), limit_seconds)
        except BaseException:  # such as Ctrl-C
            print(f"{title}, stopped; the same command continues the table with it", flush=True)
            raise
        outcome = "done" if result.failure is None else f"failed: {result.failure}"
        minutes, seconds = divmod(round(time.monotonic() - started), 60)
        print(f"{title}, {minutes}:{seconds:02}, {outcome}", flush=True)
        results.append(result)
    return tuple(results)


def _run(task: WorkerTask, command: list[str], limit_seconds: float) -> RunResult:
    if failure := _failure_of_cost(task):
        return save_failure(task, failure)
    with task.log.open("wb") as log:
        # A session of its own: Ctrl-C reaches this process alone, which then ends that one in good order.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            code = TIMED_OUT
        finally:
            _end(process)
    return conclude(task, code, limit_seconds=limit_seconds)


def _failure_of_cost(task: WorkerTask) -> str | None:
    """Return why a cost cannot be fitted, if it is to be."""
    if task.cost_result is None:
        return None
    try:
        failure = RunResult.load(task.cost_result).failure
    except DataError as error:
        failure = str(error)
    return failure and f"its cost is fitted to {task.run.cost!r}, which failed: {failure}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that is still running.

    The processes of torchrun are not in its process group. It ends them when it is asked to end itself, so it is given
    the time to do so, however often Ctrl-C is pressed.
    """
    if process.poll() is not None:
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


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
