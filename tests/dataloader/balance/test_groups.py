from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics
from evenrank.dataloader.balance.ranks import process_group
from evenrank.dataloader.balance.ranks.process_group import Group
from tests.dataloader.balance.costs import rich_tokens
from tests.dataloader.rich_batch import RichBatch, rich_batch, samples_of
from tests.ranks import RankPool

Seen = list[list[dict[str, Any]]]  # the samples of each step


def _batches(reader: int, num_steps: int = 4) -> list[RichBatch]:
    """Return the batches of a data-parallel rank; later readers have longer rows."""
    lengths = np.random.default_rng(reader).integers(0, 10 * (reader + 1), (num_steps, 4)).tolist()
    pairs = [[[(n, 2), (1, 3)] for n in of_step] for of_step in lengths]
    return [rich_batch(of_step, first_id=100 * reader + 10 * step) for step, of_step in enumerate(pairs)]


def _balance(rank: int, world_size: int, group: Group | None = None, metrics: list[StepMetrics] | None = None) -> Seen:
    on_step = None if metrics is None else metrics.append
    with Balancer(_batches(rank), BalanceConfig(cost=rich_tokens, on_step=on_step), group=group) as balancer:
        return [samples_of(batch) for batch in balancer]


def _balance_mesh(rank: int, world_size: int) -> Seen:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    metrics: list[StepMetrics] = []
    seen = _balance(mesh.get_local_rank(), world_size, mesh, metrics)
    assert len(metrics[0].after) == 2
    return seen


def test_tensor_parallel_peers_get_equal_batches(ranks: RankPool) -> None:
    first, second = ranks.run(2, _balance)
    assert len(first) == len(second) == 4
    assert ranks.run(4, _balance_mesh) == [first, first, second, second]


def _balance_disjoint(rank: int, world_size: int) -> Seen:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    assert isinstance(mine, dist.ProcessGroup)
    if rank >= 2:  # one group's Balancers are created, and their loops run, while the other's have not begun
        dist.barrier()
    seen = _balance(rank % 2, world_size, mine)
    if rank < 2:
        dist.barrier()
    return seen


def test_disjoint_groups_do_not_wait_for_each_other(ranks: RankPool) -> None:
    assert ranks.run(4, _balance_disjoint) == ranks.run(2, _balance) * 2


def _balance_twice(rank: int, world_size: int) -> tuple[Seen, Seen]:
    # The first one reads the readers' batches in order, the second one in reverse.
    first = Balancer(_batches(rank), BalanceConfig(cost=rich_tokens))
    second = Balancer(_batches(world_size - 1 - rank), BalanceConfig(cost=rich_tokens))
    with first, second:
        steps = [(samples_of(one), samples_of(other)) for one, other in zip(first, second, strict=True)]
    return [one for one, _ in steps], [other for _, other in steps]


def test_two_balancers_over_the_same_ranks_alternate(ranks: RankPool) -> None:
    alone = ranks.run(2, _balance)
    by_rank = ranks.run(2, _balance_twice)
    assert [first for first, _ in by_rank] == alone
    for step in range(4):
        ids = [sample["id"] for _, second in by_rank for sample in second[step]]
        assert sorted(ids) == [first + 10 * step + i for first in (0, 100) for i in range(4)]


def _pass_wrong_group(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    of_other = [dist.new_group([other]) for other in range(world_size)][1 - rank]
    wrong: list[tuple[Any, str]] = [
        (mesh, r"group is a device mesh of the dimensions \('dp', 'tp'\); pass one dimension, such as"),
        (of_other, "this process is not a rank of the group; pass a group on its own ranks only"),
        ("dp", "group must be a process group or a device mesh, got str"),
    ]
    for group, message in wrong:
        with pytest.raises(ConfigError, match=message):
            Balancer(_batches(rank), BalanceConfig(cost=rich_tokens), group=group)


def test_wrong_group_is_an_error(ranks: RankPool) -> None:
    ranks.run(2, _pass_wrong_group)


def _pass_device(rank: int, world_size: int) -> None:
    # A rank that creates a group would wait there for the others.
    with patch.object(process_group.FailFastGroup, "__init__", side_effect=AssertionError("created a group")):
        Balancer(_batches(rank), BalanceConfig(cost=rich_tokens), device="cuda:7" if rank == 1 else None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device; exchange/test_cuda.py has these faults")
def test_device_that_one_rank_lacks_is_reported_on_all_ranks(ranks: RankPool) -> None:
    reason = "device is cuda:7, but PyTorch finds no CUDA device on this host; pass device=None"
    of_others = ("RankError", f"rank 1 failed: {reason}")
    failures = [(failure.type_name, failure.message) for failure in ranks.try_run(3, _pass_device)]
    assert failures == [of_others, ("ConfigError", reason), of_others]


def _create_on_one_rank(rank: int, world_size: int) -> None:
    if rank == 0:
        Balancer(_batches(rank), BalanceConfig(cost=rich_tokens, timeout=timedelta(seconds=1)))


def test_rank_that_creates_no_balancer_is_named(ranks: RankPool) -> None:
    failure, none = ranks.try_run(2, _create_on_one_rank)
    assert none is None
    assert failure.message.startswith("rank 1 has not created its Balancer in time (")
    assert failure.message.endswith("create one on every rank of the group, in the same order, or raise timeout")


def _length(rank: int, world_size: int, num_batches: list[int | None]) -> int:
    number = num_batches[rank]
    batches = iter(_batches(rank)) if number is None else _batches(rank, number)
    with Balancer(batches, BalanceConfig(cost=rich_tokens)) as balancer:
        return len(balancer)


def test_length_is_that_of_the_rank_with_the_most_batches(ranks: RankPool) -> None:
    assert ranks.run(3, _length, [2, 5, 0]) == [5, 5, 5]
    for failure in ranks.try_run(2, _length, [2, None]):
        assert failure.type_name == "TypeError"
        assert failure.message.endswith("the loader has no length, on this rank or on another one")
