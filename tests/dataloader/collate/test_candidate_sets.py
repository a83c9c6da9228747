"""Candidate sets: each sample has its user's items, on any ranks, and users without a set are counted."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evenrank.dataloader import LoaderConfig, Pools, StreamConfig, Targets, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import open_store
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.ranks import RankPool

MAPS = {name: KeyMap(num_embeddings=903, world_size=2, mode="hash_roundrobin") for name in ("item_id", "user_id")}
LEFT_OUT = "no candidate set of the user"


def _set_of(user: int) -> list[int]:
    """Return the items of a user, none of some; those of every fifth user are in no file."""
    return [(user * 7 + item) % 400 + 1 for item in range(user % 5)]


def _write(path: Path, data: Path) -> Path:
    users = [user for user in open_store(data).columns["user_id"][::-1].tolist() if user % 5 != 2] + [10**12]
    columns = {"user_id": users, "candidates": pa.array(map(_set_of, users), pa.list_(pa.int32()))}
    pq.write_table(pa.table(columns), path)
    return path


def _samples(batches: Any) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for batch in batches:
        rows = rows_of(batch.candidate_sets, "item_id")
        assert rows[batch.num_real :] == [[]] * (batch.batch_size - batch.num_real)
        assert batch.length_limits["candidate_sets.item_id"] == 4
        found |= dict(zip(ids_of(batch), rows, strict=False))
    return found


def _config(sets: Path, **options: Any) -> LoaderConfig:
    return LoaderConfig(**{"batch_size": 8, "max_num_candidates": 1, "candidate_sets": sets, **options})


WAYS: dict[str, dict[str, Any]] = {
    "rows": {},
    "mapped": {"key_maps": MAPS, "user_id": True},
    "targets": {"order": Targets(min_history=3), "num_workers": 1},
    "pools": {"pools": Pools(values=(1, 2))},
}


@pytest.mark.parametrize("way", WAYS)
def test_samples_have_the_items_of_their_user(small_dataset: Path, tmp_path: Path, way: str) -> None:
    sets = _write(tmp_path / "sets.parquet", small_dataset)
    loader = build_loader(small_dataset, _config(sets, **WAYS[way]), rank=0, world_size=1)
    found, (store,), raw = _samples(loader), loader.stores, open_store(small_dataset)
    users = raw.columns["user_id"][store.rows_of(np.arange(len(store)))]
    is_sample = (store.lengths > 0) & (users % 5 != 2)
    expected = {row: _set_of(int(users[row])) for row in np.flatnonzero(is_sample).tolist()}
    if way == "mapped":
        expected = {row: MAPS["item_id"](np.array(items, dtype=np.int64)).tolist() for row, items in expected.items()}
    assert found == expected
    assert 0 < loader.left_out[LEFT_OUT] == np.count_nonzero(users % 5 == 2)
    balanced = _config(sets, **WAYS[way])
    ranks = [
        build_loader(small_dataset, balanced, rank=rank, world_size=3, balance=BalanceConfig(cost=COST, window=2))
        for rank in range(3)
    ]
    assert {sample: items for each in ranks for sample, items in _samples(each).items()} == expected


def test_streams_have_them_too(small_dataset: Path, tmp_path: Path) -> None:
    for options in ({}, {"key_maps": MAPS, "user_id": True}):
        config = _config(_write(tmp_path / "sets.parquet", small_dataset), **options)
        stream = build_stream_loader(small_dataset, config, StreamConfig(lanes=4), rank=0, world_size=1)
        loader = build_loader(small_dataset, config, rank=0, world_size=1)
        assert _samples(stream) == _samples(loader)
        assert stream.left_out[LEFT_OUT] == loader.left_out[LEFT_OUT]


def _exchanged(rank: int, world_size: int, data: Path, sets: Path) -> dict[int, list[int]]:
    loader = build_loader(data, _config(sets), rank=rank, world_size=world_size)
    with Balancer(loader, BalanceConfig(cost=COST, window=2)) as balancer:
        return _samples(balancer)


def test_they_travel_with_their_samples(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    sets = _write(tmp_path / "sets.parquet", small_dataset)
    expected = _samples(build_loader(small_dataset, _config(sets), rank=0, world_size=1))
    of_ranks = ranks.run(2, _exchanged, small_dataset, sets)
    assert of_ranks[0].keys().isdisjoint(of_ranks[1])
    assert of_ranks[0] | of_ranks[1] == expected


def test_a_sample_without_a_set_is_none(small_dataset: Path, tmp_path: Path) -> None:
    loader = build_loader(small_dataset, _config(_write(tmp_path / "sets", small_dataset)), rank=0, world_size=1)
    with pytest.raises(IndexError, match="without a candidate set; it is not a sample"):
        loader.collate(loader.left_out_rows[LEFT_OUT][:1])
