"""`CostSchedule`: which cost plans which step of a job; with `refit_every`, the cost is fitted while the job trains.

    steps of the job    0 .. N-1         N .. 2N-1          2N .. 3N-1         N = refit_every
    planned by          the config's     after decision 1   after decision 2

Rank 0 decides, from the times of all ranks in the steps that are measured by then, whether a cost that is fitted to
them replaces the one before. A decision depends on times, so it is made once, and all ranks get it through the store of
their group. It is made when rank 0 plans a step that needs it, for which rank 0 waits for nobody: so no rank waits for
a decision that waits for it, however far each of them plans ahead.
"""

import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, RankError
from evenrank.dataloader.balance.config import DEFAULT_TIMEOUT, BalanceConfig
from evenrank.dataloader.balance.costs.cost import Cost
from evenrank.dataloader.balance.costs.measured_cost import OUTLIER, MeasuredCost, deviation, fit_robustly
from evenrank.dataloader.balance.costs.model_costs import counted_tokens
from evenrank.dataloader.balance.metrics.step_metrics import RankTimes
from evenrank.dataloader.balance.metrics.writers import KeepsTimes, say
from evenrank.dataloader.balance.ranks.process_group import Members, within

# Steps are kept until they have so many times of ranks, which take 0.1 s to fit; a cost that is nearly right is told
# from the right one by many times alone. Of many ranks, so many steps at least, because these tell the scale.
_KEPT_TIMES, _LEAST_KEPT_STEPS = 1 << 14, 64
_MIN_GAIN = 2.0  # standard errors
_SHORTEST_WAIT, _LONGEST_WAIT = 1e-3, 0.25  # seconds from one look into the store to the next

# An interpreter that ends first waits for its threads, also for those that wait for a rank that waits for this one.
_program_ends = threading.Event()
threading._register_atexit(_program_ends.set)  # type: ignore[attr-defined]


