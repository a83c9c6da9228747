"""Each run is a SLURM job that waits for the one before it."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from end_to_end.outcome import TIMED_OUT
from end_to_end.results import RunResult
from end_to_end.runner import Cluster, check_sbatch, script_file, script_of, submit
from end_to_end.tasks import WorkerTask, tasks_of
from evenrank.core.errors import ConfigError
from tests.scripts.bench.end_to_end.small_tables import make_table, make_tasks

CLUSTER = Cluster(nodes=2, gpus_per_node=2, partition="big one")


def tasks_with(tmp_path: Path, gpus: int) -> tuple[WorkerTask, ...]:
    return tasks_of(make_table(tmp_path), tmp_path, gpus=gpus, lengths=["short"])


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """Put a program on the PATH."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/bash\n" + script)
    program.chmod(0o755)
    if str(program.parent) not in os.environ["PATH"].split(os.pathsep):
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def options_of(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name: " ".join(shlex.split(value)) for name, _, value in (line.partition("=") for line in lines)}


def test_a_job_has_the_hosts_and_the_time_of_its_run(tmp_path: Path) -> None:
    task = tasks_with(tmp_path, 4)[1]
    script = script_of(task, CLUSTER, limit_seconds=90)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert options_of(script) == {
        "job-name": "short-halved-heads",
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "2",
        "exclusive": "",
        "mem": "0",
        "time": "12",
        "output": str(task.log),
        "partition": "big one",
    }


def test_a_run_on_fewer_gpus_has_fewer_hosts(tmp_path: Path) -> None:
    cluster = Cluster(nodes=2, gpus_per_node=8)
    for gpus, hosts in ((2, ("1", "2")), (8, ("1", "8")), (16, ("2", "8"))):
        options = options_of(script_of(tasks_with(tmp_path, gpus)[0], cluster, limit_seconds=60))
        assert (options["nodes"], options["gpus-per-node"]) == hosts


def test_processes_that_do_not_fill_their_hosts_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'baseline' has 6 processes, which are no multiple of the 4 GPUs of a host"):
        script_of(tasks_with(tmp_path, 6)[0], Cluster(nodes=2, gpus_per_node=4), limit_seconds=60)


@pytest.mark.parametrize(
    ("srun", "failure"),
    [
        ("echo ValueError: bad luck; exit 1", "ValueError: bad luck"),
        (f"exit {TIMED_OUT}", "took longer than the limit"),
    ],
)
def test_a_job_leaves_a_result_when_its_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: str, failure: str
) -> None:
    folder = tmp_path / "with spaces, 100%j and a 'quote'"
    folder.mkdir()
    task = make_tasks(folder)[0]
    task.save()
    install(tmp_path, monkeypatch, "scontrol", "echo first; echo second")
    install(tmp_path, monkeypatch, "srun", f'printf "%s\\n" "$@" > "{tmp_path}/arguments"\n{srun}')
    script = script_of(task, CLUSTER, limit_seconds=100)
    assert options_of(script)["output"] == str(task.log).replace("%", "%%")
    environment = {**os.environ, "SLURM_JOB_ID": "30007", "SLURM_JOB_NODELIST": "hosts[1-2]"}
    with task.log.open("w") as log:
        code = subprocess.run(["bash"], input=script, text=True, stdout=log, env=environment, check=False).returncode
    result = RunResult.load(task.result)
    assert code == 1
    assert result.failure is not None
    assert result.failure.startswith(failure)
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[arguments.index("--rdzv_endpoint") + 1] == "first:30007"
    assert arguments[-1] == str(task.task_file)


@pytest.mark.processes
def test_jobs_follow_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the job of a measured cost and the one whose times it needs."""
    tasks = make_tasks(tmp_path)
    install(tmp_path, monkeypatch, "sbatch", f'echo "$@" >> "{tmp_path}/calls"; echo "$(wc -l < "{tmp_path}/calls");a"')
    assert submit(tasks, CLUSTER, limit_seconds=60) == ("1", "2", "3")
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"--parsable {script_file(tasks[0])}",
        f"--parsable --dependency=afterany:1 {script_file(tasks[1])}",
        f"--parsable --dependency=afterany:2 {script_file(tasks[2])}",
    ]
    assert script_file(tasks[2]).read_text() == script_of(tasks[2], CLUSTER, limit_seconds=60)
    assert capsys.readouterr().out.splitlines()[0] == "job 1: short: baseline"


@pytest.mark.processes
def test_a_refused_job_is_one_line_that_says_what_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = 'case "$*" in *baseline*) echo 5;; *) echo "sbatch: error: no such partition" >&2; exit 1;; esac'
    install(tmp_path, monkeypatch, "sbatch", refuse)
    with pytest.raises(ConfigError) as caught:
        submit(make_tasks(tmp_path), CLUSTER, limit_seconds=60)
    assert str(caught.value) == (
        "sbatch refuses 'short: halved heads': sbatch: error: no such partition; jobs 5 are submitted"
    )


def test_a_host_without_sbatch_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"there is no sbatch on the PATH; .*--dry-run"):
        check_sbatch()
