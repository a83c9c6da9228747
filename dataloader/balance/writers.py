"""Write the metrics of a training job: to a file of JSON lines, to TensorBoard, or as text for people.

A writer is the `on_step` of a `BalanceConfig`, usually on rank 0 only, because only the times differ between ranks:

    with JsonLines("out/balance.jsonl") as log, Balancer(loader, BalanceConfig(cost=cost, on_step=log)) as balancer:
        ...

For two writers, pass a function that calls both.
"""

import contextlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Self

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.balance.metrics import LogRecord, StepMetrics, shown_fields, summarize

_log = logging.getLogger("evenrank")


class _Writer(ABC):
    """Writes a record after every `every` steps, over the last `window` steps."""

    def __init__(self, path: Path, every: int, window: int) -> None:
        for name, value in (("every", every), ("window", window)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self._path = path
        self._every = every
        self._last_steps: deque[StepMetrics] = deque(maxlen=window)
        self._seen = 0  # steps
        self._closed = False

    def __call__(self, metrics: StepMetrics) -> None:
        """Take the metrics of the next step. A DataError if a record cannot be written; the writer is closed then."""
        if self._closed:
            raise ConfigError(f"this {type(self).__name__} is closed; create a new one")
        self._last_steps.append(metrics)
        self._seen += 1
        if self._seen % self._every == 0:
            try:
                self._write(tuple(self._last_steps))
            except OSError as error:
                with contextlib.suppress(OSError):
                    self.close()  # the next record would continue a half-written line
                raise DataError(
                    f"{self._path} could not be written: {_reason(error)}; free some space, or train without the log"
                ) from error

    def close(self) -> None:
        """Stop writing; steps since the last record are dropped. Closing twice does nothing."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def _write(self, steps: Sequence[StepMetrics]) -> None: ...


class JsonLines(_Writer):
    """Appends one line of JSON per record to a file; `evenrank metrics FILE` shows it.

    `metrics.LogRecord` has the fields of a line, which takes about 700 bytes, and 30 more for each rank. Each line is
    passed to the operating system at once, so a job that is killed loses none. An existing file is continued on a new
    line, and missing parent folders are created.

    Args:
        path: of the file.
        every: steps from one record to the next.
        window: steps that a record summarizes.

    Raises:
        ConfigError: `every` or `window` is below 1.
        DataError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int = 1, window: int = 1) -> None:
        super().__init__(Path(path), every, window)
        try:
            with contextlib.suppress(FileExistsError):  # if the parent is a file, opening the log reports it
                self._path.parent.mkdir(parents=True)
            self._file = FileIO(self._path, "a+")  # unbuffered, so that nothing is lost when the process is killed
            if end := self._file.seek(0, os.SEEK_END):
                self._file.seek(end - 1)
                if self._file.read(1) != b"\n":  # the writer before was killed
                    self._file.write(b"\n")
        except OSError as error:
            raise DataError(f"{self._path} cannot be written: {_reason(error)}; choose another file") from error

    def close(self) -> None:
        """Close the file; steps since the last record are dropped."""
        super().close()
        self._file.close()

    def _write(self, steps: Sequence[StepMetrics]) -> None:
        record = LogRecord.of(steps, seen=self._seen)
        remaining = memoryview(f"{json.dumps(record.to_json())}\n".encode())
        while remaining:
            remaining = remaining[self._file.write(remaining) :]


class TensorBoard(_Writer):
    """Writes the fields of `MetricsSummary` that have a label as scalars `balance/...` for TensorBoard.

    The step of a scalar is the number of steps that this writer has seen, which grows from epoch to epoch. A new writer
    starts at 1 again, so give a resumed job a folder of its own, which TensorBoard shows as another run.

    Args:
        log_dir: folder of the event file; created if missing.
        every: see `JsonLines`.
        window: see `JsonLines`.

    Raises:
        ConfigError: `every` or `window` is below 1, or the package `tensorboard` is missing.
        DataError: the folder cannot be written.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, every: int = 10, window: int = 100) -> None:
        super().__init__(Path(log_dir), every, window)
        try:  # an optional dependency
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"the package tensorboard is missing or too old ({error}); pip install 'evenrank[tensorboard]'"
            ) from error
        try:
            self._scalars = SummaryWriter(str(self._path))
        except OSError as error:
            raise DataError(f"{self._path} cannot be written: {_reason(error)}; choose another folder") from error

    def close(self) -> None:
        """Write pending scalars and close the event file."""
        super().close()
        self._scalars.close()

    def _write(self, steps: Sequence[StepMetrics]) -> None:
        summary = summarize(steps)
        for entry in shown_fields():
            self._scalars.add_scalar(f"balance/{entry.name}", getattr(summary, entry.name), self._seen)


def log_line(metrics: StepMetrics) -> str:
    """Describe a step in one line, before balancing -> after balancing.

    epoch 0 step 100: load max-min 1.2e9 -> 3.4e6 (imbalance 41.2% -> 0.2%, 1.352 -> 1.001 x lower bound), moved ...

    Loads are in units of the cost. The imbalance is (max - min) / max, the part of the step that the lightest rank
    waits for the heaviest. The lower bound is that of the heaviest load.
    """
    before, after = (int(loads.max() - loads.min()) for loads in (metrics.before, metrics.after))
    return (
        f"epoch {metrics.epoch} step {metrics.step}: load max-min {_short(before)} -> {_short(after)} (imbalance "
        f"{before / max(int(metrics.before.max()), 1):.1%} -> {after / max(int(metrics.after.max()), 1):.1%}, "
        f"{metrics.ratio_before:.3f} -> {metrics.ratio_after:.3f} x lower bound), "
        f"moved {metrics.moved_tokens:,} of {metrics.tokens:,} tokens, "
        f"plan {1e3 * metrics.plan_seconds:.1f} ms, exchange {1e3 * metrics.exchange_seconds:.1f} ms"
    )


class StepLogger:
    """Logs a line for the steps 0, every, 2 * every, ..., counted over all epochs, through the logger `evenrank`.

    With a window (start, stop), only for the steps start..stop-1. Lines are visible although Python logs only warnings
    by default: the logger gets the level INFO unless it has one, and a handler if there is none.
    """

    def __init__(self, *, every: int, window: tuple[int, int] | None = None) -> None:
        self._every = every
        self._window = window
        self._seen = 0  # steps

    def __call__(self, metrics: StepMetrics) -> None:
        """Take the metrics of the next step."""
        number = self._seen
        self._seen += 1
        if number % self._every == 0 and (self._window is None or self._window[0] <= number < self._window[1]):
            _make_visible()
            _log.info("%s", log_line(metrics))


def _make_visible() -> None:
    # The root logger often has a handler that nobody asked for, because a library has called `logging.info`.
    if _log.level == logging.NOTSET and _log.getEffectiveLevel() > logging.INFO:
        _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        _log.addHandler(handler)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _short(load: int) -> str:
    """Return 99999 as 99,999 and 123456 as 1.2e5."""
    if load < 100_000:
        return f"{load:,}"
    mantissa, exponent = f"{load:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
