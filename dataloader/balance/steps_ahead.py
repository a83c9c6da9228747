"""`StepsAhead`: the steps that a Balancer starts ahead of the one that trains.

Metadata is gathered for several steps at once: an all-gather takes as long for 8 as for one. So batches are loaded
ahead of it, one for each step that is handed out, and a step is started with the others of its group:

    lookahead = 2     loaded before it     started with them
    step 0            0 1                  0, 1
    step 1            2 3                  2, 3
    step 3            4 .. 7               4 .. 7
    step 9            8 .. 15              8 .. 15, and so on in groups of 8

Windows are groups of `window` steps, and packed steps are made of groups of 8. Which steps become of such a group is
known once it is planned, so this is awaited when no other step is left.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from evenrank.dataloader.balance.config import MAX_STEPS, BalanceConfig
from evenrank.dataloader.balance.exchange.exchange import Handle


class StepsAhead:
    """The steps of an iteration, in order, of which `lookahead` are started ahead of the one that is taken.

    `await_steps` returns what the steps of a group have become, where they make others.
    """

    def __init__(
        self,
        load: Callable[[], Handle],
        start: Callable[[Sequence[Handle]], None],
        config: BalanceConfig,
        await_steps: Callable[[Handle], Sequence[Handle]],
    ) -> None:
        self._load = load
        self._start = start
        self._config = config
        self._await_steps = await_steps
        self._loaded: list[Handle] = []
        self._num_started = 0
        self._ready: deque[Handle] = deque()
        self._groups: deque[list[Handle]] = deque()  # started, of which steps are made

    def take(self) -> Handle:
        """Return the next step. Collective: every rank must call this."""
        if self._num_ahead >= self._config.lookahead and len(self._loaded) < self._next_group - 1:
            self._load_one()
        while (is_short := self._num_ahead < self._config.lookahead) or not self._ready:
            if is_short:
                self._load_one()
            else:
                self.await_group()
        return self._ready.popleft()

    @property
    def _num_ahead(self) -> int:
        return len(self._ready) + sum(map(len, self._groups))

    @property
    def started(self) -> list[Handle]:
        """The steps that are not taken yet; of groups that are not awaited, those that were loaded."""
        return [*self._ready, *(step for group in self._groups for step in group)]

    def await_group(self) -> bool:
        """Wait for what the next group has become; return whether there was one."""
        if not self._groups:
            return False
        self._ready.extend(self._await_steps(self._groups[0][0]))
        self._groups.popleft()
        return True

    @property
    def _next_group(self) -> int:
        if self._config.makes_steps:
            return MAX_STEPS if self._config.pack else self._config.window
        return min(max(self._num_started, 1), MAX_STEPS)

    def _load_one(self) -> None:
        self._loaded.append(self._load())
        if len(self._loaded) == self._next_group:
            self._start(self._loaded)
            if self._config.makes_steps:
                self._groups.append(self._loaded)
            else:
                self._ready.extend(self._loaded)
            self._num_started += len(self._loaded)
            self._loaded = []


def drain(handles: Iterable[Handle]) -> None:
    """Wait for plans, and for collectives on the CPU, whose results no longer matter, so that all ranks stay in step.

    On a GPU, collectives follow each other on their stream without the host.
    """
    for handle in handles:
        with contextlib.suppress(Exception):
            handle.await_plan()
            if handle.work is not None:
                handle.work.wait()
