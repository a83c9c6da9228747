from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import DataError
from evenrank.dataloader import LoaderConfig, Negatives, TimeWindows, build_loader
from evenrank.dataloader.balance import BalanceConfig, LinearCost
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import open_store
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from tests.dataloader.batch_helpers import ids_of
from tests.s3_server import S3

EVENTS = """user,item,time,action,price
ann,tea,2026-03-01T10:00:00Z,1,0.5
bob,rice,2026-03-01T11:00:00Z,0,
ann,coffee,2026-03-02T10:00:00Z,2,2.0
ann,tea,2026-03-03T10:00:00.250Z,0,1.5
"""
# The newest two events of each user.
ANN: dict[str, Any] = {"user_id": "ann", "city": "Oslo", "tags": ["a", "b"], "age": 30.0, "length": 3}
ANN |= {"item_id": ["coffee", "tea"], "action": [2, 0], "price": [2.0, 1.5]}
ANN["timestamp_ms"] = [datetime(2026, 3, 2, 10, tzinfo=UTC), datetime(2026, 3, 3, 10, 0, 0, 250_000, tzinfo=UTC)]
BOB: dict[str, Any] = {"user_id": "bob", "city": None, "tags": [], "age": 0.0, "length": 1, "item_id": ["rice"]}
BOB |= {"action": [0], "timestamp_ms": [datetime(2026, 3, 1, 11, tzinfo=UTC)], "price": [None]}


def test_the_first_rows_have_what_the_log_has_also_at_a_url(tmp_path: Path, s3: S3) -> None:
    (tmp_path / "log.csv").write_text(EVENTS)
    (tmp_path / "users.csv").write_text("user,city,tags,age\nann,Oslo,a|b,30\n")
    names: Any = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    context: Any = {"context": tmp_path / "users.csv", "context_columns": ("city", "tags:list", "age:float")}
    events: Any = {"action_columns": ("action",), "event_columns": ("price:float?",)}
    log = TabularConfig(events=(tmp_path / "log.csv",), **names, **context, **events)
    preprocess(PreprocessConfig(dataset="custom", out=(data := tmp_path / "data"), custom=log, split="user:0"))
    s3.put(data, "rows")
    for store in (open_store(data), open_store(s3.url("rows"))):
        rows = store.head(max_events=2)
        assert sorted(rows, key=lambda row: str(row["user_id"])) == [ANN, BOB]
        assert (store.head(1, max_events=2), store.head(0)) == (rows[:1], [])
        assert [row["item_id"] for row in store.head(max_events=0)] == [[], []]
    (data / "vocabulary_item_id.parquet").unlink()
    with pytest.raises(DataError, match=r"vocabulary_item_id\.parquet cannot be read"):
        open_store(data).head()


KEY_MAP = KeyMap(num_embeddings=501, world_size=2, mode="hash_roundrobin")
LOADERS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"key_maps": {"item_id": KEY_MAP}, "max_history_length": 5}, None),
    ({"negatives": Negatives(count=2)}, {"window": 2}),
    ({"max_num_candidates": 2, "order": TimeWindows(every="2w")}, {"pack": True, "max_tokens_per_rank": 150}),
]


def test_the_next_samples_of_a_rank_are_seen_before_they_come_with_the_ids_of_the_log(small_dataset: Path) -> None:
    stored = open_store(small_dataset).columns
    for rank, (options, balance) in ((rank, each) for rank in range(2) for each in LOADERS):
        balancing = balance and BalanceConfig(cost=LinearCost(interleave_actions=False), **balance)
        config = LoaderConfig(batch_size=4, **options)
        loader = build_loader(small_dataset, config, rank=rank, world_size=2, balance=balancing or None)
        loader.load_state_dict([loader.state_dict(after=batch) for batch in loader][1])
        state, shown = loader.state_dict(), loader.peek(6)
        assert (shown[:2], loader.state_dict()) == (loader.peek(2), state)
        (store, *_), ids = loader.stores, [row["sample_id"] for row in shown]
        assert [row["user_id"] for row in shown] == stored["user_id"][store.rows_of(np.array(ids))].tolist()
        for row, end in zip(shown, store.ends[ids], strict=True):
            assert row["item_id"] == stored["item_id"][end - min(row["length"], 10) : end].tolist()
        assert ids == [each for batch in loader for each in ids_of(batch)][:6]
