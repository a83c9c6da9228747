import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from evenrank.core.errors import ConfigError, EvenrankError, RankError, one_line
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.balance.exchange.exchange import Exchange
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.padding import pad_batch
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from evenrank.dataloader.sampling.epoch_positions import _FORMAT
from tests.dataloader.balance.costs import COST, Ints, Lengths, rich_tokens
from tests.dataloader.resuming import with_changes
from tests.dataloader.rich_batch import RichBatch, rich_batch
from tests.ranks import RankPool

BATCH = rich_batch([[(1, 1), (1, 1)]])
LOST = "a rank is lost or does not respond ("


def _balancer(batches: Iterable[JaggedBatch], **options: Any) -> Balancer[Any]:
    return Balancer(batches, BalanceConfig(**{"cost": rich_tokens, **options}))


def _fail_in_step(rank: int, world_size: int, culprit: int, step: int) -> None:
    def batches() -> Iterator[RichBatch]:
        for number in range(6):
            if rank == culprit and number == step:
                raise OSError("cannot read row 17")
            yield rich_batch([[(1, 1), (1, 1)]], first_id=rank)

    with _balancer(batches()) as balancer:
        list(balancer)


@pytest.mark.parametrize(("culprit", "step"), [(0, 2), (1, 0), (2, 5)])
def test_an_error_of_one_loader_is_raised_on_all_ranks(ranks: RankPool, culprit: int, step: int) -> None:
    for failure in ranks.try_run(3, _fail_in_step, culprit, step):
        assert failure.type_name == "RankError"
        assert failure.message == f"rank {culprit} failed: OSError: cannot read row 17"


def _leave_with_a_step_in_flight(rank: int, world_size: int, how: str) -> list[str]:
    """Return the first error, and that of the next use of the Balancer by a program that goes on."""

    def write(metrics: StepMetrics) -> None:
        if rank == 1 and metrics.step == 1 and how != "close":
            raise OSError("no space left on device")

    batches = [replace(BATCH, step=step) for step in range(8)]
    balancer = _balancer(batches, on_step=write, timeout=timedelta(minutes=10))
    try:
        if how == "by hand":
            for batch in batches:
                balancer.finish(balancer.launch(balancer.start(batch)))
        iterator = iter(balancer)
        next(iterator)
        if rank == 1 and how == "close":
            balancer.close()  # and keeps the iterator
            balancer.start(batches[0])
        list(iterator)
    except (OSError, EvenrankError) as error:
        # Rank 1 keeps its error, and with it the frames that refer to the step in flight, until the others have ended.
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        with pytest.raises(ConfigError) as closed:
            list(balancer)
        return [one_line(error), str(closed.value)]
    return []


@pytest.mark.parametrize("how", ["callback", "by hand", "close"])
def test_a_step_in_flight_that_is_kept_does_not_keep_the_other_ranks_waiting(ranks: RankPool, how: str) -> None:
    first, culprit, last = ranks.run(3, _leave_with_a_step_in_flight, how)
    if how == "close":
        assert culprit == ["the Balancer is closed; create a new one"] * 2
        assert first[0].startswith(LOST)
        assert last[0].startswith(LOST)
    else:
        cause = "OSError: no space left on device"
        assert culprit == [cause, f"the Balancer is closed, after {cause}; create a new one"]
        of_others = f"rank 1 failed: {cause}"
        assert first == last == [of_others, f"the Balancer is closed, after {of_others}; create a new one"]


def _leave_before_others(rank: int, world_size: int) -> str:
    balancer = _balancer([replace(BATCH, step=step) for step in range(12)])
    iterator: Any = iter(balancer)
    next(iterator)
    if rank == 1:
        iterator.close()  # which launches steps that rank 0 launches after the barrier
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    with pytest.raises(RankError) as raised:
        list(iterator if rank == 0 else balancer)
    return one_line(raised.value)


def test_a_rank_that_leaves_a_loop_does_not_wait_for_steps_that_others_launch_later(ranks: RankPool) -> None:
    first, second = ranks.run(2, _leave_before_others)
    assert first == second
    assert first.startswith("ranks are out of step: epoch is 0 on rank 0, 1 on rank 1; ")


