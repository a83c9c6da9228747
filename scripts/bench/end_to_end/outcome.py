"""How a run has ended: its result, or why there is none, from its exit code and its log.

python outcome.py TASK EXIT_CODE LIMIT    concludes a run that something else has started, such as a SLURM script
"""

import dataclasses
import itertools
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

if __name__ == "__main__":
    _BENCH = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(_BENCH), str(_BENCH.parent.parent / "examples")]

from end_to_end.results import RunResult
from end_to_end.tasks import WorkerTask, new_result
from evenrank.core.errors import DataError, escape_controls

TIMED_OUT = 124  # the exit code of `timeout`
_LOG_BYTES = 4 << 20  # that are searched, from the end
_MAX_LINE = 300
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA error: out of memory|Cuda failure .*out of memory")
# The line of an exception, after which rank it is of; or a message of this project, which is one line.
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:error: |[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b).*)")
# In torchrun's summary; it sends SIGTERM (15) itself, to the ranks that are left.
_SIGNAL = re.compile(r"\bSignal (?!15 )\d+ \(\w+\)(?= received)")
_NOISE = re.compile(r"^\W*$|^Setting OMP_NUM_THREADS")
_TORCHRUN = re.compile(r"^[EW]\d+ .*/torch/distributed/elastic/")
# What follows on other ranks when one has failed.
_CONSEQUENCE = re.compile(r"RankLostError|DistBackendError|DistNetworkError|Connection (?:closed|reset)")
_OF_TORCHRUN = "torch.distributed.elastic."


def conclude(task: WorkerTask, code: int, *, limit_seconds: float) -> RunResult:
    """Return the result of a run that has ended; if there is none, write and return one that says why.

    Args:
        task: of the run.
        code: exit code, TIMED_OUT if it was ended for taking longer than the limit.
        limit_seconds: the limit.
    """
    if code == 0:
        try:
            return RunResult.load(task.result)
        except DataError as error:
            reason = str(error) if task.result.exists() else "ended without a result"
    elif code == TIMED_OUT:
        reason = f"took longer than the limit of {limit_seconds / 60:g} minutes"
    else:
        reason = _reason(task.log, code)
    return save_failure(task, reason)


def save_failure(task: WorkerTask, reason: str) -> RunResult:
    """Write and return the result of a run without measurements."""
    made = new_result(task, {"date": datetime.now(UTC).date().isoformat()})
    result = dataclasses.replace(made, failure=escape_controls(reason))
    result.save(task.result)
    return result


def _reason(log: Path, code: int) -> str:
    """Return the line of a log that says most about why its processes have failed."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    if _OUT_OF_MEMORY.search(text):
        return "out of memory"
    lines = text.splitlines()
    matches = [match[1] for line in lines if (match := _EXCEPTION.match(line))]
    exceptions = [line for line in matches if not line.startswith(_OF_TORCHRUN)]
    causes = [line for line in exceptions if not _CONSEQUENCE.search(line)]
    signals = _SIGNAL.findall(text)
    before_summary = itertools.takewhile(lambda line: not _TORCHRUN.match(line), lines)
    other = [line.strip() for line in before_summary if not _NOISE.match(line)]
    for candidates in (causes, signals, exceptions, other):
        if candidates:
            return candidates[-1].removeprefix("error: ")[:_MAX_LINE]
    return f"exit code {code}"


if __name__ == "__main__":
    concluded = conclude(WorkerTask.load(Path(sys.argv[1])), int(sys.argv[2]), limit_seconds=float(sys.argv[3]))
    print(concluded.failure or "done")
    sys.exit(concluded.failure is not None)
