import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from end_to_end.outcome import TIMED_OUT
from end_to_end.results import RunResult
from end_to_end.runner import Cluster, Command, check_sbatch, run_tasks, script_file, script_of, submit
from end_to_end.tasks import WorkerTask, tasks_of
from evenrank.core.errors import ConfigError
from tests.scripts.bench.end_to_end.small_tables import make_table, make_tasks, result_of

ROOT = Path(__file__).resolve().parents[4]


def stand_in(*programs: str) -> Command:
    """Return commands that run a Python program for each task in turn, in which READY and RESULT are paths."""
    left = iter(programs)

    def command(task: WorkerTask) -> list[str]:
        ready = task.result.with_suffix(".ready")
        result_of(task).save(ready)
        start = f"import os, signal, sys\nREADY, RESULT = {str(ready)!r}, {str(task.result)!r}\n"
        return [sys.executable, "-P", "-c", start + next(left)]

    return command


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """Put a program on the PATH."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/bash\n" + script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)


def options_of(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name: " ".join(shlex.split(value)) for name, _, value in (line.partition("=") for line in lines)}


DONE = "os.replace(READY, RESULT)"


@pytest.mark.processes
def test_a_line_says_how_each_run_has_ended(tasks: tuple[WorkerTask, ...], capfd: pytest.CaptureFixture[str]) -> None:
    out_of_memory = "print('torch.OutOfMemoryError: CUDA out of memory.', file=sys.stderr)\nsys.exit(1)"
    command = stand_in("print('noise')\n" + DONE, out_of_memory, "raise ValueError('bad luck')")
    results = run_tasks(tasks, limit_seconds=100, command=command)
    assert results[0] == result_of(tasks[0])
    assert [result.failure for result in results] == [None, "out of memory", "ValueError: bad luck"]
    assert tasks[0].log.read_text() == "noise\n"
    output, error = capfd.readouterr()
    assert [line.split(", ")[2] for line in output.splitlines()] == [
        *("done", "failed: out of memory", "failed: ValueError: bad luck")
    ]
    assert output.startswith("[1/3] short: baseline, ")
    assert error == ""


@pytest.mark.processes
def test_a_run_that_takes_too_long_is_ended_and_no_cost_is_fitted_to_it(tasks: tuple[WorkerTask, ...]) -> None:
    results = run_tasks((tasks[0], tasks[2]), limit_seconds=0.6, command=stand_in("signal.pause()", DONE))
    reason = "took longer than the limit of 0.01 minutes"
    fitted = f"its cost is fitted to 'baseline', which failed: {reason}"
    assert [result.failure for result in results] == [reason, fitted]


PROGRAM = """
from pathlib import Path
from end_to_end import runner
from end_to_end.tasks import WorkerTask
from evenrank.cli.main import run_command

