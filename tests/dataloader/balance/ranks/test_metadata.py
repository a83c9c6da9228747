import itertools
import socket
from datetime import timedelta
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.ranks import handshake
from evenrank.dataloader.balance.ranks.metadata import MetadataAllGather, all_gather_objects
from evenrank.dataloader.balance.ranks.process_group import members_of
from tests.dataloader.balance.costs import rich_tokens
from tests.dataloader.rich_batch import rich_batch, samples_of
from tests.ranks import RankPool

_TIMEOUT = timedelta(seconds=20)


def _gather_messages(rank: int, world_size: int, hosts: str | None) -> None:
    gather = MetadataAllGather(members_of(None, _TIMEOUT), hosts and list(hosts), _TIMEOUT)
    for number in range(3):
        messages = gather.all_gather(np.array([rank, number, 7], dtype=np.uint8))
        assert messages.tolist() == [[other, number, 7] for other in range(world_size)]
    objects = all_gather_objects(gather, {"rank": rank, "text": "x" * (10**rank)})
    assert objects == [{"rank": other, "text": "x" * (10**other)} for other in range(world_size)]
    assert all_gather_objects(gather, None) == [None] * world_size
    gather.close()
    gather.close()
    assert len(dist.distributed_c10d._world.pg_map) == 1  # none besides the default group was ever registered


# The host of each rank; None: a flat all-gather.
@pytest.mark.parametrize("hosts", [None, "abab", "abbb", "aaaa", "abcd"])
def test_every_rank_gets_all_messages_in_rank_order(ranks: RankPool, hosts: str | None) -> None:
    ranks.run(4, _gather_messages, hosts)


def _balance_by_hosts(rank: int, world_size: int) -> list[int]:
    batches = [rich_batch([[(rank * 5, 1), (1, 1)], [(1, 1), (1, rank)]], first_id=10 * rank)] * 5
    with (
        patch.object(handshake, "MAX_RANKS_OF_FLAT_ALL_GATHER", 2),
        patch.object(socket, "gethostname", lambda: f"host {rank // 2}"),
        Balancer(batches, BalanceConfig(cost=rich_tokens)) as balancer,
    ):
        assert balancer._connection.all_gather._ranks_by_host == [[0, 1], [2, 3]]
        return [sample["id"] for batch in balancer for sample in samples_of(batch)]


def test_many_ranks_gather_by_hosts_and_balance(ranks: RankPool) -> None:
    seen = itertools.chain(*ranks.run(4, _balance_by_hosts))
    assert sorted(seen) == sorted([0, 1, 10, 11, 20, 21, 30, 31] * 5)
