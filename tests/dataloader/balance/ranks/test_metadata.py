"""All-gathers of metadata messages, on real Gloo groups."""

import socket
from datetime import timedelta
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost
from evenrank.dataloader.balance.ranks import handshake
from evenrank.dataloader.balance.ranks.metadata import MetadataAllGather, all_gather_objects
from evenrank.dataloader.balance.ranks.process_group import members_of
from tests.dataloader.rich_batch import rich_batch, samples_of
from tests.ranks import RankPool

_TIMEOUT = timedelta(seconds=20)
HOSTS = [
    ["a", "b", "a", "b"],  # interleaved
    ["a", "b", "b", "b"],  # different numbers of ranks
    ["a", "a", "a", "a"],
    ["a", "b", "c", "d"],
]


def _gather_messages(rank: int, world_size: int, hosts: list[str] | None) -> tuple[list[list[int]], list[object]]:
    members = members_of(None, _TIMEOUT)
    gather = MetadataAllGather(members, hosts, _TIMEOUT)
    for number in range(3):
        messages = gather.all_gather(np.array([rank, number, 7], dtype=np.uint8))
    objects = all_gather_objects(gather, {"rank": rank, "text": "x" * (10**rank)})
    nones = all_gather_objects(gather, None)
    gather.close()
    gather.close()
    assert nones == [None] * world_size
    assert len(dist.distributed_c10d._world.pg_map) == 1  # none besides the default group was ever registered
    return messages.tolist(), objects


@pytest.mark.parametrize("hosts", [None, *HOSTS], ids=lambda hosts: "flat" if hosts is None else "".join(hosts))
def test_every_rank_gets_all_messages_in_rank_order(ranks: RankPool, hosts: list[str] | None) -> None:
    for messages, objects in ranks.run(4, _gather_messages, hosts):
        assert messages == [[rank, 2, 7] for rank in range(4)]
        assert objects == [{"rank": rank, "text": "x" * (10**rank)} for rank in range(4)]


def test_without_a_process_group_there_is_one_message() -> None:
    gather = MetadataAllGather(members_of(None, _TIMEOUT), None, _TIMEOUT)
    assert gather.all_gather(np.array([1, 2], dtype=np.uint8)).tolist() == [[1, 2]]
    assert all_gather_objects(gather, "x") == ["x"]


def _balance_by_hosts(rank: int, world_size: int) -> tuple[list[list[int]], list[int]]:
    batches = [rich_batch([[(rank * 5, 1), (1, 1)], [(1, 1), (1, rank)]], first_id=10 * rank)] * 5
    seen: list[int] = []
    cost = HSTUCost(hidden=1, heads=1, head_dim=1, layers=1, interleave_actions=False, history_key="a")
    with (
        patch.object(handshake, "MAX_RANKS_OF_FLAT_ALL_GATHER", 2),
        patch.object(socket, "gethostname", lambda: f"host {rank // 2}"),
        Balancer(batches, BalanceConfig(cost=cost)) as balancer,
    ):
        ranks_by_host = balancer._connection.all_gather._ranks_by_host
        for batch in balancer:
            seen += [sample["id"] for sample in samples_of(batch)]
    return ranks_by_host, seen


def test_many_ranks_gather_by_hosts_and_balance(ranks: RankPool) -> None:
    by_rank = ranks.run(4, _balance_by_hosts)
    assert [hosts for hosts, _ in by_rank] == [[[0, 1], [2, 3]]] * 4
    assert sorted(sample for _, seen in by_rank for sample in seen) == sorted([0, 1, 10, 11, 20, 21, 30, 31] * 5)
