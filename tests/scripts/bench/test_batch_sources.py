import contextlib
from typing import Any

import pytest
import torch
from batch_sources import PREPARED, SOURCES, Rank

from evenrank.dataloader.balance import STRATEGIES
from tests.ranks import RankPool

KEYS = ["user_id", "user_age", "item_id", "action"]


def first_batches(rank: int, world_size: int) -> dict[str, tuple[list[str], list[int], int]]:
    with contextlib.ExitStack() as close:
        this = Rank(device=torch.device("cpu"), rank=rank, world_size=world_size, num_batches=1, close=close)
        found = {}
        for name, source in SOURCES.items():
            batches = source(this)
            batch = next(batches)
            fields: Any = dict(batch.tensors())
            lengths = fields["features"]["item_id"].lengths()[: batch.num_real]
            assert fields["labels"].keys() == ["label"]
            assert fields["features"].values().dtype == torch.int64
            found[name] = (fields["features"].keys(), lengths.tolist(), batch.batch_size)
        return found


def test_all_sources_have_the_same_kind_of_batches(ranks: RankPool) -> None:
    first, second = ranks.run(2, first_batches)
    assert list(first) == [PREPARED, "prepared again", "loader", "no exchange", *STRATEGIES, "StatefulDataLoader"]
    for name, (keys, lengths, batch_size) in first.items():
        assert keys == second[name][0]
        assert sorted(keys) == sorted(KEYS)
        assert batch_size == 32
        every = lengths + second[name][1]
        assert len(every) == 64
        assert all(1 <= length <= 4096 for length in every)
        assert 200 < sum(every) / 64 < 1100
    # Balanced ones have the samples of the step, evenly.
    assert first[PREPARED][1] == first["none"][1] != first["lpt-swap"][1]
    for strategy in STRATEGIES:
        assert sorted(first[strategy][1] + second[strategy][1]) == sorted(first[PREPARED][1] + second[PREPARED][1])
    for name in ("no exchange", "lpt-swap", "StatefulDataLoader"):
        assert sum(first[name][1]) == pytest.approx(sum(second[name][1]), rel=0.2)
