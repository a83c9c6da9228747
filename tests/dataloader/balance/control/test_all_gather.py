"""Small messages between ranks, on real Gloo groups."""

from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from evenrank.dataloader.balance import Balancer, HSTUCost, gather
from evenrank.dataloader.balance.control.all_gather import (
    Alone,
    FlatGather,
    Gather,
    HostGather,
    gather_objects,
    make_gather,
)
from tests.dataloader.rich_batch import rich_batch, samples_of
from tests.ranks import RankPool

_TIMEOUT = timedelta(seconds=20)
HOSTS = [
    ["a", "a", "b", "b"],
    ["a", "b", "a", "b"],  # not one behind the other
    ["a", "b", "b", "b"],  # not as many on each
    ["a", "a", "a", "a"],
    ["a", "b", "c", "d"],
]


def _talk(rank: int, world_size: int, hosts: list[str] | None) -> tuple[list[list[int]], list[object], int]:
    talk: Gather = FlatGather(_TIMEOUT) if hosts is None else HostGather(hosts, _TIMEOUT)
    for number in range(3):
        rows = talk.messages(np.array([rank, number, 7], dtype=np.uint8))
    objects = gather_objects(talk, {"rank": rank, "words": "x" * (10**rank)})
    nothing = gather_objects(talk, None)
    talk.close()
    talk.close()
    assert nothing == [None] * world_size
    return rows.tolist(), objects, len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize("hosts", [None, *HOSTS], ids=lambda hosts: "flat" if hosts is None else "".join(hosts))
def test_every_rank_hears_all_in_the_order_of_ranks(ranks: RankPool, hosts: list[str] | None) -> None:
    for rows, objects, groups in ranks.run(4, _talk, hosts):
        assert rows == [[rank, 2, 7] for rank in range(4)]
        assert objects == [{"rank": rank, "words": "x" * (10**rank)} for rank in range(4)]
        assert groups == 1  # only the default one is left


def test_without_a_process_group_there_is_one_message() -> None:
    alone = make_gather(_TIMEOUT)
    assert isinstance(alone, Alone)
    assert alone.messages(np.array([1, 2], dtype=np.uint8)).tolist() == [[1, 2]]
    assert gather_objects(alone, "x") == ["x"]


def _balance_by_host(rank: int, world_size: int) -> tuple[str, list[int]]:
    gather._RANKS_OF_A_FLAT_GATHER = 2
    gather._host = lambda: f"host {rank // 2}"
    try:
        batches = [rich_batch([[(rank * 5, 1), (1, 1)], [(1, 1), (1, rank)]], first_id=10 * rank)] * 5
        seen = []
        with Balancer(batches, cost=HSTUCost(hidden=1, heads=1, head_dim=1, layers=1, history_key="a")) as balancer:
            kind = type(balancer._gather).__name__
            for batch in balancer:
                seen += [sample["id"] for sample in samples_of(batch)]
        return kind, seen
    finally:
        gather._RANKS_OF_A_FLAT_GATHER = 512


def test_many_ranks_are_balanced_by_host(ranks: RankPool) -> None:
    by_rank = ranks.run(4, _balance_by_host)
    assert [kind for kind, _ in by_rank] == ["HostGather"] * 4
    assert sorted(sample for _, seen in by_rank for sample in seen) == sorted([0, 1, 10, 11, 20, 21, 30, 31] * 5)
