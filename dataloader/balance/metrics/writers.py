"""Write the metrics of a training job: to a file of JSON lines, TensorBoard, any function, or the log for people.

A writer is the `on_step` of a `BalanceConfig`, usually on rank 0 only, because only the times differ between ranks:

    with JsonLines("out/balance.jsonl") as log, Balancer(loader, BalanceConfig(cost=cost, on_step=log)) as balancer:
        ...

A `training.StepTimer` passes steps on to any number of writers, with their measured times.
"""

import contextlib
import dataclasses
import json
import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from typing import Any, Protocol, Self, runtime_checkable

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.optional_imports import naming_extras
from evenrank.core.rules import Count
from evenrank.core.settings import check_types
from evenrank.core.storage import is_url, local_path
from evenrank.dataloader.balance.costs.measured_cost import MeasuredCost
from evenrank.dataloader.balance.metrics.log import LogRecord, RunRecord
from evenrank.dataloader.balance.metrics.step_metrics import RankTimes, StepMetrics, shown_numbers, summarize

_log = logging.getLogger("evenrank")


@runtime_checkable
class BeginsRun(Protocol):
    """An `on_step` that receives the options of the run before its first step; optional."""

    def begin(self, options: Mapping[str, Any]) -> None:
        """Take the options of the balance, and of the loader as `data`; values can be of any type."""


@runtime_checkable
class KeepsTimes(Protocol):
    """An `on_step` that measures the times of all ranks, to which the cost is fitted: a `training.StepTimer`."""

    cost: MeasuredCost | None
    """The one fitted last."""

    @property
    def takes_steps(self) -> bool:
        """Whether it takes steps on this rank, whose metrics are then computed; on all ranks it measures them."""

    def keep(self, steps: int, *, world_size: int) -> None:
        """Forget the steps so far, and keep the last ones from now on, at most so many; those of rank 0 are read.

        A ConfigError if it measures other ranks than these.
        """

    def kept(self) -> RankTimes:
        """Return the times of the measured steps that are kept; any thread may call it."""


class Writer(ABC):
    """Writes numbers after every `every` steps, over the last `window` steps.

    Args:
        every: steps from one record to the next.
        window: steps that a record summarizes.
    """

    def __init__(self, every: Count, window: Count) -> None:
        check_types(Writer, locals(), type(self).__name__)
        self._every = every
        self._last_steps: deque[StepMetrics] = deque(maxlen=window)
        self._options: Mapping[str, Any] = {}
        self._seen = 0  # steps
        self._closed = False

    def begin(self, options: Mapping[str, Any]) -> None:
        """Take the options of the run; see `BeginsRun`."""
        self._options = {**self._options, **options}

    def __call__(self, metrics: StepMetrics) -> None:
        """Take the metrics of the next step. A DataError if a record cannot be written; the writer is closed then."""
        if self._closed:
            raise ConfigError(f"this {type(self).__name__} is closed; create a new one")
        self._last_steps.append(metrics)
        self._seen += 1
        if self._seen % self._every == 0:
            self._write(tuple(self._last_steps))

    def close(self) -> None:
        """Stop writing; steps since the last record are dropped. Closing twice does nothing."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def _write(self, steps: Sequence[StepMetrics]) -> None: ...


class JsonLines(Writer):
    """Writes one line of JSON per record to a file of its own; `evenrank metrics FILE` shows it.

    The first line is the run, see `log`. A line takes about 1 kB, 60 bytes more for each rank, and 5 for each
    row of a batch. Each line is passed to the operating system at once, so a killed job loses none. If the file exists,
    it belongs to another run, and this run gets a file with a number: log-2.jsonl for log.jsonl. Missing parent folders
    are created.

    Args:
        path: of the file; the attribute `path` has the number.
        every: number of steps that a record summarizes.
        options: further options to record with the run: any values that JSON can express.

    Raises:
        ConfigError: `every` is below 1.
        DataError: the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every, every)
        if is_url(text := os.fspath(path)):
            raise DataError(f"{text} is a URL; write the log to a file of this host, and copy it there")
        self.path = local_path(text)
        self._options = options or {}
        try:
            with contextlib.suppress(FileExistsError):  # if the parent is a file, creating the log reports it
                self.path.parent.mkdir(parents=True)
            self._file = self._create()
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {_reason(error)}; choose another file") from error

    def _create(self) -> FileIO:
        first, number = self.path, 1
        while True:
            try:
                return FileIO(self.path, "x")  # unbuffered, so that nothing is lost when the process is killed
            except FileExistsError:
                if self.path.is_dir():
                    raise
                number += 1
                self.path = first.with_stem(f"{first.stem}-{number}")

    def close(self) -> None:
        """Close the file; steps since the last record are dropped."""
        super().close()
        self._file.close()

    def _write(self, steps: Sequence[StepMetrics]) -> None:
        record = LogRecord.of(steps, seen=self._seen)
        lines = [record.to_json()]
        if self._seen == self._every:
            lines.insert(0, RunRecord.begin(len(record.before), self._options).to_json())
        remaining = memoryview("".join(f"{json.dumps(line, default=str)}\n" for line in lines).encode())
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self.close()  # the next record would continue a half-written line
            raise DataError(
                f"{self.path} could not be written: {_reason(error)}; free some space, or train without the log"
            ) from error


