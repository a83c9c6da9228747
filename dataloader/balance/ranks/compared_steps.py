"""Consistency of steps: a difference is an error on every rank, never a hang, and found before anything moves.

Schemas are compared before the first step, positions and plans in every step of a Balancer: a rank that planned
differently would send other bytes than its peers expect, so samples would be lost, or Gloo would abort the process. A
rank that failed would leave its peers waiting for bytes.

Without an exchange, ranks plan alone, and `PlanCheck` compares their plans now and then. A cost or a strategy that
returns something else on one rank, such as a cost fitted to that rank's own times, leaves out some samples, and others
are trained on twice, without an error anywhere. So each rank keeps a running hash of its plans, which is compared
through the store: without waiting when an epoch begins and when a state is asked for, and with all ranks when an epoch
ends. The rank that comes first to such a point has nothing to compare with; it learns of a difference from the note
that the others leave, at the next one.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import Store

from evenrank.core.errors import ConfigError, RankError, RankLostError, one_line
from evenrank.dataloader.balance.ranks.agree import raise_reported_errors
from evenrank.dataloader.balance.ranks.loss_scaling import SCALING
from evenrank.dataloader.balance.ranks.metadata import (
    StepMetadata,
    all_gather_bytes,
    all_gather_objects,
    common_word,
)
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Members, within
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.schema import BatchSchema, check_contents, schema_of

Batch = TypeVar("Batch")

_WAIT = timedelta(seconds=1)  # at a time, because a client of a TCPStore serves no other thread while it waits
_NOTE = "difference"
_MASK = (1 << 61) - 1
_SAME_WORDS = ("schema_hash", "epoch", "step", "position", "plan_hash")  # of the headers of ranks that are in step
_SAME_STEPS = "iterate over the same epochs, load the same state, and leave loops at the same step on all ranks"
_SAME_PLANS = "ranks have found other files of the log that they follow, or planned alone and differently"


def common_schema(schemas: Sequence[BatchSchema | None], batch_size: int | None = None) -> BatchSchema | None:
    """Return the schema of all ranks that have batches, or raise a RankError if two differ; None if no rank has any.

    `batch_size` None is the largest of them.
    """
    known = [(rank, schema) for rank, schema in enumerate(schemas) if schema is not None]
    if batch_size is None:
        batch_size = max((schema.batch_size for _, schema in known if schema.batch_size), default=1)
    known = [(rank, dataclasses.replace(schema, batch_size=batch_size)) for rank, schema in known]
    for (rank, schema), (other_rank, other) in itertools.pairwise(known):
        if differences := schema.differences(other):
            raise RankError(f"batches differ between rank {rank} and rank {other_rank}: {'; '.join(differences)}")
    return known[0][1] if known else None


def check_batch(batch: JaggedBatch, schema: BatchSchema) -> NDArray[np.int64]:
    """Return the lengths of a batch, int64 [K, its rows]; it has the common schema, or fewer rows."""
    of_batch = own = schema_of(batch)
    if own != schema:
        own = dataclasses.replace(own, batch_size=schema.batch_size)
    if own != schema and (differences := schema.differences(own)):
        raise ValueError(f"a batch differs from the first one: {'; '.join(differences)}")
    if batch.batch_size > schema.batch_size:
        raise ConfigError(
            f"a batch has {batch.batch_size} rows, but balanced batches have {schema.batch_size}: BalanceConfig's "
            "batch_size, or the most of the first batches; pass the most rows that a batch can have as batch_size"
        )
    return check_contents(batch, of_batch)


def check_headers(step: StepMetadata) -> None:
    """Raise a RankError unless all ranks that still have batches are in the same step of the same epoch."""
    if len(missing := np.flatnonzero(step["started"] == 0)):
        raise RankError(f"ranks are out of step: rank {missing[0]} has not started a step of others; {_SAME_STEPS}")
    ranks = np.flatnonzero(step["ended"] == 0)
    for name in _SAME_WORDS:
        words = step[name][ranks]
        for i in np.flatnonzero(words[1:] != words[:-1])[:1]:
            found = f"{name} is {words[i]} on rank {ranks[i]}, {words[i + 1]} on rank {ranks[i + 1]}"
            raise RankError(f"ranks are out of step: {found}; {_SAME_PLANS if name == 'plan_hash' else _SAME_STEPS}")


def are_in_step(steps: StepMetadata) -> bool:
    """Return whether all ranks have batches in all of n steps, [n, W], and pass `check_headers`."""
    are_same = all((steps[name] == steps[name][:, :1]).all() for name in _SAME_WORDS)
    return bool(are_same and not steps["ended"].any() and steps["started"].all())


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
            note = f"ranks are out of step: rank {other} is {where_of_other}, rank {rank} {where}; {_SAME_STEPS}"
        if not note and total_of_other != str(total):
            note = (
                f"ranks {other} and {rank} have planned steps differently, {where}: samples were "
                "left out or trained on twice; make the cost and the strategy return the same on all ranks, or use a "
                "Balancer, which gathers costs, and resume from an earlier checkpoint with new loaders"
            )
        if note:
            # All ranks raise the first note.
            raise RankError(within(timeout, lambda: store.compare_set(_NOTE, "", note)).decode())


def confirm(
    group: FailFastGroup,
    plans: Sequence[NDArray[np.int32]],
    error: Exception | None,
    steps: StepMetadata,
    strategy: str,
) -> tuple[int, Exception] | None:
    """Compare the plans of n steps, [n, W], between ranks. Collective: every rank must call this.

    Returns the index of the first step that a rank could not plan, or that ranks have planned differently, and the
    error to raise: a RankError, or this rank's own. None: there is no such step.

    `plans` are this rank's assignments, int32 [W, B] each: of all steps, or of those before the one that failed with
    `error`.
    """
    words = np.zeros((len(steps), 2), dtype=np.int64)
    words[len(plans) :, 0] = 1
    words[: len(plans), 1] = [_digest(plan) for plan in plans]
    of_ranks = all_gather_bytes(group, words.reshape(-1).view(np.uint8)).copy().view(np.int64)
    failed, assigned = of_ranks.reshape(-1, *words.shape).transpose(2, 1, 0)  # [n, W] each
    if not failed.any() and (assigned == assigned[:, :1]).all():
        return None
    errors = all_gather_objects(group, None if error is None else one_line(error)) if failed.any() else []
    for index, step in enumerate(steps):
        try:
            if failed[index].any():
                of_step = [text if of_rank else None for text, of_rank in zip(errors, failed[index], strict=True)]
                if error is not None and one_line(error) in of_step:
                    raise error
                raise_reported_errors(of_step)
            if len(differing := np.flatnonzero(assigned[index] != assigned[index][0])):
                name = f"step {common_word(step, 'step')} of epoch {common_word(step, 'epoch')}"
                raise RankError(
                    f"in {name}, rank {differing[0]} assigns samples differently from rank 0, given the same costs; "
                    f"the strategy {strategy!r} must be a pure function of its argument, and the same code on all ranks"
                )
        except Exception as raised:
            return index, raised
    return None


def _digest(plan: NDArray[np.int32]) -> int:
    """Return 63 bits of a hash of an assignment."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(plan).data, digest_size=8).digest(), "little") >> 1
