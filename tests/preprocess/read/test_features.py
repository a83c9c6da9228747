"""Features of users and items as loaders read them, and their lookup; golden/features.toml has files of every kind."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from evenrank.datasets.schema import Manifest
from evenrank.preprocess.read.features import FeatureLookup, Features
from tests.preprocess.build.id_logs import number, write_log

LOG = [("ann", "x", 0), ("ann", "y", 1), ("bob", "z", 2), ("bob", "x", 3), ("eve", "x", 4)]
ITEMS = [{"item": "x", "brand": "B", "price": 1.5}, {"item": "y", "brand": None}, {"item": "q", "brand": "A"}]


def run(folder: Path, *columns: str, items: list[dict[str, Any]] = ITEMS, kept_as: str = "events") -> Manifest:
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    features = {"item_features": folder / "items.jsonl", "item_columns": columns, "item_features_as": kept_as}
    return number(folder / "out", write_log(folder / "log.csv", LOG), log=features if columns else {})


def test_a_change_of_the_table_is_another_content_and_replaces_the_dataset(tmp_path: Path) -> None:
    hashes = []
    for price in (1.5, 2, 1.5):
        manifest = run(tmp_path, "price:float", items=[{"item": "x", "price": price}], kept_as="table")
        assert [source.path for source in manifest.sources] == ["log.csv", "items.jsonl"]
        hashes.append(manifest.content_hash)
    assert hashes[0] == hashes[2] != hashes[1]
    assert run(tmp_path).item_features is None
    assert not (tmp_path / "out" / "item_features.parquet").exists()


def test_keys_without_features_are_counted_once_and_get_zeros() -> None:
    rows = pl.DataFrame({"sex": [2, 1, 2], "tags": [[1], [], [2, 1]]})
    lookup = FeatureLookup(Features(keys=np.array([4, 2, 9]), rows=rows, values={}), of="users")
    found, seen = lookup.lookup(np.array([9, 3, 10, 0, 2]))
    assert found.rows() == [(2, [2, 1]), (0, []), (0, []), (0, []), (1, [])]
    again, seen_again = lookup.lookup(np.array([3, 2, 2]))
    assert again["sex"].to_list() == [0, 1, 1]
    for of_one in (seen, seen_again):
        lookup.record(of_one)
    assert lookup.audit() == {"users with features but no event (left out)": 1, "users without features": 3}
    nobody = Features(keys=np.empty(0, dtype=np.int64), rows=pl.DataFrame(schema={"age": pl.Float32}), values={})
    lookup = FeatureLookup(nobody, of="users")  # where nobody counts as without features
    found, seen = lookup.lookup(np.array([9, 3, 9]))
    lookup.record(seen)
    assert found.equals(pl.DataFrame({"age": [0.0] * 3}, schema={"age": pl.Float32}))
    assert set(lookup.audit().values()) == {0}