def _close(rank: int, world_size: int) -> None:
    balancers = [_balancer([BATCH] * 4) for _ in range(2)]
    iterator = iter(balancers[0])
    next(iterator)
    balancers[0].close()
    balancers[0].close()
    dist.destroy_process_group()
    balancers[1].close()
    for closed in (iterator, *map(iter, balancers)):
        with pytest.raises(ConfigError, match=r"^the Balancer is closed; create a new one$"):
            next(closed)


def test_closing_twice_or_after_the_default_group_does_nothing_and_iterators_say_so(ranks: RankPool) -> None:
    ranks.run(2, _close)


def _local_batch() -> JaggedBatch:
    @dataclass(kw_only=True, eq=False, repr=False)
    class Local(JaggedBatch):
        ids: torch.Tensor

    return Local(batch_size=1, num_real=1, ids=torch.zeros(1))


def _negative(lengths: Lengths, num_candidates: Ints) -> Ints:
    return 5 - lengths["a"]


FIRST = "rank 1 failed: ValueError: a batch differs from the first one"
GRADIENT = replace(BATCH, matrix=BATCH.matrix.clone().requires_grad_())
TWO_VALUES = keyed_jagged_tensor(["a", "b"], torch.arange(2), np.array([[2], [3]]))
# By name: the batches of rank 1 and its options where they differ from those of the others, and the message.
DIFFERENCES: dict[str, tuple[list[JaggedBatch], dict[str, Any], str]] = {
    "dtype": ([replace(BATCH, ids=BATCH.ids.int()), BATCH], {}, "batches differ between rank 0 and rank 1: ids: torc"),
    "none": ([replace(BATCH, nothing=torch.zeros(1))], {}, "batches differ between rank 0 and rank 1: nothing: None a"),
    "batch size": ([BATCH, pad_batch(BATCH, 2)], {}, "rank 1 failed: a batch has 2 rows, but balanced batches have "),
    "later rows": ([BATCH, pad_batch(BATCH, 2)], {}, "rank 1 failed: a batch has 2 rows, but balanced batches have 1:"),
    "strategy": ([], {"strategy": "none"}, "strategy differs between ranks: lpt-swap on rank 0, none on rank 1"),
    "later": ([BATCH, replace(BATCH, flags=BATCH.flags[:, :2])], {}, f"{FIRST}: flags: torch.bool[3] and torch.bool["),
    "cost": ([BATCH, rich_batch([[(6, 1), (1, 1)]])], {}, "rank 1 failed: the cost _negative must not be negat"),
    "lengths": ([BATCH, replace(BATCH, first=TWO_VALUES)], {}, f"{FIRST}: first: torch.int64 of keys a, b"),
    "num_real": ([BATCH, replace(BATCH, num_real=7)], {}, "rank 1 failed: ValueError: num_real must be between 0 and "),
    "gradient": ([BATCH, GRADIENT], {}, "rank 1 failed: ValueError: matrix must be on the CPU and require no gradient"),
    "schema is local": ([_local_batch()], {}, "rank 1 failed: "),
}


def _disagree(rank: int, world_size: int, what: str) -> None:
    options: dict[str, Any] = {"cost": _negative, "batch_size": 1 if what == "batch size" else None}
    batches: list[JaggedBatch] = [BATCH, BATCH]
    if rank == 1:
        of_rank, changes, _ = DIFFERENCES[what]
        batches, options = of_rank or batches, options | changes
    with _balancer(batches, **options) as balancer:
        list(balancer)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_between_ranks_is_named_on_every_rank(ranks: RankPool, what: str) -> None:
    failures = ranks.try_run(3, _disagree, what)
    assert [failure.type_name for failure in failures] == ["RankError"] * 3
    assert failures[0].message.startswith(DIFFERENCES[what][2])
    assert len({failure.message for failure in failures}) == 1


def _balance_with(rank: int, world_size: int, options: dict[int, dict[str, Any]]) -> None:
    with _balancer([BATCH] * 5, **options.get(rank, {})) as balancer:
        list(balancer)


