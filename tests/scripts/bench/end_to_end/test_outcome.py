import pytest

from end_to_end.outcome import TIMED_OUT, conclude
from end_to_end.results import RunResult
from end_to_end.tasks import WorkerTask
from tests.scripts.bench.end_to_end.small_tables import result_of

# As torchrun prints them.
_START = "\n*****\nSetting OMP_NUM_THREADS environment variable for each process to be 1 in default\n*****\n"
_FAILED = "E1122 08:31:16.236000 1 lib/torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)\n"
_TRACEBACK = 'Traceback (most recent call last):\n  File "api.py", line 383, in launch\n    raise ChildFailedError(\n'
_CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\nworker.py FAILED\n"
_ENDED = "traceback : Signal 15 (SIGTERM) received by PID 7\nRoot Cause (first observed failure):\n"
_KILLED = "exitcode : -9 (pid: 6)\n  traceback : Signal 9 (SIGKILL) received by PID 6\n"
_SUMMARY = _FAILED + _TRACEBACK + _CHILD_FAILED + _ENDED


def test_the_exit_code_and_the_result_say_how_a_run_has_ended(tasks: tuple[WorkerTask, ...]) -> None:
    task = tasks[0]
    assert conclude(task, 0, limit_seconds=60).failure == "ended without a result"
    assert conclude(task, TIMED_OUT, limit_seconds=90).failure == "took longer than the limit of 1.5 minutes"
    result_of(task).save(task.result)
    assert conclude(task, 0, limit_seconds=60) == result_of(task)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("[rank1]: ValueError: bad luck\n" + _SUMMARY, "ValueError: bad luck"),
        ("error: out must be a folder, got 'x'\n" + _SUMMARY, "out must be a folder, got 'x'"),
        ("core.errors.ConfigError: no\ncore.errors.RankLostError: rank 0\n" + _SUMMARY, "core.errors.ConfigError: no"),
        ("[rank0]: torch.distributed.DistBackendError: NCCL\n" + _FAILED, "torch.distributed.DistBackendError: NCCL"),
        ("[rank0]: torch.OutOfMemoryError: CUDA\nRuntimeError: later\n" + _SUMMARY, "out of memory"),
        (_SUMMARY + _KILLED, "Signal 9 (SIGKILL)"),
        ("ValueError: bad luck\n" + _SUMMARY + _KILLED, "ValueError: bad luck"),  # torchrun killed one that hung
        (_SUMMARY.replace(_CHILD_FAILED, ""), "exit code 3"),
        ("RuntimeError: \x1b[31mred\n", "RuntimeError: \\x1b[31mred"),
        ("RuntimeError: " + "x" * 1000, "RuntimeError: " + "x" * 286),
    ],
)
def test_a_failure_is_the_most_telling_line_of_the_log(tasks: tuple[WorkerTask, ...], log: str, reason: str) -> None:
    task = tasks[0]
    task.log.write_text(_START + log)
    result_of(task).save(task.result)  # of a run that failed after it
    result = conclude(task, 3, limit_seconds=60)
    assert result.failure == reason
    assert RunResult.load(task.result) == result
    assert (result.name, result.settings["balance"], result.gpus, result.segments) == ("baseline", "none", 2, ())
