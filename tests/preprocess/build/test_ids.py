"""Which rule the ids of a column get, and what they then are."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.hashing import mix64
from evenrank.datasets.schema import ITEM_ID, USER_ID
from evenrank.preprocess.build.ids import choose, parse_ids, parse_unknown
from tests.preprocess.build.id_logs import number, vocabulary, write_log
from tests.preprocess.decoded import read_rows


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", {}),
        ("dense", {USER_ID: "dense", ITEM_ID: "dense"}),
        ("item=hash:1000, user=keep", {USER_ID: "keep", ITEM_ID: "hash:1000"}),
        ("user=auto", {USER_ID: "auto"}),
        (f"item=hash:{2**62}", {ITEM_ID: f"hash:{2**62}"}),
    ],
)
def test_rules_are_for_both_columns_or_one(text: str, rules: dict[str, str]) -> None:
    assert parse_ids(text) == rules


@pytest.mark.parametrize(
    "text",
    [
        "sparse",
        "item=",
        "dense,keep",
        "item=dense,item=keep",
        "dense,item=keep",
        "action=keep",
        "hash",
        "hash:0",
        "hash:-1",
        "hash:1e3",
        "hash:²",
        "item=dense,",
        "user:keep",
        "hash:4611686018427387905",
    ],
)
def test_other_rules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^invalid ids .*; expected auto, dense, keep or hash:N \(N from 1 to 2\^62"):
        parse_ids(text)


def test_rules_for_unknown_values_are_parsed_alike() -> None:
    assert parse_unknown("item=oov,user=append") == {USER_ID: "append", ITEM_ID: "oov"}
    assert parse_unknown("drop") == {USER_ID: "drop", ITEM_ID: "drop"}
    with pytest.raises(ConfigError, match=r"^invalid unknown 'keep'; expected append, oov, drop, fail, for both"):
        parse_unknown("keep")


@given(st.integers(1, 1000), st.integers(-5, 3000))
def test_integers_are_kept_up_to_twice_their_distinct_number(distinct: int, largest: int) -> None:
    assert choose("int64", distinct=distinct, least=0, largest=largest) == (
        "dense" if largest > 2 * distinct else "keep"
    )
    for kind in ("uint64", "text"):
        assert choose(kind, distinct=distinct, least=0, largest=largest) == "dense"
    assert choose("int64", distinct=distinct, least=-1, largest=largest) == "dense"


@pytest.mark.parametrize(
    ("values", "dtype", "rule", "kind"),
    [
        ([0, 1, 6], pl.Int64, "keep", "int64"),
        ([0, 1, 6], pl.Int8, "keep", "int64"),
        ([0, 1, 7], pl.Int64, "dense", "int64"),
        ([-1, 0, 1], pl.Int32, "dense", "int64"),
        ([0, 1, 2], pl.UInt32, "dense", "uint64"),
        ([2, 1, 2**64 - 1], pl.UInt64, "dense", "uint64"),
        (["0", "1", "2"], pl.String, "dense", "text"),
        (["1", "01", "+1"], pl.String, "dense", "text"),
        (["b", "a", "c"], pl.Categorical, "dense", "text"),
        (["b", "a", "c"], pl.Enum(["c", "b", "a"]), "dense", "text"),
    ],
    ids=str,
)
def test_auto_chooses_by_the_values_of_a_column(
    tmp_path: Path, values: list[Any], dtype: Any, rule: str, kind: str
) -> None:
    log = [(value, value, index) for index, value in enumerate(values)]
    manifest = number(tmp_path / "out", write_log(tmp_path / "log.parquet", log, dtype=dtype))
    for column in (USER_ID, ITEM_ID):
        summary = manifest.ids[column]
        assert (summary.rule, summary.kind, summary.distinct) == (rule, kind, 3)
        assert summary.largest == (None if kind == "text" else max(values))
        if rule == "dense":
            assert vocabulary(tmp_path / "out", column) == [(id, value, 1) for id, value in enumerate(values, 1)]
            assert manifest.vocabulary_sizes[column] == 4
        else:
            assert not (tmp_path / "out" / f"vocabulary_{column}.parquet").exists()
            assert manifest.vocabulary_sizes[column] == max(values) + 1
    rows = sorted((row["user_id"], row["item_id"]) for row in read_rows(tmp_path / "out" / "train"))
    ids = sorted(values) if rule == "keep" else [1, 2, 3]
    assert rows == [(id, [id]) for id in ids]


def test_values_of_equal_time_are_in_the_order_of_their_values_not_of_their_bits(tmp_path: Path) -> None:
    log = [(value, value, 0) for value in (2**64 - 1, 2, 2**63)]
    number(tmp_path / "out", write_log(tmp_path / "log.parquet", log, dtype=pl.UInt64))
    assert vocabulary(tmp_path / "out") == [(1, 2, 1), (2, 2**63, 1), (3, 2**64 - 1, 1)]


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=60), st.integers(1, 40) | st.just(2**62))
def test_hashes_say_how_many_values_share_their_id(
    tmp_path_factory: pytest.TempPathFactory, items: list[int], size: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    path = write_log(folder / "log.parquet", [(1, item, index) for index, item in enumerate(items)])
    manifest = number(folder / "out", path, ids=f"item=hash:{size},user=keep")
    ids = {item: int(mix64(np.array([item % 2**64], dtype=np.uint64))[0]) % size for item in items}
    (row,) = read_rows(folder / "out" / "train")
    assert row["item_id"] == [ids[item] for item in items]
    shared = Counter(ids.values())
    assert manifest.ids[ITEM_ID].collisions == sum(count for count in shared.values() if count > 1)
    assert manifest.ids[ITEM_ID].distinct == len(ids)
    assert manifest.vocabulary_sizes[ITEM_ID] == size
    assert not list((folder / "out").glob("vocabulary_*"))


@pytest.mark.parametrize("value", [-1, 2**63])
def test_ids_that_are_no_rows_cannot_be_kept(tmp_path: Path, value: int) -> None:
    dtype = pl.UInt64 if value > 0 else pl.Int64
    path = write_log(tmp_path / "log.parquet", [(1, value, 0)], dtype=dtype)
    with pytest.raises(DataError, match=rf"item.*{value}|{value}.*item"):
        number(tmp_path / "out", path, ids="keep")


def test_texts_cannot_be_kept(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.csv", [("u", "x", 0)])
    with pytest.raises((ConfigError, DataError), match=r"user") as error:
        number(tmp_path / "out", path, ids="keep")
    assert "\n" not in str(error.value)
