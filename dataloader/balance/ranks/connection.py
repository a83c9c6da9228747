"""What ranks tell each other besides their steps: that they are there, that one failed, that they plan alike.

A Balancer's connection to the other ranks is opened and closed as a whole, and closed with a reason after an error.

Without an exchange, ranks plan alone, and their plans are compared now and then. A cost or a strategy that returns
something else on one rank, such as a cost fitted to that rank's own times, leaves out some samples, and others are
trained on twice, without an error anywhere. So each rank keeps a running hash of its plans, which is compared through
the store: without waiting when an epoch begins and when a state is asked for, and with all ranks when an epoch ends.
The rank that comes first to such a point has nothing to compare with; it learns of a difference from the note that the
others leave, at the next one.

Either way a batch is handed out whose loss is to be scaled, which `SCALING` watches.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.optim.optimizer import register_optimizer_step_post_hook

from evenrank.core.errors import ConfigError, RankError, RankLostError, one_line
from evenrank.dataloader.balance.ranks.agree import SAME_STEPS
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Members, within

_KEY = "reason"
_WAIT = timedelta(seconds=2)
_POLL = timedelta(seconds=1)  # at a time, because a client of a TCPStore serves no other thread while it waits
_NOTE = "difference"
_MASK = (1 << 61) - 1

Batch = TypeVar("Batch")
Result = TypeVar("Result")


def check_process(process: int) -> None:
    """Raise a ConfigError in a fork of a process: it has none of the threads, and would wait for them forever."""
    if process != os.getpid():
        raise ConfigError("the Balancer was created before this process was forked; create one after that")


class FailureNote:
    """Why a rank left: written to the store by the first rank that fails alone, read by the ranks that then lose it."""

    def __init__(self, members: Members) -> None:
        self._rank = members.rank
        self._store = None if members.store is None else members.substore("failure")

    def write(self, error: Exception) -> None:
        """Leave the reason, unless another rank has left one before."""
        if (store := self._store) is not None:
            # The store is lost if the process that serves it is; then there is nobody to tell.
            with contextlib.suppress(RuntimeError):
                within(_WAIT, lambda: store.compare_set(_KEY, "", f"rank {self._rank} failed: {one_line(error)}"))

    def read(self) -> str | None:
        """Return the reason of the first rank that failed; None if none has left one."""
        if (store := self._store) is None:
            return None

        def read() -> str:
            store.wait([_KEY], _WAIT)
            return store.get(_KEY).decode()

        with contextlib.suppress(RuntimeError):
            return within(_WAIT, read)
        return None


class Connection:
    """The communicators of a Balancer, and the background thread that all-gathers.

    The metadata all-gather and the exchange of different steps overlap, so each has a communicator of its own.

    Collective: every rank must call the constructor. `backend` is that of the exchange, and `use_in_thread` is
    called once in the background thread.
    """

    def __init__(
        self,
        members: Members,
        timeout: timedelta,
        backend: str,
        use_in_thread: Callable[[], None],
    ) -> None:
        self._failure_note = FailureNote(members)
        self._failure: str | None = None  # the error that closed it
        self._is_closed = False
        self._process = os.getpid()
        # One thread, so that all-gathers of successive steps keep their order.
        self._background = ThreadPoolExecutor(1, thread_name_prefix="evenrank-balancer", initializer=use_in_thread)
        self._groups: list[FailFastGroup] = []
        with self.aborting():
            for name, backend_of_group in (("metadata", "gloo"), ("exchange", backend)):
                self._groups.append(FailFastGroup(members, name, timeout, backend=backend_of_group))
        self.metadata_group, self.exchange_group = self._groups

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Call a function in the background thread; a ConfigError if the connection is closed."""
        self.check_open()
        return self._background.submit(function, *arguments)

    def check_open(self) -> None:
        """Raise a ConfigError if the connection is closed; the message has the error that closed it."""
        check_process(self._process)
        if self._is_closed:
            after = "" if self._failure is None else f", after {self._failure}"
            raise ConfigError(f"the Balancer is closed{after}; create a new one")

    @contextlib.contextmanager
    def aborting(self) -> Iterator[None]:
        """Abort after any error, which may be kept, so that no rank waits for this one."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Close if another rank is lost, and raise its reason as a RankError if it has left one."""
        try:
            yield
        except RankLostError as error:
            self.close_after(error)  # first, because other ranks may wait for this one
            if (reason := self._failure_note.read()) is None:
                raise
            self._failure = reason
            raise RankError(reason) from None

    def fail(self, error: Exception) -> None:
        """Leave the reason for the other ranks and close, after an error that may be this rank's alone."""
        if self._process != os.getpid():  # the parent goes on
            return
        self._failure_note.write(error)
        self.close_after(error)

    def close_after(self, error: Exception) -> None:
        """Close after an error, so that ranks that wait for this one end, too."""
        if not self._is_closed or isinstance(error, RankError):
            self._failure = one_line(error)
        self.abort()

    def abort(self) -> None:
        """Close without waiting: on a GPU, collectives in flight may wait for ranks that are lost."""
        for group in self._groups[1:]:
            group.drop()
        self.close()

    def close(self) -> None:
        """End the background thread and the communicators. Closing twice does nothing."""
        self._is_closed = True
        self._background.shutdown()
        for group in self._groups:
            group.close()


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
                    return store.wait([complete], _POLL)
                except RuntimeError:  # not yet complete, or the store is lost, in which case the next call raises
                    for note in (_NOTE, f"{iteration.number}/{_NOTE}"):
                        if store.check([note]):
                            raise RankError(store.get(note).decode()) from None
            raise RankError(
                f"{world_size - store.add(ranks, 0)} of {world_size} ranks have not reached the end of epoch {epoch} "
                f"within {self._timeout}; leave loops at the same step on all ranks, or raise timeout"
            )

        within(self._timeout + _POLL, wait)

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
                    within(10 * _POLL, lambda: store.compare_set(key, "", text))
            raise

    def compare(self) -> None:
        """Compare the plans so far with those of ranks that have done so after as many steps, if the store answers."""
        iteration = self._latest
        with contextlib.suppress(RankLostError):  # a state of this rank needs no other one
            steps, total = iteration.plans
            where = f"in epoch {iteration.epoch} after {steps} steps"
            self._compare(f"{iteration.number}/steps/{steps}", where, total, 10 * _POLL)

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


class _Scaling:
    """Warns once in a process, on rank 0, of losses of balanced batches that are not scaled."""

    is_watched = False  # the steps of all optimizers
    is_due = False  # a balanced batch was handed out where gradients are computed
    is_scaled = False  # `scale_loss` was called where gradients are computed
    is_sum = False  # its argument was looked at

    def watch(self) -> None:
        """Look at the steps of optimizers from now on; called where a balanced batch is handed out."""
        self.is_due |= torch.is_grad_enabled()  # else it is evaluated
        if not self.is_watched:
            self.is_watched = True
            register_optimizer_step_post_hook(self._check)  # the loss may be computed within the step, by its closure

    def scaled(self) -> None:
        """Record that `scale_loss` was called."""
        if torch.is_grad_enabled():
            self.is_scaled = True  # not read here, or torch.compile would compile again when it changes

    def _check(self, *_: Any) -> None:
        if self.is_due and not self.is_scaled:
            self.is_scaled = True
            self.warn(
                "an optimizer steps on balanced batches, and scale_loss was not called, though ranks differ in loss "
                "tokens; train on scale_loss(loss_sum, batch), unless you divide by batch.world_loss_tokens yourself"
            )

    def warn(self, text: str) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            logging.getLogger("evenrank").warning(text)


SCALING = _Scaling()
