"""Units of times, and keys of ids; golden logs have values of all kinds, and those that cannot be read."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.preprocess.read import keys as key_table
from evenrank.preprocess.read.keys import KeyTable, TextValues, encode_keys, text_keys
from evenrank.preprocess.read.times import check_era, unit_of, utc_text
from tests.preprocess.decoded import number, write_log


def test_units_are_told_apart_by_size_and_1970_ends_with_its_last_second() -> None:
    for limit, below, above in ((10**11, "s", "ms"), (10**14, "ms", "us"), (10**17, "us", "ns")):
        assert (unit_of(limit - 1), unit_of(limit)) == (below, above)
    check_era({"a.csv": (0, 365 * 86_400_000)}, "iso")
    with pytest.raises(DataError, match=r"^the last event of b.csv is at 1970-12-31T23:59:59Z, read as ISO 8601; che"):
        check_era({"a.csv": (0, 1 << 41), "b.csv": (0, 365 * 86_400_000 - 1)}, "iso")
    assert utc_text(253_402_300_799_999) == "9999-12-31T23:59:59Z"


words = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(words, unique=True, max_size=50), st.lists(words, max_size=50))
def test_a_table_finds_the_index_of_each_of_its_keys_and_no_other(keys: list[int], others: list[int]) -> None:
    queries = [*others, *reversed(keys)]
    found = KeyTable(np.array(keys, dtype=np.int64)).find(np.array(queries, dtype=np.int64))
    assert found.tolist() == [keys.index(query) if query in keys else -1 for query in queries]


@given(st.lists(st.integers(0, 5) | words, max_size=60), st.integers(0, 2**64 - 1))
def test_keys_are_numbered_by_first_appearance_whatever_the_seed(keys: list[int], seed: int) -> None:
    for some in (keys, [*range(2000), *range(2000)]):  # the latter with collisions in the hash table
        distinct, codes = encode_keys(np.array(some, dtype=np.int64), np.uint64(seed))
        assert distinct.tolist() == list(dict.fromkeys(some))
        assert distinct[codes].tolist() == some


@given(st.lists(st.text(max_size=20), unique=True, max_size=30))
def test_keys_of_texts_depend_on_all_their_bytes_and_on_nothing_else(texts: list[str]) -> None:
    keys = text_keys(pl.Series(texts, dtype=pl.String))
    assert len(set(keys.tolist())) == len(texts)
    assert [text_keys(pl.Series([text]))[0] for text in texts] == keys.tolist()
    sliced = pl.concat([pl.Series(["other"]), pl.Series(texts, dtype=pl.String)]).slice(1)
    assert text_keys(sliced).tolist() == keys.tolist()


def test_two_texts_with_one_key_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "text_keys", lambda texts: np.zeros(len(texts), dtype=np.int64))
    values = TextValues(tmp_path, 0)
    values.add(pl.Series(["b", "a", "b"]))
    values.flush()
    with pytest.raises(DataError, match=r"the ids 'a' and 'b' have the same 64-bit hash; rename one of them"):
        values.part(0)


def test_a_change_of_the_table_is_another_content_and_replaces_the_dataset(tmp_path: Path) -> None:
    path, log, hashes = tmp_path / "items.jsonl", write_log(tmp_path / "log.csv", [("ann", "x", 0)]), []
    features = {"item_features": (path,), "item_columns": ("price:float",), "item_features_as": "table"}
    for price in (1.5, 2, 1.5):
        path.write_text(json.dumps({"item": "x", "price": price}) + "\n")
        hashes.append(number(tmp_path / "out", log, log=features).content_hash)
    assert hashes[0] == hashes[2] != hashes[1]
    assert number(tmp_path / "out", log).item_features is None
    assert not (tmp_path / "out" / "item_features.parquet").exists()