class CostSchedule:
    """The costs of the steps of a job, the same on all ranks. Any thread may call it.

    A copy in another process, by a pickle or a fork, keeps the cost that it has.
    """

    def __init__(
        self,
        cost: Cost,
        *,
        every: int | None = None,
        timer: KeepsTimes | None = None,
        members: Members | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self._costs = [cost]  # after each number of decisions
        self._every = every
        self._timer = timer
        self._members = members or Members(rank=0, world_size=1, store=None)
        self._store = None if self._members.store is None else self._members.substore("costs")
        self._timeout = timeout
        self._lock = threading.Lock()
        self._process = os.getpid()
        if timer is not None:
            world_size = self._members.world_size
            timer.keep(max(_KEPT_TIMES // world_size, _LEAST_KEPT_STEPS), world_size=world_size)

    @classmethod
    def of(cls, config: BalanceConfig, members: Members | None, world_size: int) -> Self:
        """Return the costs of a job of `world_size` ranks; `members` None: they have no process group.

        Raises:
            ConfigError: the cost is to be fitted, and `on_step` measures no times, or ranks cannot share them.
        """
        if config.refit_every is None:
            return cls(config.cost)
        if world_size > 1 and (members is None or members.store is None):
            raise ConfigError(
                f"refit_every={config.refit_every} needs a process group, through which ranks share their times; call "
                "torch.distributed.init_process_group before"
            )
        if not isinstance(config.on_step, KeepsTimes):
            raise ConfigError(
                f"refit_every={config.refit_every} needs the times of all ranks, but on_step is "
                f"{type(config.on_step).__name__}; pass on_step=StepTimer(*writers), on every rank"
            )
        return cls(config.cost, every=config.refit_every, timer=config.on_step, members=members, timeout=config.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.latest,)

    @property
    def latest(self) -> Cost:
        """The cost after the decisions that this rank knows."""
        return self._costs[-1]

    @property
    def can_change(self) -> bool:
        """Whether there are decisions."""
        return self._every is not None

    def decisions(self, step: int) -> int:
        """Return how many decisions come before a step of the job, which are counted from 0."""
        return 0 if self._every is None else step // self._every

    def after(self, decisions: int, left: threading.Event | None = None) -> Cost:
        """Return the cost after a number of decisions, of which rank 0 makes those that are missing.

        Other ranks wait for them; a RankError if they have waited for the config's `timeout`, or once the iteration
        that needs the cost is `left`, or the program ends.
        """
        if decisions >= len(self._costs) and self._process == os.getpid():
            with self._lock:
                while decisions >= len(self._costs):
                    self._costs.append(self._next(left or threading.Event()))
        return self._costs[min(decisions, len(self._costs) - 1)]

    def decide(self, step: int) -> int:
        """Make the decisions before a step on rank 0, and return how many there are; on other ranks 0.

        If rank 0 tells them how many there are, none waits for it, which may have failed.
        """
        if self._members.rank > 0:
            return 0
        self.after(decisions := self.decisions(step))
        return decisions

    def _next(self, left: threading.Event) -> Cost:
        number = len(self._costs)
        if self._members.rank == 0:
            text = self._decide(number)
            if self._store is not None:
                within(self._timeout, partial(self._store.set, str(number), text))
        else:
            text = self._await(number, left)
        if not text:
            return self.latest
        assert self._timer is not None
        self._timer.cost = cost = MeasuredCost.from_text(text)
        return cost

    def _decide(self, number: int) -> str:
        """Return a fitted cost as text; empty: the cost stays."""
        assert self._timer is not None
        assert self._every is not None
        step = number * self._every
        try:
            fitted = refit(self.latest, self._timer.kept(), counted_tokens(self._costs[0]) or {})
        except ConfigError as error:
            say(f"step {step}: the cost stays as it is: {error}")
            return ""
        per_token, per_square = fitted.linear * fitted.seconds_per_unit, fitted.quadratic * fitted.seconds_per_unit
        say(
            f"step {step}: the cost is fitted to {fitted.steps:,} times: {1e3 * fitted.seconds_per_step:.3g} ms per "
            f"step, {1e6 * per_token:.3g} us per token, {1e9 * per_square:.3g} ns per squared token, "
            f"r2 {fitted.r2:.2f}"
        )
        return fitted.to_text()

    def _await(self, number: int, left: threading.Event) -> str:
        """Wait for a decision of rank 0, in pauses between which other threads of this rank use the store."""
        assert self._store is not None
        assert self._every is not None
        key, pause, deadline = str(number), _SHORTEST_WAIT, time.monotonic() + self._timeout.total_seconds()
        while not within(self._timeout, partial(self._store.check, [key])):
            if time.monotonic() > deadline:
                raise RankError(
                    f"rank 0 has not planned step {number * self._every}, before which it fits the cost, within "
                    f"{self._timeout}; train equally many steps on all ranks, or raise timeout"
                )
            if left.wait(pause) or _program_ends.is_set():
                raise RankError(f"step {number * self._every} was not planned before this rank left the iteration")
            pause = min(2 * pause, _LONGEST_WAIT)
        return within(self._timeout, partial(self._store.get, key)).decode()


def refit(cost: Cost, times: RankTimes, counted: Mapping[str, Any]) -> MeasuredCost:
    """Return a cost that is fitted to the times of ranks, where it tells them apart better than the cost of now does.

    Where ranks are balanced, their times differ by what the cost does not know, and by chance. So what counts is what a
    cost leaves unexplained of the differences between the ranks of a step. R^2 is no measure: it is low where steps
    are so large that they are all alike, although their many times say precisely how to weigh tokens and squares.

    Args:
        cost: that has planned the steps, at least if it is not measured itself.
        times: of measured steps.
        counted: how tokens are counted, see `counted_tokens`.

    Raises:
        ConfigError: the cost is to stay; the message says why.
    """
    tokens, squares, seconds = times.tokens.ravel(), times.squares.ravel(), times.seconds.ravel()
    fitted = MeasuredCost.fit_sums(tokens, squares, seconds, min_r2=0.0, **counted)
    loads = _loads(cost, times) if isinstance(cost, MeasuredCost) else times.loads
    sums = np.stack([np.ones(loads.size), loads.ravel()], axis=1)
    now, then = (
        _between_ranks(times.seconds - predicted)
        for predicted in (fit_robustly(sums, seconds)[1] * loads, _loads(fitted, times) * fitted.seconds_per_unit)
    )
    # A rank that was interrupted is far off by either cost.
    limit = OUTLIER * deviation(then.ravel(), seconds)
    now, then = (np.square(np.clip(errors, -limit, limit)).sum(axis=1) for errors in (now, then))
    gain, error = float((now - then).mean()), float((now - then).std()) / np.sqrt(len(now))
    if not gain > _MIN_GAIN * error:
        share = max(gain, 0.0) / max(float(now.mean()), np.finfo(float).tiny)
        raise ConfigError(
            f"a cost fitted to {len(seconds):,} times explains {share:.1%} more of the differences between ranks, "
            "which may be chance"
        )
    return fitted


def _loads(cost: MeasuredCost, times: RankTimes) -> NDArray[np.float64]:
    loads: NDArray[np.float64] = float(cost.linear) * times.tokens + float(cost.quadratic) * times.squares
    return loads


def _between_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the differences between the ranks of a step, [n, W], without those that are the same in all steps."""
    differences = values - values.mean(axis=1, keepdims=True)
    without_slower_ranks: NDArray[np.float64] = differences - np.median(differences, axis=0)
    return without_slower_ranks
