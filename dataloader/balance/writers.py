"""The metrics of steps written down while a job trains: as lines of JSON, or for TensorBoard.

Either is the `on_step` of a Balancer, usually on rank 0 alone: only the times differ between ranks.

    with JsonLines("out/balance.jsonl") as log, Balancer(loader, cost=cost, on_step=log) as balancer:
        ...

`on_step` is one function; for two writers, make it one that calls both:

    def on_step(metrics):
        log(metrics)
        board(metrics)
"""

import contextlib
import dataclasses
import json
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.balance.metrics import StepMetrics, summarize

_LINE_BEGINS = b'{"epoch": '
_BLOCK = 1 << 16  # bytes


class _Writer(ABC):
    """Writes a record after every `every` steps, of the last `window` steps, or of all if there were fewer."""

    def __init__(self, path: Path, every: int, window: int) -> None:
        for name, value in (("every", every), ("window", window)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self._path = path
        self._every = every
        self._last: deque[StepMetrics] = deque(maxlen=window)
        self._seen = 0  # steps
        self._closed = False

    def __call__(self, metrics: StepMetrics) -> None:
        """Take the metrics of the next step.

        Raises:
            ConfigError: the writer is closed.
            DataError: a record is due and could not be written; the writer is closed now.

        """
        if self._closed:
            raise ConfigError(f"this {type(self).__name__} is closed; make a new one")
        self._last.append(metrics)
        self._seen += 1
        if self._seen % self._every == 0:
            try:
                self._write(tuple(self._last))
            except OSError as error:
                with contextlib.suppress(OSError):
                    self.close()  # the next record would be glued to half of this one
                raise DataError(
                    f"{self._path} could not be written: {_in_words(error)}; make room there, or train without it"
                ) from error

    def close(self) -> None:
        """Write no more; steps since the last record are left out. Closing twice does nothing."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _write(self, steps: Sequence[StepMetrics]) -> None: ...


class JsonLines(_Writer):
    """Appends a line of JSON per record to a file; `evenrank metrics FILE` shows what is in it.

    A line has `epoch` and `step` of the last step, `seen` (steps that this writer has seen, with that one), the fields
    of MetricsSummary, `heaviest_before` and `heaviest_after` (the heaviest rank's load), `samples`, `tokens` and
    `bytes` (of all ranks), means over the steps like the others, and of the last step the loads of each rank, `before`
    and `after`, with their `lower_bound`. That is some 700 bytes, and 30 more for each rank.

    Each line is handed to the system at once, so a job that is killed loses none. A log that exists is continued. If
    its last line was torn, by a job that was killed while it wrote, that line is taken away first.

    Args:
        path: of the file; folders above it are made.
        every: steps from one record to the next.
        window: steps that a record sums up.

    Raises:
        ConfigError: `every` or `window` is below 1.
        DataError: the file cannot be written, or is something else than such a log.

    """

    def __init__(self, path: str | os.PathLike[str], *, every: int = 1, window: int = 1) -> None:
        super().__init__(Path(path), every, window)
        try:
            with contextlib.suppress(FileExistsError):  # if that is no folder, opening the file says so
                self._path.parent.mkdir(parents=True)
            # Without a buffer: nothing is left to write when the file is closed, or when the process is killed.
            self._file = FileIO(self._path, "a+")
            try:
                _end_with_a_whole_line(self._file, self._path)
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise DataError(f"{self._path} cannot be written: {_in_words(error)}; choose another file") from error

    def close(self) -> None:
        """Close the file; steps since the last record are left out. Closing twice does nothing."""
        super().close()
        self._file.close()

    def _write(self, steps: Sequence[StepMetrics]) -> None:
        rest = memoryview(f"{json.dumps(_line(steps, self._seen))}\n".encode())
        while rest:
            rest = rest[self._file.write(rest) :]


class TensorBoard(_Writer):
    """Writes the fields of MetricsSummary as scalars `balance/...` for TensorBoard.

    The step of a scalar is the number of steps that this writer has seen, which grows from epoch to epoch. A new writer
    counts from 1 again, so give a job that is resumed a folder of its own: TensorBoard shows it as another run.

    Args:
        log_dir: folder of the event file; made if it is not there.
        every: steps from one record to the next.
        window: steps that a record sums up.

    Raises:
        ConfigError: `every` or `window` is below 1, or the package `tensorboard` is missing.
        DataError: the folder cannot be written.

    """

    def __init__(self, log_dir: str | os.PathLike[str], *, every: int = 10, window: int = 100) -> None:
        super().__init__(Path(log_dir), every, window)
        try:
            # Not above: most jobs do without, and hosts may lack it.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"the package tensorboard is missing or too old ({error}); pip install 'evenrank[tensorboard]'"
            ) from error
        try:
            self._scalars = SummaryWriter(str(self._path))
        except OSError as error:
            raise DataError(f"{self._path} cannot be written: {_in_words(error)}; choose another folder") from error

    def close(self) -> None:
        """Write what is waiting and close the event file. Closing twice does nothing."""
        super().close()
        self._scalars.close()

    def _write(self, steps: Sequence[StepMetrics]) -> None:
        for name, value in dataclasses.asdict(summarize(steps)).items():
            if name != "steps":
                self._scalars.add_scalar(f"balance/{name}", value, self._seen)


def _line(steps: Sequence[StepMetrics], seen: int) -> dict[str, Any]:
    last = steps[-1]
    return {
        "epoch": int(last.epoch),
        "step": int(last.step),
        "seen": seen,
        **dataclasses.asdict(summarize(steps)),
        "heaviest_before": float(np.mean([step.before.max() for step in steps])),
        "heaviest_after": float(np.mean([step.after.max() for step in steps])),
        "samples": float(np.mean([step.samples for step in steps])),
        "tokens": float(np.mean([step.tokens for step in steps])),
        "bytes": float(np.mean([step.bytes for step in steps])),
        "before": last.before.tolist(),
        "after": last.after.tolist(),
        "lower_bound": int(last.lower_bound),
    }


def _end_with_a_whole_line(file: FileIO, path: Path) -> None:
    """Cut off a torn last line, so that the next begins where it should.

    Raises:
        DataError: the file is something else than a log, and stays as it is.

    """
    file.seek(0)
    beginning = file.read(len(_LINE_BEGINS))
    end = start = file.seek(0, os.SEEK_END)
    last = b""
    while start > 0 and b"\n" not in last:
        size = min(_BLOCK, start)
        start = file.seek(start - size)
        last = file.read(size) + last
    torn = last[last.rfind(b"\n") + 1 :]
    for text in (beginning, torn[: len(_LINE_BEGINS)]):
        if not _LINE_BEGINS.startswith(text):
            raise DataError(f"{path} exists and is no log of balancing metrics; choose another file")
    if torn.endswith(b"}") and _is_json(torn):  # only the end of the line is missing
        file.write(b"\n")
    else:
        file.truncate(end - len(torn))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _in_words(error: OSError) -> str:
    return error.strerror or str(error)
