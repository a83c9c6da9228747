"""`PlanCheck`: compares what ranks have planned where each plans alone, through the store of their process group.

A cost or a strategy that returns something else on one rank, such as a cost fitted to that rank's own times, leaves out
some samples and trains others twice, without an error anywhere. Comparing every step would take a collective in each.
So each rank keeps a running hash of its plans, which is compared without waiting when an epoch begins and when a state
is asked for, and with all ranks when an epoch ends. The rank that comes first to such a point has nothing to compare
with; it learns of a difference from the note that the others leave, at the next one.
"""

import time
from datetime import timedelta

from evenrank.core.errors import RankError
from evenrank.dataloader.balance.control.deadline import within
from evenrank.dataloader.balance.control.process_group import Members

_WAIT = timedelta(seconds=10)  # at a time, because a client of a TCPStore serves no other thread while it waits
_NOTE = "difference"
_MASK = (1 << 61) - 1


class PlanCheck:
    """The plans of one rank since its loader was created.

    Args:
        members: the ranks; None, or without a store: nothing is compared.
        timeout: how long the end of an epoch waits for other ranks.

    """

    def __init__(self, members: Members | None, timeout: timedelta) -> None:
        self._members = members
        self._store = None if members is None or members.store is None else members.substore("plans")
        self._timeout = timeout
        self._steps = 0
        self._hash = 0
        self._agreed_steps = 0  # when all ranks were compared last
        self._epochs = 0  # that this rank has begun or ended, each of which counts

    def add(self, plan_hash: int) -> None:
        """Add the plan of the next step that is handed out, given a hash of it."""
        self._steps += 1
        self._hash = (self._hash * 1_000_003 + plan_hash) & _MASK

    def begin_epoch(self, epoch: int, num_steps: int) -> None:
        """Compare the plans so far, and the number of steps of an epoch, with ranks that have begun it.

        Raises:
            RankError: they differ.

        """
        self._epochs += 1
        self._compare(f"epochs/{self._epochs}", f"at the start of epoch {epoch} of {num_steps} steps")

    def end_epoch(self, epoch: int) -> None:
        """Wait for all ranks, and compare the plans so far. Collective: every rank must call this.

        Raises:
            RankError: they differ, or a rank has not come in time; on every rank.

        """
        if (store := self._store) is None:
            return
        assert self._members is not None
        self._epochs += 1
        key, world_size = f"epochs/{self._epochs}", self._members.world_size
        self._compare(key, f"at the end of epoch {epoch}")

        def wait() -> None:
            if store.add(f"{key}/ranks", 1) == world_size:
                store.set(f"{key}/complete", "")
            deadline = time.monotonic() + self._timeout.total_seconds()
            while (left := deadline - time.monotonic()) > 0:
                try:
                    return store.wait([f"{key}/complete"], min(_WAIT, timedelta(seconds=left)))
                except RuntimeError:  # not yet complete, or the store is lost, in which case the next call raises
                    if store.check([_NOTE]):
                        raise RankError(store.get(_NOTE).decode()) from None
            missing = world_size - store.add(f"{key}/ranks", 0)
            raise RankError(
                f"{missing} of {world_size} ranks have not reached the end of epoch {epoch} within {self._timeout}; "
                "leave loops at the same step on all ranks, or raise timeout"
            )

        within(self._timeout, wait)
        self._agreed_steps = self._steps

    def compare(self) -> None:
        """Compare the plans so far with those of ranks that have done so after as many steps.

        Raises:
            RankError: they differ.

        """
        self._compare(f"steps/{self._steps}", "in an epoch")

    def _compare(self, key: str, where: str) -> None:
        if (store := self._store) is None:
            return
        assert self._members is not None
        rank, where = self._members.rank, f"{where}, after {self._steps} steps"
        mine = f"{rank}|{where}|{self._hash}"

        def exchange() -> list[str]:
            note = store.get(_NOTE).decode() if store.check([_NOTE]) else ""
            return [note, *store.compare_set(key, "", mine).decode().split("|")]

        note, first, where_of_first, hash_of_first = within(_WAIT, exchange)
        if not note and where_of_first != where:
            note = (
                f"ranks are out of step: rank {first} is {where_of_first}, rank {rank} {where}; iterate over the same "
                "epochs, load the same state, and leave loops at the same step on all ranks"
            )
        if not note and hash_of_first != str(self._hash):
            note = (
                f"ranks {first} and {rank} have planned steps differently, which are among the last "
                f"{self._steps - self._agreed_steps}: samples were left out or trained twice; make the cost and the "
                "strategy return the same on all ranks, or use a Balancer, which gathers costs, and resume from an "
                "earlier checkpoint"
            )
        if note:
            within(_WAIT, lambda: store.compare_set(_NOTE, "", note))
            raise RankError(note)
