"""Features of items: files of all formats, encoded, written, and led back to the raw values; and their lookup."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.datasets import open_store, read_manifest
from evenrank.datasets.schema import Manifest
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from evenrank.preprocess.read.features import FeatureLookup, Features
from tests.datasets.crafted import update_manifest
from tests.preprocess.build.id_logs import NAMES, write_log
from tests.preprocess.decoded import decode, read_rows

LOG = [("ann", "x", 0), ("ann", "y", 1), ("bob", "z", 2), ("bob", "x", 3), ("eve", "x", 4)]
ITEMS = '{"item":"x","brand":"B","price":1.5}\n{"item":"y","brand":null}\n{"item":"q","brand":"A","price":2}\n'


def run(folder: Path, items: Path | None, *columns: str, table: bool = False) -> Manifest:
    features: dict[str, Any] = {"item_features": items, "item_columns": columns} if items else {}
    features |= {"item_features_as": "table"} if table else {}
    custom = TabularConfig(events=(write_log(folder / "log.csv", LOG),), **NAMES, **features)
    return preprocess(PreprocessConfig(dataset="custom", out=folder / "out", custom=custom, split="none"))


TEXTS = st.text("ab,\"'é[ ", max_size=3)
TAGS = st.one_of(st.none(), st.lists(st.one_of(st.none(), TEXTS), max_size=3))
FLOATS = st.one_of(st.none(), st.floats(1 - 2**24, 2**24 - 1, width=32))
FEATURES = st.tuples(st.one_of(st.none(), TEXTS), TAGS, FLOATS, st.one_of(st.none(), st.integers(-9, 9)))
TYPES = {"item": pl.String, "brand": pl.String, "tags": pl.List(pl.String), "price": pl.Float64, "year": pl.Int64}


@settings(max_examples=20)
@given(
    items=st.dictionaries(st.sampled_from("xyzq"), FEATURES, min_size=1),
    suffix=st.sampled_from([".jsonl", ".parquet", ".csv"]),
)
def test_the_table_of_items_joined_with_its_vocabularies_is_the_raw_file(
    tmp_path_factory: pytest.TempPathFactory, items: dict[str, Any], suffix: str
) -> None:
    folder = tmp_path_factory.mktemp("items")
    rows = [dict(zip(TYPES, (item, *features), strict=True)) for item, features in items.items()]
    file = folder / f"items{suffix}"
    if suffix == ".csv":  # whose fields begin with [ only if they are JSON, and have no other separators than |
        to_plain = str.maketrans("[, ", "(..")
        for row in rows:
            row["tags"] = row["tags"] and [tag and tag.translate(to_plain) for tag in row["tags"]]
        joined = pl.col(pl.List(pl.String)).list.join("|", ignore_nulls=True)
        pl.DataFrame(rows, schema=TYPES).with_columns(joined).write_csv(file)
    elif suffix == ".parquet":
        pl.DataFrame(rows, schema=TYPES).write_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = run(folder, file, "brand", "tags:list", "price:float", "year:id", table=True)
    expected = {
        row["item"]: {
            "brand": row["brand"] or None,
            "tags": [tag for tag in row["tags"] or () if tag],
            "price": row["price"] or 0,
            "year": row["year"],
        }
        for row in rows
        if row["item"] != "q"  # which has no event
    }
    table = pl.read_parquet(folder / "out" / "item_features.parquet")
    assert table["item_id"].to_list() == sorted(table["item_id"].unique())
    decoded = decode(folder / "out", table.to_dicts(), features=True)
    assert {row.pop("item_id"): row for row in decoded} == expected
    assert read_manifest(folder / "out") == manifest
    for name in ("brand", "tags", "year"):
        vocabulary = pl.read_parquet(folder / "out" / f"vocabulary_{name}.parquet")
        raw = [row[name] for row in expected.values()]
        occurring = [value for values in raw for value in (values if name == "tags" else [values])]
        assert vocabulary["count"].to_list() == [occurring.count(value) for value in vocabulary["value"]]
        assert vocabulary["value"].to_list() == sorted(vocabulary["value"])
        assert manifest.vocabulary_sizes[name] == len(vocabulary) + 1


def test_loaders_read_features_and_refuse_ids_outside_their_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text(ITEMS)
    manifest = run(tmp_path, tmp_path / "items.jsonl", "brand", "price:float")
    config = LoaderConfig(batch_size=3, order="rows", extra_events=("brand", "price"))
    (batch,) = build_loader(tmp_path / "out", config, rank=0, world_size=1)
    rows = read_rows(tmp_path / "out" / "train")
    assert batch.features["brand"].values().tolist() == [brand for row in rows for brand in row["brand"]]
    assert batch.float_features is not None
    assert batch.float_features["price"].values().tolist() == [price for row in rows for price in row["price"]]
    update_manifest(tmp_path / "out", vocabulary_sizes={**manifest.vocabulary_sizes, "brand": 2})
    with pytest.raises(DataError, match=r"column 'brand' has values from 0 to 2, which must be in 0\.\.1; preprocess"):
        open_store(tmp_path / "out")


def test_a_change_of_the_table_is_another_content_and_replaces_the_dataset(tmp_path: Path) -> None:
    hashes = []
    for price in (1.5, 2, 1.5):
        (tmp_path / "items.jsonl").write_text(json.dumps({"item": "x", "price": price}) + "\n")
        manifest = run(tmp_path, tmp_path / "items.jsonl", "price:float", table=True)
        assert [source.path for source in manifest.sources] == ["log.csv", "items.jsonl"]
        hashes.append(manifest.content_hash)
    assert hashes[0] == hashes[2] != hashes[1]
    path = tmp_path / "out" / "manifest.json"
    raw = json.loads(path.read_text())
    for wrong, message in (({"path": "../x"}, "malformed field"), ({"sha256": "0" * 64}, "has content hash")):
        path.write_text(json.dumps({**raw, "item_features": {**raw["item_features"], **wrong}}))
        with pytest.raises(DataError, match=message):
            read_manifest(tmp_path / "out")
    assert run(tmp_path, None).item_features is None
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