class Scalars(Writer):
    """Passes the numbers that people look at, named `balance/...`, to a function, such as that of a tracker.

    Steps are counted from 1, so a resumed job should log another run.

    Args:
        log: called with the numbers by name and the steps that this writer has seen.
        every: see `Writer`.
        window: see `Writer`.

    Raises:
        ConfigError: `every` or `window` is below 1, or `log` is not a function.
    """

    def __init__(self, log: Callable[[dict[str, float], int], object], *, every: int = 10, window: int = 100) -> None:
        super().__init__(every, window)
        check_types(Scalars, {"log": log})
        self._log = log

    def _write(self, steps: Sequence[StepMetrics]) -> None:
        self._log({f"balance/{name}": value for name, value in shown_numbers(summarize(steps)).items()}, self._seen)


class TensorBoard(Scalars):
    """Writes scalars for TensorBoard; give a resumed job a folder of its own, which TensorBoard shows as another run.

    Args:
        log_dir: folder of the event file; created if missing.
        every: see `Writer`.
        window: see `Writer`.

    Raises:
        ConfigError: `every` or `window` is below 1.
        MissingPackageError: the package `tensorboard` is not installed.
        DataError: the folder cannot be written.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, every: int = 10, window: int = 100) -> None:
        super().__init__(self._add_scalars, every=every, window=window)
        with naming_extras():
            from torch.utils.tensorboard import SummaryWriter
        self._log_dir = log_dir
        try:
            self._events = SummaryWriter(str(log_dir))
        except OSError as error:
            raise DataError(f"{log_dir} cannot be written: {_reason(error)}; choose another folder") from error

    def close(self) -> None:
        """Write pending scalars and close the event file."""
        super().close()
        self._events.close()

    def _add_scalars(self, numbers: dict[str, float], step: int) -> None:
        try:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, step)
        except OSError as error:
            self._closed = True
            raise DataError(
                f"{self._log_dir} could not be written: {_reason(error)}; free some space, or train without the log"
            ) from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def log_line(metrics: StepMetrics, *, with_loads: bool = False) -> str:
    """Describe a step in one line, before balancing -> after balancing.

    epoch 0 step 100: idle 31.2% -> 0.1%, speed-up 1.35x, 1.352 -> 1.001 x lower bound, moved 312 of 4,210 tokens, ...

    Idle is the predicted share of rank time that waits for the heaviest rank, and the lower bound is that of the
    heaviest load. With loads, those of all ranks follow, in units of the cost.
    """
    summary = summarize([dataclasses.replace(metrics, is_balanced=True)])
    line = (
        f"epoch {metrics.epoch} step {metrics.step}: idle {summary.idle_before:.1%} -> {summary.idle_after:.1%}, "
        f"speed-up {summary.speedup:.2f}x, {metrics.ratio_before:.3f} -> {metrics.ratio_after:.3f} x lower bound, "
        f"moved {metrics.moved_tokens:,} of {metrics.tokens:,} tokens, "
        f"plan {1e3 * metrics.plan_seconds:.1f} ms, exchange {1e3 * metrics.exchange_seconds:.1f} ms"
    )
    if with_loads:
        before, after = (" ".join(f"{load:.4g}" for load in loads) for loads in (metrics.before, metrics.after))
        line += f"; loads {before} -> {after}"
    return line if metrics.is_balanced else f"{line} (left unbalanced)"


class StepLogger:
    """Logs a line for the steps 0, every, 2 * every, ..., counted over all epochs, through the logger `evenrank`.

    With a window (start, stop), only for the steps start..stop-1. Lines are visible although Python logs only warnings
    by default: the logger gets the level INFO unless it has one, and a handler if there is none.
    """

    def __init__(self, *, every: int, window: tuple[int, int] | None = None, with_loads: bool = False) -> None:
        self._every = every
        self._with_loads = with_loads
        self._window = window
        self._seen = 0  # steps

    def __call__(self, metrics: StepMetrics) -> None:
        """Take the metrics of the next step."""
        number = self._seen
        self._seen += 1
        if number % self._every == 0 and (self._window is None or self._window[0] <= number < self._window[1]):
            say(log_line(metrics, with_loads=self._with_loads))


def say(line: str) -> None:
    """Log a line for people, which is visible although Python logs only warnings by default."""
    # The root logger often has a handler that nobody asked for, because a library has called `logging.info`.
    if _log.level == logging.NOTSET and _log.getEffectiveLevel() > logging.INFO:
        _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        _log.addHandler(handler)
    _log.info("%s", line)
