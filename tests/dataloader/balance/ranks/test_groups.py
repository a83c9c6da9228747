from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics
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


def _balance_in_groups(rank: int, world_size: int) -> tuple[Seen, Seen]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    metrics: list[StepMetrics] = []
    of_mesh = _balance(mesh.get_local_rank(), world_size, mesh, metrics)
    assert len(metrics[0].after) == 2
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    assert isinstance(mine, dist.ProcessGroup)
    if rank >= 2:  # one group's Balancers are created, and their loops run, while the other's have not begun
        dist.barrier()
    disjoint = _balance(rank % 2, world_size, mine)
    if rank < 2:
        dist.barrier()
    return of_mesh, disjoint


def _balance_twice(rank: int, world_size: int) -> tuple[Seen, Seen]:
    # The first one reads the readers' batches in order, the second one in reverse.
    first = Balancer(_batches(rank), BalanceConfig(cost=rich_tokens))
    second = Balancer(_batches(world_size - 1 - rank), BalanceConfig(cost=rich_tokens))
    with first, second:
        steps = [(samples_of(one), samples_of(other)) for one, other in zip(first, second, strict=True)]
    return [one for one, _ in steps], [other for _, other in steps]


def test_tensor_parallel_peers_disjoint_groups_and_balancers_that_alternate_balance_alike(ranks: RankPool) -> None:
    first, second = alone = ranks.run(2, _balance)
    assert len(first) == len(second) == 4
    of_meshes, disjoint = zip(*ranks.run(4, _balance_in_groups), strict=True)
    assert of_meshes == (first, first, second, second)
    assert disjoint == (first, second, first, second)
    by_rank = ranks.run(2, _balance_twice)
    assert [seen for seen, _ in by_rank] == alone
    for step in range(4):
        ids = [sample["id"] for _, seen in by_rank for sample in seen[step]]
        assert sorted(ids) == [reader + 10 * step + i for reader in (0, 100) for i in range(4)]


def _length(rank: int, world_size: int) -> int:
    with Balancer(_batches(rank, [2, 5, 0][rank]), BalanceConfig(cost=rich_tokens)) as balancer:
        length = len(balancer)
    unsized: Any = iter(_batches(rank)) if rank == 1 else _batches(rank, 2)
    with (
        Balancer(unsized, BalanceConfig(cost=rich_tokens)) as balancer,
        pytest.raises(TypeError, match=r"^the loader has no length, on this rank or on another one$"),
    ):
        len(balancer)
    return length


def test_length_is_that_of_the_rank_with_the_most_batches(ranks: RankPool) -> None:
    assert ranks.run(3, _length) == [5, 5, 5]
