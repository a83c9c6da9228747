"""Tasks run one after the other; what goes wrong in one is in its result, and the table goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from end_to_end.runner import Command, run_tasks, torchrun
from end_to_end.tasks import WorkerTask
from tests.scripts.bench.end_to_end.small_tables import make_tasks, result_of

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def tasks(tmp_path: Path) -> tuple[WorkerTask, ...]:
    return make_tasks(tmp_path)


def stand_in(*programs: str) -> Command:
    """Return commands that run a Python program for each task in turn, in which TASK and RESULT are paths."""
    left = iter(programs)

    def command(task: WorkerTask) -> list[str]:
        ready = task.result.with_suffix(".ready")
        result_of(task).save(ready)
        paths = f"TASK, READY, RESULT = {str(task.task_file)!r}, {str(ready)!r}, {str(task.result)!r}\n"
        return [sys.executable, "-c", "import os, signal, sys\n" + paths + next(left)]

    return command


DONE = "os.replace(READY, RESULT)"
HANG = "print('waiting', flush=True)\nsignal.pause()"


@pytest.mark.processes
def test_results_are_those_of_the_processes_with_a_line_for_each(
    tasks: tuple[WorkerTask, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    results = run_tasks(tasks, limit_seconds=100, command=stand_in(DONE, "print('noise')\n" + DONE, DONE))
    assert results == tuple(result_of(task) for task in tasks)
    assert tasks[1].log.read_text() == "noise\n"
    captured = capfd.readouterr()
    assert [line.split(", ")[0::2] for line in captured.out.splitlines()] == [
        ["[1/3] short: baseline", "done"],
        ["[2/3] short: halved heads", "done"],
        ["[3/3] short: measured cost", "done"],
    ]
    assert captured.err == ""


@pytest.mark.processes
def test_a_failed_run_has_a_reason_and_the_next_one_runs(
    tasks: tuple[WorkerTask, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out_of_memory = "print('torch.OutOfMemoryError: CUDA out of memory.', file=sys.stderr)\nsys.exit(1)"
    programs = (DONE, out_of_memory, "raise ValueError('bad luck')")
    results = run_tasks(tasks, limit_seconds=100, command=stand_in(*programs))
    assert [result.failure for result in results] == [None, "out of memory", "ValueError: bad luck"]
    assert "failed: out of memory\n" in capsys.readouterr().out


@pytest.mark.processes
def test_a_run_that_takes_too_long_is_ended(tasks: tuple[WorkerTask, ...]) -> None:
    results = run_tasks(tasks[:2], limit_seconds=0.6, command=stand_in(HANG, DONE))
    assert results[0].failure == "took longer than the limit of 0.01 minutes"


@pytest.mark.processes
def test_a_cost_is_not_fitted_to_a_run_that_failed(tasks: tuple[WorkerTask, ...]) -> None:
    command = stand_in("sys.exit('gone wrong')", DONE)
    results = run_tasks((tasks[0], tasks[2]), limit_seconds=100, command=command)
    assert [result.failure for result in results] == [
        "gone wrong",
        "its cost is fitted to 'baseline', which failed: gone wrong",
    ]


def test_torchrun_starts_as_many_processes_as_the_run_has(tasks: tuple[WorkerTask, ...]) -> None:
    assert torchrun(tasks[0])[1:] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        str(ROOT / "scripts/bench/end_to_end/worker.py"),
        str(tasks[0].task_file),
    ]


PROGRAM = """
import sys
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
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    program = PROGRAM.format(worker=str(worker), task=str(tasks[0].task_file))
    path = os.pathsep.join(str(ROOT / folder) for folder in ("scripts/bench", "examples"))
    table = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
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