def test_an_argument_that_is_invalid_on_one_rank_or_all_is_an_error_on_all(ranks: RankPool) -> None:
    failures = ranks.try_run(3, _balance_with, {1: {"strategy": "best"}})
    message = "BalanceConfig: strategy must be one of none, karmarkar-karp, lpt-swap, min-move, got 'best'"
    own, of_others = ("ConfigError", message), ("RankError", f"rank 1 failed: {message}")
    assert [(failure.type_name, failure.message) for failure in failures] == [of_others, own, of_others]
    for failure in ranks.try_run(3, _balance_with, {rank: {"max_tokens_per_rank": 3} for rank in range(3)}):
        assert failure.type_name == "ConfigError"
        assert failure.message.startswith("max_tokens_per_rank = 3 cannot be kept: the best assignment found has a r")


def _loaders_disagree(rank: int, world_size: int, path: Path, what: str, state: dict[str, Any]) -> None:
    config = LoaderConfig(batch_size=4, seed=rank if what == "seed" else 0)
    loader = build_loader(path, config, rank=0 if what == "rank" else rank, world_size=world_size)
    with Balancer(loader, BalanceConfig(cost=COST)) as balancer:
        for batch in balancer:
            if what == "break" and rank == 1 and batch.step == 2:
                break
        if what in ("state", "seed in state") and rank == 1:
            balancer.load_state_dict(state)
        list(balancer)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("seed", "seed differs between ranks: 0 on rank 0, 1 on rank 1"),
        ("rank", "the loader of rank 1 was created for rank 0; pass each rank its own number"),
        ("state", "ranks are out of step: "),
        ("seed in state", "seed differs between ranks: 0 on rank 0, 5 on rank 1"),
        ("break", "ranks are out of step: epoch is 0 on rank 0, 1 on rank 1; iterate over the same epochs"),
    ],
)
def test_loaders_that_differ_by_rank_are_found(ranks: RankPool, small_dataset: Path, what: str, message: str) -> None:
    state = build_loader(small_dataset, LoaderConfig(batch_size=4), rank=0, world_size=1).state_dict()
    state = with_changes(_FORMAT, state, seed=5 if what == "seed in state" else 0, position=16, epoch=1)
    failures = ranks.try_run(3, _loaders_disagree, small_dataset, what, state)
    assert [failure.type_name for failure in failures] == ["RankError"] * 3
    assert all(failure.message.startswith(message) for failure in failures), failures[0].message


def _lose_a_rank_later(rank: int, world_size: int, exchange: str) -> None:
    with _balancer([BATCH] * 50, exchange=exchange) as balancer:
        for number, _ in enumerate(balancer):
            if rank == 1 and number == 5:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_that_is_killed_ends_the_others_within_seconds(exchange: str) -> None:
    pool = RankPool(timeout=120)  # far less than the 30 minutes that a Balancer's collectives wait
    try:
        failures = pool.try_run(4, _lose_a_rank_later, exchange)
    finally:
        pool.stop()
    assert failures.pop(1).type_name == "EOFError"
    for failure in failures:
        assert failure.type_name == "RankLostError"
        assert failure.message.startswith(LOST)


def _fail_while_connecting(rank: int, world_size: int) -> str:
    def connect(self: Exchange) -> None:
        raise OSError("out of memory")

    try:
        with patch.object(Exchange, "connect", connect) if rank == 1 else contextlib.nullcontext():
            _balancer([BATCH])
    except (OSError, RankError) as error:
        # Rank 1 keeps its error, and with it the frames of the constructor, until rank 0 has ended.
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        return one_line(error)
    return "no error"


def test_a_constructor_that_fails_on_one_rank_ends_on_the_others(ranks: RankPool) -> None:
    lost, failed = ranks.run(2, _fail_while_connecting)
    assert failed == "OSError: out of memory"
    assert lost.startswith(LOST)


def _drop(rank: int, world_size: int, kind: str) -> None:
    """Drop Balancers, most without closing them; none of their threads, files or groups may be left."""
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
    assert all(last <= early for early, last in zip(counts[1], counts[-1], strict=True)), counts


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
@pytest.mark.parametrize("kind", ["unused", "whole epoch", "left early", "closed early"])
def test_dropped_balancers_leave_nothing_behind(ranks: RankPool, kind: str) -> None:
    for world_size in (1, 2):
        ranks.run(world_size, _drop, kind)
