"""Steps between `start` and `finish`, and those that a Balancer starts ahead of the one that trains.

Metadata is gathered for several steps at once: an all-gather takes as long for 8 as for one. So batches are loaded
ahead of it, one for each step that is handed out, and a step is started with the others of its group:

    lookahead = 2     loaded before it     started with them
    step 0            0 1                  0, 1
    step 1            2 3                  2, 3
    step 3            4 .. 7               4 .. 7
    step 9            8 .. 15              8 .. 15, and so on in groups of 8
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.exchange.exchange import PreparedStep, StepInFlight
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics
from evenrank.dataloader.balance.ranks.connection import check_process
from evenrank.dataloader.balance.ranks.metadata import MAX_STEPS
from evenrank.dataloader.batches.batch import JaggedBatch

State = Literal["started", "launched", "finished"]


@dataclass(slots=True, eq=False)
class Handle:
    """A step between `start` and `finish`."""

    loaded: JaggedBatch | None
    """This rank's batch before balancing, on the CPU; None once the rank has no more."""
    error: Exception | None = None
    """What the loader has raised instead or, once the step is planned, what it ends with."""
    _: KW_ONLY
    state: State = "started"
    group: Future[None] = field(init=False, repr=False)
    """Once it is started: done once all steps that were started with it are planned, in the background."""
    prepared: PreparedStep | None = None
    """The exchange, ready to be launched, once it is planned; None if no rank has batches left."""
    metrics: StepMetrics | None = None
    """If they are measured; the times of the exchange are 0."""
    in_flight: StepInFlight | None = None
    """The exchange, once it is launched."""
    batch: JaggedBatch | None = None
    """The balanced batch, once it is finished."""
    waited_seconds: float = 0.0
    """See `StepMetrics`, also for the next one."""
    exchange_seconds: float = 0.0
    process: int = field(default_factory=os.getpid)
    """Id of the process that started it."""

    def check(self, call: str, needed: State) -> None:
        """Raise a ConfigError unless a call comes after the one that it needs, and once."""
        if self.state != needed:
            found = "only started" if self.state == "started" else f"already {self.state}"
            raise ConfigError(f"{call}() needs a {needed} step; this step is {found}")

    def await_plan(self) -> PreparedStep | None:
        """Wait for the plan of the step and return its exchange, or raise its error."""
        check_process(self.process)
        self.group.result()
        if self.error is not None:
            raise self.error
        return self.prepared


class StepsAhead:
    """The steps of an iteration, in order, of which `lookahead` are started ahead of the one that is taken."""

    def __init__(self, load: Callable[[], Handle], start: Callable[[Sequence[Handle]], None], lookahead: int) -> None:
        self._load = load
        self._start = start
        self._lookahead = lookahead
        self._loaded: list[Handle] = []
        self._num_started = 0
        self.started: deque[Handle] = deque()

    def take(self) -> Handle:
        """Return the next step. Collective: every rank must call this."""
        if len(self.started) >= self._lookahead and len(self._loaded) < self._next_group - 1:
            self._load_one()
        while len(self.started) < self._lookahead:
            self._load_one()
        return self.started.popleft()

    @property
    def _next_group(self) -> int:
        return min(max(self._num_started, 1), MAX_STEPS)

    def _load_one(self) -> None:
        self._loaded.append(self._load())
        if len(self._loaded) == self._next_group:
            self._start(self._loaded)
            self.started.extend(self._loaded)
            self._num_started += len(self._loaded)
            self._loaded = []


def drain(handles: Iterable[Handle]) -> None:
    """Wait for plans, and for collectives on the CPU, whose results no longer matter, so that all ranks stay in step.

    On a GPU, collectives follow each other on their stream without the host.
    """
    for handle in handles:
        with contextlib.suppress(Exception):
            handle.await_plan()
            if handle.in_flight is not None and handle.in_flight.work is not None:
                handle.in_flight.work.wait()