runner.WORKER = Path({worker!r})
task = WorkerTask.load(Path({task!r}))
run_command(lambda: runner.run_tasks([task], limit_seconds=100) and None)
"""
WORKER = """
import os, signal, sys
open(sys.argv[1] + "." + os.environ["RANK"], "w").write(str(os.getpid()) + " ")
signal.pause()
"""


@pytest.mark.timeout(120)
def test_ctrl_c_ends_the_processes_of_a_run(tasks: tuple[WorkerTask, ...], tmp_path: Path) -> None:
    tasks[0].save()
    (tmp_path / "worker.py").write_text(WORKER)
    program = PROGRAM.format(worker=str(tmp_path / "worker.py"), task=str(tasks[0].task_file))
    path = os.pathsep.join(str(ROOT / folder) for folder in ("scripts/bench", "examples"))
    command, environment, pipe = (
        [sys.executable, "-P", "-c", program],
        {**os.environ, "PYTHONPATH": path},
        subprocess.PIPE,
    )
    table = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
    files = [Path(f"{tasks[0].task_file}.{rank}") for rank in range(2)]
    while not all(file.exists() and file.read_text().endswith(" ") for file in files):
        assert table.poll() is None, tasks[0].log.read_text()
        time.sleep(0.05)
    table.send_signal(signal.SIGINT)
    output, error = table.communicate()
    assert output == f"[1/1] {tasks[0].title}, stopped; the same command continues the table with it\n"
    assert (table.returncode, error) == (130, "error: stopped by SIGINT\n")
    assert not tasks[0].result.exists()
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


CLUSTER = Cluster(nodes=2, gpus_per_node=2, partition="big one")


def test_a_job_has_the_hosts_and_the_time_of_its_run(tmp_path: Path) -> None:
    def script(gpus: int, cluster: Cluster) -> str:
        task = tasks_of(make_table(tmp_path), tmp_path, gpus=gpus, lengths=["short"])[1]
        return script_of(task, cluster, limit_seconds=90)

    on_two_hosts = script(4, CLUSTER)
    assert subprocess.run(["bash", "-n"], input=on_two_hosts, text=True, check=False).returncode == 0
    hosts = {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "2", "partition": "big one"}
    log = str(tmp_path / "short" / "halved-heads.log")
    job = {"job-name": "short-halved-heads", "exclusive": "", "mem": "0", "time": "12", "output": log}
    assert options_of(on_two_hosts) == {**hosts, **job}
    for gpus, nodes, of_node in ((2, "1", "2"), (8, "1", "8"), (16, "2", "8")):
        options = options_of(script(gpus, Cluster(nodes=2, gpus_per_node=8)))
        assert (options["nodes"], options["gpus-per-node"]) == (nodes, of_node)
    with pytest.raises(ConfigError, match="has 6 processes, which are no multiple of the 4 GPUs of a host"):
        script(6, Cluster(nodes=2, gpus_per_node=4))


@pytest.mark.parametrize(
    ("srun", "failure"),
    [("echo ValueError: a; exit 1", "ValueError: a"), (f"exit {TIMED_OUT}", "took longer than the limit")],
)
def test_jobs_that_fail_have_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: str, failure: str) -> None:
    (folder := tmp_path / "with spaces, 100%j and a 'quote'").mkdir()
    task = make_tasks(folder)[0]
    task.save()
    install(tmp_path, monkeypatch, "scontrol", "echo first; echo second")
    install(tmp_path, monkeypatch, "srun", f'printf "%s\\n" "$@" > "{tmp_path}/arguments"\n{srun}')
    script = script_of(task, CLUSTER, limit_seconds=100)
    assert options_of(script)["output"] == str(task.log).replace("%", "%%")
    environment = {**os.environ, "SLURM_JOB_ID": "30007", "SLURM_JOB_NODELIST": "hosts[1-2]"}
    with task.log.open("w") as log:
        code = subprocess.run(["bash"], input=script, text=True, stdout=log, env=environment, check=False).returncode
    assert code == 1
    assert str(RunResult.load(task.result).failure).startswith(failure)
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[arguments.index("--rdzv_endpoint") + 1] == "first:30007"
    assert arguments[-1] == str(task.task_file)


@pytest.mark.processes
def test_jobs_follow_one_another_and_a_refused_one_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = make_tasks(tmp_path)
    install(tmp_path, monkeypatch, "sbatch", f'echo "$@" >> "{tmp_path}/calls"; echo "$(wc -l < "{tmp_path}/calls");a"')
    assert submit(tasks, CLUSTER, limit_seconds=60) == ("1", "2", "3")
    after = ("", "--dependency=afterany:1 ", "--dependency=afterany:2 ")
    calls = [f"--parsable {one}{script_file(task)}" for one, task in zip(after, tasks, strict=True)]
    assert (tmp_path / "calls").read_text().splitlines() == calls
    assert script_file(tasks[2]).read_text() == script_of(tasks[2], CLUSTER, limit_seconds=60)
    refuse = 'case "$*" in *baseline*) echo 5;; *) echo "sbatch: error: no such partition" >&2; exit 1;; esac'
    install(tmp_path, monkeypatch, "sbatch", refuse)
    refused = "sbatch refuses 'short: halved heads': sbatch: error: no such partition; jobs 5 are submitted"
    with pytest.raises(ConfigError, match=f"^{refused}$"):
        submit(tasks, CLUSTER, limit_seconds=60)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"there is no sbatch on the PATH; .*--dry-run"):
        check_sbatch()
