from datetime import timedelta

import numpy as np
import torch.distributed as dist

from evenrank.dataloader.balance.ranks.metadata import all_gather_bytes, all_gather_objects
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, members_of
from tests.ranks import RankPool

_TIMEOUT = timedelta(seconds=20)


def _gather_messages(rank: int, world_size: int) -> None:
    group = FailFastGroup(members_of(None, _TIMEOUT), "metadata", _TIMEOUT)
    for number in range(3):
        messages = all_gather_bytes(group, np.array([rank, number, 7], dtype=np.uint8))
        assert messages.tolist() == [[other, number, 7] for other in range(world_size)]
    objects = all_gather_objects(group, {"rank": rank, "text": "x" * (10**rank)})
    assert objects == [{"rank": other, "text": "x" * (10**other)} for other in range(world_size)]
    assert all_gather_objects(group, None) == [None] * world_size
    group.close()
    group.close()
    assert len(dist.distributed_c10d._world.pg_map) == 1  # none besides the default group was ever registered


def test_every_rank_gets_all_messages_in_rank_order(ranks: RankPool) -> None:
    ranks.run(4, _gather_messages)
