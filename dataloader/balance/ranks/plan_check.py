"""`PlanCheck`: without an exchange, ranks plan alone, and their plans are compared now and then.

A cost or a strategy that returns something else on one rank, such as a cost fitted to that rank's own times, leaves out
some samples, and others are trained on twice, without an error anywhere. So each rank keeps a running hash of its
plans, which is compared through the store: without waiting when an epoch begins and when a state is asked for, and with
all ranks when an epoch ends. The rank that comes first to such a point has nothing to compare with; it learns of a
difference from the note that the others leave, at the next one.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from evenrank.core.errors import RankError, RankLostError, one_line
from evenrank.dataloader.balance.ranks.agree import SAME_STEPS
from evenrank.dataloader.balance.ranks.loss_scaling import SCALING
from evenrank.dataloader.balance.ranks.process_group import Members, within

Batch = TypeVar("Batch")

_WAIT = timedelta(seconds=1)  # at a time, because a client of a TCPStore serves no other thread while it waits
_NOTE = "difference"
_MASK = (1 << 61) - 1


@dataclass(kw_only=True, slots=True)
class PlannedIteration:
    """The plans of one iteration over a loader; a thread that reads ahead may add to an abandoned one."""

    number: int  # how many iterations this rank has begun, this one included
    epoch: int  # epoch that it iterates over
    plans: tuple[int, int] = (0, 0)  # steps that were handed out, and a hash of their plans

    def add(self, plan_hash: int) -> None:
        """Add the plan of the next step that is handed out, given a hash of it."""
        steps, total = self.plans
        self.plans = steps + 1, (total * 1_000_003 + plan_hash) & _MASK


class PlanCheck:
    """Compares the plans of one rank with those of the others, or raises a RankError.

    Does nothing in another process than its own, and if there is only one rank; `timeout` is for the end of an epoch.
    """

    def __init__(self, members: Members | None, timeout: timedelta) -> None:
        self._members = members or Members(rank=0, world_size=1, store=None)
        self._timeout = timeout
        self._process = os.getpid()  # a fork shares the connection to the store
        self._latest = PlannedIteration(number=0, epoch=0)

    def _store(self) -> Store | None:
        is_alone = self._members.store is None or self._process != os.getpid()
        return None if is_alone else self._members.substore("plans")

    def begin_epoch(self, epoch: int, num_steps: int) -> PlannedIteration:
        """Compare the steps of an iteration with those of ranks that have begun it."""
        self._latest = iteration = PlannedIteration(number=self._latest.number + 1, epoch=epoch)
        where = f"at the start of epoch {epoch} with {num_steps} steps"
        self._compare(f"{iteration.number}/start", where, 0, self._timeout)
        return iteration

    def end_epoch(self, iteration: PlannedIteration) -> None:
        """Wait for all ranks, and compare the plans of the iteration. Collective: every rank must call this."""
        if (store := self._store()) is None:
            return
        world_size, epoch = self._members.world_size, iteration.epoch
        self._compare(f"{iteration.number}/end", f"at the end of epoch {epoch}", iteration.plans[1], self._timeout)
        ranks, complete = (f"{iteration.number}/{name}" for name in ("ranks", "complete"))

        def wait() -> None:
            if store.add(ranks, 1) == world_size:
                store.set(complete, "")
            deadline = time.monotonic() + self._timeout.total_seconds()
            while time.monotonic() < deadline:
                try:
                    return store.wait([complete], _WAIT)
                except RuntimeError:  # not yet complete, or the store is lost, in which case the next call raises
                    for note in (_NOTE, f"{iteration.number}/{_NOTE}"):
                        if store.check([note]):
                            raise RankError(store.get(note).decode()) from None
            raise RankError(
                f"{world_size - store.add(ranks, 0)} of {world_size} ranks have not reached the end of epoch {epoch} "
                f"within {self._timeout}; leave loops at the same step on all ranks, or raise timeout"
            )

        within(self._timeout + _WAIT, wait)

    def telling(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of an iteration, and tell its error to the ranks that wait at its end."""
        try:
            for batch in batches:
                SCALING.watch()
                yield batch
        except Exception as error:
            if (store := self._store()) is not None:
                key = f"{self._latest.number}/{_NOTE}"
                text = f"rank {self._members.rank} failed: {one_line(error)}"
                with contextlib.suppress(RuntimeError):  # the store is lost
                    within(10 * _WAIT, lambda: store.compare_set(key, "", text))
            raise

    def compare(self) -> None:
        """Compare the plans so far with those of ranks that have done so after as many steps, if the store answers."""
        iteration = self._latest
        with contextlib.suppress(RankLostError):  # a state of this rank needs no other one
            steps, total = iteration.plans
            where = f"in epoch {iteration.epoch} after {steps} steps"
            self._compare(f"{iteration.number}/steps/{steps}", where, total, 10 * _WAIT)

    def _compare(self, key: str, where: str, total: int, timeout: timedelta) -> None:
        if (store := self._store()) is None:
            return
        rank = self._members.rank

        def exchange() -> tuple[str, str]:
            note = store.get(_NOTE).decode() if store.check([_NOTE]) else ""
            return note, store.compare_set(key, "", f"{rank}|{where}|{total}").decode()

        note, first = within(timeout, exchange)
        other, where_of_other, total_of_other = first.split("|")
        if not note and where_of_other != where:
            note = f"ranks are out of step: rank {other} is {where_of_other}, rank {rank} {where}; {SAME_STEPS}"
        if not note and total_of_other != str(total):
            note = (
                f"ranks {other} and {rank} have planned steps differently, {where}: samples were "
                "left out or trained on twice; make the cost and the strategy return the same on all ranks, or use a "
                "Balancer, which gathers costs, and resume from an earlier checkpoint with new loaders"
            )
        if note:
            # All ranks raise the first note.
            raise RankError(within(timeout, lambda: store.compare_set(_NOTE, "", note)).decode())
