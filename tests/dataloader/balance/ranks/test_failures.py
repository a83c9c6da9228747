"""Ranks that fail, leave or are lost: the others end within seconds, and nothing is left behind."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from evenrank.core.errors import ConfigError, EvenrankError, RankError, one_line
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics
from evenrank.dataloader.balance.exchange.exchange import Exchange
from evenrank.dataloader.batches.batch import JaggedBatch
from tests.dataloader.balance.costs import rich_tokens
from tests.dataloader.rich_batch import rich_batch
from tests.ranks import RankPool

BATCH = rich_batch([[(1, 1), (1, 1)]])
LOST = "a rank is lost or does not respond ("


def _balancer(batches: Iterable[JaggedBatch], **options: Any) -> Balancer[Any]:
    return Balancer(batches, BalanceConfig(**{"cost": rich_tokens, **options}))


def _leave_with_a_step_in_flight(rank: int, world_size: int) -> list[list[str]]:
    """Return the first error, and that of the next use of the Balancer by a program that goes on, of each way."""
    of_ways = []
    for how in ("callback", "by hand", "close"):

        def write(metrics: StepMetrics, fails: bool = rank == 1 and how != "close") -> None:
            if fails and metrics.step == 1:
                raise OSError("no space left on device")

        batches = [replace(BATCH, step=step) for step in range(8)]
        balancer = _balancer(batches, on_step=write, timeout=timedelta(minutes=10))

        def use(how: str = how, balancer: Balancer[Any] = balancer, batches: Any = batches) -> None:
            if how == "by hand":
                for batch in batches:
                    balancer.finish(balancer.launch(balancer.start(batch)))
            iterator = iter(balancer)
            next(iterator)
            if rank == 1 and how == "close":
                balancer.close()  # and keeps the iterator
                balancer.start(batches[0])
            list(iterator)

        with pytest.raises((OSError, EvenrankError)) as raised:
            use()
        # Rank 1 keeps its error, and with it the frames that refer to the step in flight, until others have ended.
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        with pytest.raises(ConfigError) as closed:
            list(balancer)
        of_ways.append([one_line(raised.value), str(closed.value)])
    return of_ways


def test_a_step_in_flight_that_is_kept_does_not_keep_the_other_ranks_waiting(ranks: RankPool) -> None:
    first, culprit, last = ranks.run(3, _leave_with_a_step_in_flight)
    cause = "OSError: no space left on device"
    for of_rank, line in ((first, f"rank 1 failed: {cause}"), (culprit, cause), (last, f"rank 1 failed: {cause}")):
        assert of_rank[:2] == [[line, f"the Balancer is closed, after {line}; create a new one"]] * 2
    assert culprit[2] == ["the Balancer is closed; create a new one"] * 2
    assert first[2][0].startswith(LOST)
    assert last[2][0].startswith(LOST)


def _close_and_leave(rank: int, world_size: int) -> str:
    balancers = [_balancer([replace(BATCH, step=step) for step in range(12)]) for _ in range(3)]
    iterator: Any = iter(balancers[2])
    next(iterator)
    if rank == 1:
        iterator.close()  # which launches steps that rank 0 launches after the barrier
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    with pytest.raises(RankError) as raised:
        list(iterator if rank == 0 else balancers[2])
    iterator = iter(balancers[0])
    next(iterator)
    balancers[0].close()
    balancers[0].close()
    dist.destroy_process_group()
    balancers[1].close()
    for closed in (iterator, *map(iter, balancers[:2])):
        with pytest.raises(ConfigError, match=r"^the Balancer is closed; create a new one$"):
            next(closed)
    return one_line(raised.value)


def test_a_rank_that_leaves_a_loop_waits_for_none_and_closing_twice_or_after_the_group_does_nothing(
    ranks: RankPool,
) -> None:
    first, second = ranks.run(2, _close_and_leave)
    assert first == second
    assert first.startswith("ranks are out of step: epoch is 0 on rank 0, 1 on rank 1; ")


def _lose_a_rank_later(rank: int, world_size: int) -> None:
    with _balancer([BATCH] * 50) as balancer:
        for number, _ in enumerate(balancer):
            if rank == 1 and number == 5:
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_ends_the_others_within_seconds(ranks: RankPool) -> None:
    # Far less than the 30 minutes that a Balancer's collectives wait, although the pool waits for minutes.
    failures = ranks.try_run(3, _lose_a_rank_later)
    assert failures.pop(1).type_name == "EOFError"
    for failure in failures:
        assert failure.type_name == "RankLostError"
        assert failure.message.startswith(LOST)


def _fail_while_connecting(rank: int, world_size: int) -> str:
    def connect(self: Exchange) -> None:
        raise OSError("out of memory")

    failing = patch.object(Exchange, "connect", connect) if rank == 1 else contextlib.nullcontext()
    with pytest.raises((OSError, RankError)) as raised, failing:
        _balancer([BATCH])
    # Rank 1 keeps its error, and with it the frames of the constructor, until rank 0 has ended.
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return one_line(raised.value)


def test_a_constructor_that_fails_on_one_rank_ends_on_the_others(ranks: RankPool) -> None:
    lost, failed = ranks.run(2, _fail_while_connecting)
    assert failed == "OSError: out of memory"
    assert lost.startswith(LOST)


def _drop(rank: int, world_size: int) -> None:
    """Drop Balancers, most without closing them; none of their threads, files or groups may be left."""
    for kind in ("unused", "whole epoch", "left early", "closed early"):
        counts = []
        for _ in range(6):
            balancer = _balancer([BATCH] * 6)
            for batch in balancer if kind != "unused" else ():
                if kind in ("left early", "closed early") and batch.step == 1:
                    break
            if kind == "closed early":
                assert [batch.position for batch in balancer] == [1, 2, 3, 4, 5, 6]  # the whole next epoch
                balancer.close()
            background = balancer._connection._background
            del balancer
            background.shutdown()  # waits for its thread, which ends a moment later
            counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
            assert len(dist.distributed_c10d._world.pg_map) == 1
        # The first Balancer can load things that stay; files can be closed a moment later.
        assert all(last <= early for early, last in zip(counts[1], counts[-1], strict=True)), (kind, counts)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_dropped_balancers_leave_nothing_behind(ranks: RankPool) -> None:
    ranks.run(2, _drop)
