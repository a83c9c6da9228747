from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import LoaderConfig, Negatives, TimeWindows, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, LinearCost
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import open_store
from evenrank.datasets.store import Slices
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from tests.dataloader.batch_helpers import ids_of
from tests.s3_server import S3

EVENTS = """user,item,time,action,price
ann,tea,2026-03-01T10:00:00Z,1,0.5
bob,rice,2026-03-01T11:00:00Z,0,
ann,coffee,2026-03-02T10:00:00Z,2,2.0
ann,tea,2026-03-03T10:00:00.250Z,0,1.5
"""
ANN = {
    "user_id": "ann",
    "city": "Oslo",
    "tags": ["a", "b"],
    "age": 30.0,
    "item_id": ["coffee", "tea"],
    "action": [2, 0],
    "timestamp_ms": [datetime(2026, 3, 2, 10, tzinfo=UTC), datetime(2026, 3, 3, 10, 0, 0, 250_000, tzinfo=UTC)],
    "price": [2.0, 1.5],
    "length": 3,
}
BOB = {
    "user_id": "bob",
    "city": None,
    "tags": [],
    "age": 0.0,
    "item_id": ["rice"],
    "action": [0],
    "timestamp_ms": [datetime(2026, 3, 1, 11, tzinfo=UTC)],
    "price": [None],
    "length": 1,
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "log.csv").write_text(EVENTS)
    (folder / "users.csv").write_text("user,city,tags,age\nann,Oslo,a|b,30\n")
    log = TabularConfig(
        events=(folder / "log.csv",),
        user_column="user",
        item_column="item",
        timestamp_column="time",
        action_columns=("action",),
        event_columns=("price:float?",),
        context=folder / "users.csv",
        context_columns=("city", "tags:list", "age:float"),
    )
    config = PreprocessConfig(dataset="custom", out=folder / "data", custom=log, split="user:0")
    preprocess(config)
    return folder / "data"


def _by_user(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: str(row["user_id"]))


def test_the_first_rows_have_what_the_log_has(dataset: Path) -> None:
    store = open_store(dataset)
    assert _by_user(store.head(max_events=2)) == [ANN, BOB]
    assert store.head(1, max_events=2) == [row for row in store.head(max_events=2) if row in (ANN, BOB)][:1]
    assert [row["item_id"] for row in store.head(max_events=0)] == [[], []]
    assert store.head(0) == []


def test_rows_of_a_url_have_the_ids_of_its_vocabulary(dataset: Path, s3: S3) -> None:
    s3.put(dataset, "rows")
    assert _by_user(open_store(s3.url("rows")).head(max_events=2)) == [ANN, BOB]


def test_kept_ids_and_mapped_values_are_numbers_and_targets_are_counted(small_dataset: Path) -> None:
    whole = open_store(small_dataset)
    (index,) = np.flatnonzero(whole.lengths > 20)[:1]
    begin = whole.begins[index] + 2
    slices = Slices(*(np.array([value]) for value in (index, begin, begin + 12)))
    store = whole.sliced(slices, np.array([3], dtype=np.int32))
    (row,) = store.head()
    assert row["user_id"] == whole.columns["user_id"][index]
    assert row["item_id"] == whole.columns["item_id"][begin + 2 : begin + 12].tolist()
    assert (row["length"], row["num_targets"]) == (12, 3)
    key_map = KeyMap(num_embeddings=501, world_size=2, mode="hash_roundrobin")
    (mapped,) = store.remapped({"item_id": key_map}).head()
    assert mapped["item_id"] == key_map(np.array(row["item_id"])).tolist() != row["item_id"]


def test_a_missing_vocabulary_and_a_wrong_number_are_one_line(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="n must be at least 0, got -1"):
        open_store(dataset).head(-1)
    store = open_store(dataset)
    moved = (dataset / "vocabulary_item_id.parquet").rename(tmp_path / "moved")
    try:
        with pytest.raises(DataError, match=r"vocabulary_item_id\.parquet cannot be read"):
            store.head()
    finally:
        moved.rename(dataset / "vocabulary_item_id.parquet")


KEY_MAPS = {"item_id": KeyMap(num_embeddings=501, world_size=2, mode="hash_roundrobin")}


@pytest.mark.parametrize(
    ("options", "balance"),
    [
        ({"key_maps": KEY_MAPS, "max_history_length": 5}, {}),
        ({"negatives": Negatives(count=2)}, {"window": 2}),
        ({"max_num_candidates": 2, "order": TimeWindows(every="2w")}, {"pack": True, "max_tokens_per_rank": 150}),
    ],
)
def test_the_next_samples_of_a_rank_are_seen_before_they_come(
    small_dataset: Path, options: dict[str, Any], balance: dict[str, Any]
) -> None:
    config = LoaderConfig(batch_size=4, **options)
    balancing = BalanceConfig(cost=LinearCost(interleave_actions=False), **balance) if balance else None
    users = open_store(small_dataset).columns["user_id"]
    for rank in range(2):
        loader = build_loader(small_dataset, config, rank=rank, world_size=2, balance=balancing)
        loader.load_state_dict([loader.state_dict(after=batch) for batch in loader][1])
        state, shown = loader.state_dict(), loader.peek(6)
        assert shown[:2] == loader.peek(2)
        assert loader.state_dict() == state
        rows = loader.stores[0].rows_of(np.array([row["sample_id"] for row in shown]))
        assert [row["user_id"] for row in shown] == users[rows].tolist()
        items = open_store(small_dataset).columns["item_id"]
        for row, end in zip(shown, loader.stores[0].ends[[row["sample_id"] for row in shown]], strict=True):
            assert row["item_id"] == items[end - min(row["length"], 10) : end].tolist()
        assert [row["sample_id"] for row in shown] == [each for batch in loader for each in ids_of(batch)][:6]


def test_what_cannot_peek_says_so(small_dataset: Path) -> None:
    stream = build_stream_loader(small_dataset, LoaderConfig(batch_size=4), rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"a StreamLoader cannot peek; call open_store\(\.\.\.\)\.head\(\)"):
        stream.peek()
