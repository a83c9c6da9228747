"""No hangs: a failure on one rank, or a difference between ranks, is reported on every rank. Real Gloo groups."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
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
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost, StepMetrics
from evenrank.dataloader.balance.exchange.collectives import COLLECTIVES
from evenrank.dataloader.balance.exchange.exchange import Exchange
from evenrank.dataloader.batches.batch import JaggedBatch, keyed_jagged_tensor
from evenrank.dataloader.batches.padding import pad_batch
from evenrank.dataloader.state.resume_point import _FORMAT
from tests.dataloader.balance.costs import Ints, Lengths
from tests.dataloader.resuming import with_changes
from tests.dataloader.rich_batch import RichBatch, rich_batch
from tests.ranks import RankFailure, RankPool

COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)


def _tokens(lengths: Lengths, num_candidates: Ints) -> Ints:
    return lengths["a"] + lengths["b"]


def _local_batch() -> JaggedBatch:
    @dataclass(kw_only=True, eq=False, repr=False)
    class Local(JaggedBatch):
        ids: torch.Tensor

    return Local(batch_size=1, num_real=1, ids=torch.zeros(1))


def _cost_that_turns_negative(lengths: Lengths, num_candidates: Ints) -> Ints:
    return 5 - lengths["a"]


def _fail_in_step(rank: int, world_size: int, culprit: int, step: int) -> int:
    def batches() -> Iterator[RichBatch]:
        for number in range(6):
            if rank == culprit and number == step:
                raise OSError("cannot read row 17")
            yield rich_batch([[(1, 1), (1, 1)]], first_id=rank)

    count = 0
    with Balancer(batches(), BalanceConfig(cost=_tokens)) as balancer:
        for _ in balancer:
            count += 1
    return count


@pytest.mark.parametrize(("culprit", "step"), [(0, 2), (2, 2), (1, 0), (1, 5)])
def test_an_error_of_one_loader_is_raised_on_all_ranks(ranks: RankPool, culprit: int, step: int) -> None:
    for failure in ranks.try_run(3, _fail_in_step, culprit, step):
        assert isinstance(failure, RankFailure)
        assert failure.type_name == "RankError"
        assert failure.message == f"rank {culprit} failed: OSError: cannot read row 17"


def _writer_fails(rank: int, world_size: int) -> list[str]:
    def write(metrics: StepMetrics) -> None:
        if rank == 1 and metrics.step == 2:
            raise OSError("no space left on device")

    batches = [replace(rich_batch([[(1, 1), (1, 1)]]), step=step) for step in range(8)]
    errors = []
    with Balancer(batches, BalanceConfig(cost=_tokens, on_step=write, timeout=timedelta(minutes=10))) as balancer:
        for _ in range(2):
            try:
                for _ in balancer:
                    pass
            except (OSError, EvenrankError) as error:  # as a program that goes on, and does not close the Balancer
                errors.append(str(error))
    return errors


def test_an_error_of_a_callback_that_the_program_catches_ends_all_ranks(ranks: RankPool) -> None:
    cause = "rank 1 failed: OSError: no space left on device"
    first, culprit, last = ranks.run(3, _writer_fails)
    assert culprit[0] == "no space left on device"
    assert first[0] == last[0] == cause
    for errors in (first, last):
        assert errors[1] == f"the Balancer is closed, after {cause}; create a new one"
    assert culprit[1] == "the Balancer is closed, after OSError: no space left on device; create a new one"


def _leave_with_a_step_in_flight(rank: int, world_size: int, how: str) -> str:
    def write(metrics: StepMetrics) -> None:
        if rank == 1 and metrics.step == 1 and how != "close":
            raise OSError("no space left on device")

    batches = [replace(rich_batch([[(1, 1), (1, 1)]]), step=step) for step in range(8)]
    balancer = Balancer(batches, BalanceConfig(cost=_tokens, on_step=write, timeout=timedelta(minutes=10)))
    try:
        if how == "by hand":
            for batch in batches:
                balancer.finish(balancer.launch(balancer.start(batch)))
        iterator = iter(balancer)
        next(iterator)
        if rank == 1 and how == "close":
            balancer.close()  # and keeps the iterator
            balancer.start(batches[0])
        for _ in iterator:
            pass
    except (OSError, EvenrankError) as error:
        # Rank 1 keeps its error, and with it the frames that refer to the step in flight, until the others have ended.
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        return one_line(error)
    return "no error"


@pytest.mark.parametrize("how", ["callback", "by hand", "close"])
def test_a_step_in_flight_that_is_kept_does_not_keep_the_other_ranks_waiting(ranks: RankPool, how: str) -> None:
    first, culprit, last = ranks.run(3, _leave_with_a_step_in_flight, how)
    if how != "close":
        assert culprit == "OSError: no space left on device"
        assert first == last == f"rank 1 failed: {culprit}"
    else:
        assert culprit == "the Balancer is closed; create a new one"
        assert first.startswith("a rank is lost or does not respond (")
        assert last.startswith("a rank is lost or does not respond (")


def test_an_iterator_of_a_closed_balancer_says_so() -> None:
    balancer = Balancer([rich_batch([[(1, 1), (1, 1)]])] * 4, BalanceConfig(cost=_tokens))
    iterator = iter(balancer)
    next(iterator)
    balancer.close()
    with pytest.raises(ConfigError, match=r"^the Balancer is closed; create a new one$"):
        next(iterator)
    with pytest.raises(ConfigError, match=r"^the Balancer is closed; create a new one$"):
        next(iter(balancer))


def _disagree(rank: int, world_size: int, what: str) -> None:
    batch = rich_batch([[(1, 1), (1, 1)]])
    second = batch
    options: dict[str, Any] = {"cost": _cost_that_turns_negative}
    if what == "batch size":
        options["batch_size"] = 1
    if rank == 1:
        match what:
            case "dtype":
                batch = replace(batch, ids=batch.ids.int())
            case "none":
                batch = replace(batch, nothing=torch.zeros(1))
            case "batch size":
                second = pad_batch(batch, 2)
            case "later":
                second = replace(batch, flags=batch.flags[:, :2])
            case "strategy":
                options["strategy"] = "none"
            case "tolerance":
                options["tolerance"] = 0.5
            case "limit":
                options["max_tokens_per_rank"] = 1  # each has a sample of 4 tokens
            case "cost":
                second = rich_batch([[(6, 1), (1, 1)]])
            case "cost function":
                options["cost"] = len
            case "unknown strategy":
                options["strategy"] = "best"
            case "lengths":
                second = replace(batch, first=keyed_jagged_tensor(["a", "b"], torch.arange(2), np.array([[2], [3]])))
            case "num_real":
                second = replace(batch, num_real=7)
            case "gradient":
                second = replace(batch, matrix=batch.matrix.clone().requires_grad_())
            case "schema is local":
                batch = second = _local_batch()
    with Balancer([batch, second], BalanceConfig(**options)) as balancer:
        list(balancer)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtype", "batches differ between rank 0 and rank 1: ids: torch.int64 and torch.int32"),
        ("none", "batches differ between rank 0 and rank 1: nothing: None and torch.float32"),
        (
            "batch size",
            "rank 1 failed: a batch has 2 rows, but the Balancer's batch_size is 1; raise it, or",
        ),
        ("strategy", "strategy differs between ranks: lpt-swap on rank 0, none on rank 1"),
        ("tolerance", "tolerance differs between ranks: 0.001 on rank 0, 0.5 on rank 1"),
        ("limit", "max_tokens_per_rank differs between ranks: None on rank 0, 1 on rank 1"),
        (
            "later",
            "rank 1 failed: ValueError: a batch differs from the first one: flags: torch.bool[3] and torch.bool[2]",
        ),
        ("cost", "rank 1 failed: a cost must not be negative, got -1"),
        ("cost function", "cost differs between ranks: _cost_that_turns_negative on rank 0, len on rank 1"),
        ("lengths", "rank 1 failed: ValueError: a batch differs from the first one: first: torch.int64 of keys a, b"),
        ("num_real", "rank 1 failed: ValueError: num_real must be between 0 and batch_size = 1, got 7"),
        ("gradient", "rank 1 failed: ValueError: matrix must be on the CPU and require no gradient, but it requires"),
        ("schema is local", "rank 1 failed: "),
    ],
)
def test_a_difference_between_ranks_is_named_on_every_rank(ranks: RankPool, what: str, message: str) -> None:
    failures = ranks.try_run(3, _disagree, what)
    assert [failure.type_name for failure in failures] == ["RankError"] * 3
    assert all(failure.message.startswith(message) for failure in failures), failures[0].message
    assert len({failure.message for failure in failures}) == 1


def test_an_argument_that_is_invalid_on_one_rank_is_an_error_on_all(ranks: RankPool) -> None:
    message = "no strategy is called 'best'; known are none, karmarkar-karp, lpt-swap, min-move"
    failures = [(failure.type_name, failure.message) for failure in ranks.try_run(3, _disagree, "unknown strategy")]
    assert failures == [
        ("RankError", f"rank 1 failed: {message}"),
        ("ConfigError", message),
        ("RankError", f"rank 1 failed: {message}"),
    ]


def _loaders_disagree(rank: int, world_size: int, path: Path, what: str, state: dict[str, Any] | None) -> int:
    seed = rank if what == "seed" else 0
    loader_rank = 0 if what == "rank" else rank
    loader = build_loader(path, LoaderConfig(batch_size=4, seed=seed), rank=loader_rank, world_size=world_size)
    with Balancer(loader, BalanceConfig(cost=COST)) as balancer:
        steps = 0
        for batch in balancer:
            steps += 1
            if what == "break" and rank == 1 and batch.step == 2:
                break
        if what in ("state", "seed in state") and rank == 1:
            balancer.load_state_dict(state or {})
        return steps + len(list(balancer))


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
def test_loaders_that_differ_between_ranks_are_found(
    ranks: RankPool, small_dataset: Path, what: str, message: str
) -> None:
    state = build_loader(small_dataset, LoaderConfig(batch_size=4), rank=0, world_size=1).state_dict()
    state = with_changes(_FORMAT, state, seed=5 if what == "seed in state" else 0, position=16, epoch=1)
    failures = ranks.try_run(3, _loaders_disagree, small_dataset, what, state)
    assert [failure.type_name for failure in failures] == ["RankError"] * 3
    assert all(failure.message.startswith(message) for failure in failures), failures[0].message


@pytest.mark.parametrize("exchange", COLLECTIVES)
def test_a_rank_that_is_killed_ends_the_others_within_seconds(exchange: str) -> None:
    pool = RankPool(timeout=120)  # far less than the 30 minutes that a Balancer's collectives wait
    try:
        failures = pool.try_run(4, _lose_a_rank_later, exchange)
    finally:
        pool.stop()
    assert failures[1].type_name == "EOFError"
    for failure in (failures[0], failures[2], failures[3]):
        assert failure.type_name == "RankLostError"
        assert failure.message.startswith("a rank is lost or does not respond (")


def _lose_a_rank_later(rank: int, world_size: int, exchange: str) -> None:
    with Balancer([rich_batch([[(1, 1), (1, 1)]])] * 50, BalanceConfig(cost=_tokens, exchange=exchange)) as balancer:
        for number, _ in enumerate(balancer):
            if rank == 1 and number == 5:
                os.kill(os.getpid(), signal.SIGKILL)


def _close_twice(rank: int, world_size: int) -> str:
    import torch.distributed as dist

    balancer = Balancer([rich_batch([[(1, 1), (1, 1)]])], BalanceConfig(cost=_tokens))
    list(balancer)
    balancer.close()
    balancer.close()
    other = Balancer([rich_batch([[(1, 1), (1, 1)]])], BalanceConfig(cost=_tokens))
    dist.destroy_process_group()
    other.close()
    try:
        list(other)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_closing_twice_or_after_the_default_group_does_nothing(ranks: RankPool) -> None:
    assert ranks.run(2, _close_twice) == ["the Balancer is closed; create a new one"] * 2


def _leave_and_count(rank: int, world_size: int, path: Path) -> tuple[int, int, int]:
    """Count threads, open files and process groups after several Balancers that were left early."""
    loader = build_loader(path, LoaderConfig(batch_size=4), rank=rank, world_size=world_size)
    counts = []
    for _ in range(6):
        with Balancer(loader, BalanceConfig(cost=COST)) as balancer:
            for batch in balancer:
                if batch.step == 1:
                    break
            steps = [batch.step for batch in balancer]
            assert steps == list(range(len(steps)))  # the whole next epoch
            assert len(steps) > 10
        groups = len(torch.distributed.distributed_c10d._world.pg_map)
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd")), groups))
    # The first Balancer can load things that stay; files can be closed a moment later.
    assert all(last <= early for early, last in zip(counts[1], counts[-1], strict=True)), counts
    return counts[-1]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_balancers_leave_no_thread_file_or_group_behind(ranks: RankPool, small_dataset: Path) -> None:
    for _, _, groups in ranks.run(3, _leave_and_count, small_dataset):
        assert groups == 1


def _balance_within_impossible_limit(rank: int, world_size: int) -> None:
    batch = rich_batch([[(1, 1), (1, 1)]])
    with Balancer([batch] * 5, BalanceConfig(cost=_tokens, max_tokens_per_rank=3)) as balancer:
        list(balancer)


def test_a_token_limit_that_cannot_be_kept_is_raised_on_all_ranks(ranks: RankPool) -> None:
    for failure in ranks.try_run(3, _balance_within_impossible_limit):
        assert failure.type_name == "ConfigError"
        assert failure.message.startswith(
            "max_tokens_per_rank = 3 cannot be kept: the best assignment found has a rank with 4 tokens"
        )


def _fail_while_connecting(rank: int, world_size: int) -> str:
    def connect(self: Exchange) -> None:
        raise OSError("out of memory")

    try:
        with patch.object(Exchange, "connect", connect) if rank == 1 else contextlib.nullcontext():
            Balancer([rich_batch([[(1, 1), (1, 1)]])], BalanceConfig(cost=_tokens))
    except (OSError, RankError) as error:
        # Rank 1 keeps its error, and with it the frames of the constructor, until rank 0 has ended.
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        return one_line(error)
    return "no error"


def test_a_constructor_that_fails_on_one_rank_ends_on_the_others(ranks: RankPool) -> None:
    lost, failed = ranks.run(2, _fail_while_connecting)
    assert failed == "OSError: out of memory"
    assert lost.startswith("a rank is lost or does not respond (")


def _drop(rank: int, world_size: int, kind: str) -> None:
    """Drop Balancers without closing them; none of their threads, files or groups may be left."""
    counts = []
    for _ in range(6):
        balancer = Balancer([rich_batch([[(1, 1), (1, 1)]])] * 6, BalanceConfig(cost=_tokens))
        for batch in balancer if kind != "unused" else ():
            if kind == "left early" and batch.step == 1:
                break
        background = balancer._connection._background
        del balancer
        background.shutdown()  # waits for its thread, which ends a moment later
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert all(last <= early for early, last in zip(counts[1], counts[-1], strict=True)), counts


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
@pytest.mark.parametrize("kind", ["unused", "whole epoch", "left early"])
def test_dropped_balancers_leave_no_thread_or_file_behind(ranks: RankPool, kind: str) -> None:
    for world_size in (1, 2):
        ranks.run(world_size, _drop, kind)
