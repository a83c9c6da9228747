"""Run a table on one host: one run after the other, each by torchrun, with a time limit."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from end_to_end.outcome import TIMED_OUT, conclude, save_failure
from end_to_end.results import RunResult
from end_to_end.tasks import WorkerTask
from evenrank.cli import console
from evenrank.core.errors import ConfigError, DataError

WORKER = Path(__file__).resolve().parent / "worker.py"
_GRACE_SECONDS = 60  # torchrun gives its processes 30 to end

Command = Callable[[WorkerTask], list[str]]


def torchrun(task: WorkerTask) -> list[str]:
    """Return the command of a task on one host."""
    processes = ("--standalone", "--nproc_per_node", str(task.gpus))
    return [sys.executable, "-m", "torch.distributed.run", *processes, str(WORKER), str(task.task_file)]


@contextlib.contextmanager
def hold(out: Path) -> Iterator[None]:
    """Hold the folder of a table while the context is open: two commands would disturb each other's times.

    Raises:
        ConfigError: another process holds it.

    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
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
