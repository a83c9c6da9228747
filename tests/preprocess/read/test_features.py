"""Features of users and items as loaders read them, and their lookup; golden/features.toml has files of every kind."""

import json
from pathlib import Path

import numpy as np
import polars as pl

from evenrank.preprocess.read.features import FeatureLookup, Features
from tests.preprocess.build.id_logs import number, write_log


def test_a_change_of_the_table_is_another_content_and_replaces_the_dataset(tmp_path: Path) -> None:
    path, log, hashes = tmp_path / "items.jsonl", write_log(tmp_path / "log.csv", [("ann", "x", 0)]), []
    features = {"item_features": path, "item_columns": ("price:float",), "item_features_as": "table"}
    for price in (1.5, 2, 1.5):
        path.write_text(json.dumps({"item": "x", "price": price}) + "\n")
        hashes.append(number(tmp_path / "out", log, log=features).content_hash)
    assert hashes[0] == hashes[2] != hashes[1]
    assert number(tmp_path / "out", log).item_features is None
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
