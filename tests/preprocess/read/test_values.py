"""Times in any unit, keys of ids, and features that are looked up; golden logs have values that cannot be read."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.preprocess.read import keys as key_table
from evenrank.preprocess.read.features import FeatureLookup, Features
from evenrank.preprocess.read.keys import KeyTable, TextValues, encode_keys, text_keys
from evenrank.preprocess.read.tabular import open_table
from evenrank.preprocess.read.times import check_era, decide_unit, timestamp_ms, unit_of, utc_text
from tests.preprocess.build.id_logs import number, write_log

MOMENTS = st.datetimes(min_value=datetime(1974, 1, 1), max_value=datetime(2099, 12, 31), timezones=st.just(UTC))
# By unit, a time to the second (to the day for dates) as it is in a file.
WRITTEN: dict[str, Callable[[datetime], object]] = {
    "s": lambda moment: int(moment.timestamp()),
    "ms": lambda moment: int(moment.timestamp()) * 10**3,
    "us": lambda moment: int(moment.timestamp()) * 10**6,
    "ns": lambda moment: int(moment.timestamp()) * 10**9,
    "iso": lambda moment: moment.isoformat(sep=" "),
    "date": lambda moment: moment.strftime("%Y%m%d"),
}


@settings(max_examples=40)
@given(st.lists(MOMENTS, min_size=1), st.sampled_from(sorted(WRITTEN)), st.sampled_from(["a.csv", "a.parquet"]))
def test_times_of_this_time_are_read_in_any_unit(
    tmp_path_factory: pytest.TempPathFactory, moments: list[datetime], unit: str, name: str
) -> None:
    path, to_the_day = tmp_path_factory.mktemp("times") / name, {"hour": 0, "minute": 0, "second": 0}
    moments = [moment.replace(microsecond=0, **(to_the_day if unit == "date" else {})) for moment in moments]  # type: ignore[arg-type]
    frame = pl.DataFrame({"note": 1, "time": [WRITTEN[unit](moment) for moment in moments]})
    frame.write_csv(path) if path.suffix == ".csv" else frame.write_parquet(path)
    table = open_table(path, ["time"])
    times = table.head(99).select(timestamp_ms(table, "time", decide_unit([table], "time"))).to_series()
    assert times.to_list() == [int(moment.timestamp()) * 1000 for moment in moments]


def test_units_are_told_apart_by_size_and_1970_ends_with_its_last_second() -> None:
    for limit, below, above in ((10**11, "s", "ms"), (10**14, "ms", "us"), (10**17, "us", "ns")):
        assert (unit_of(limit - 1), unit_of(limit)) == (below, above)
    new_year_1971 = 365 * 86_400_000
    check_era({"a.csv": (0, new_year_1971)}, "iso")
    with pytest.raises(DataError, match=r"^the last event of b.csv is at 1970-12-31T23:59:59Z, read as ISO 8601; che"):
        check_era({"a.csv": (0, 1 << 41), "b.csv": (0, new_year_1971 - 1)}, "iso")
    with pytest.raises(DataError, match=r"; it is at 2014-12-31T23:53:20Z with --timestamp-unit s, or pass --allow"):
        check_era({"a.csv": (0, 1_420_070)}, "us")
    assert utc_text(253_402_300_799_999) == "9999-12-31T23:59:59Z"


words = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(words, unique=True, max_size=50), st.lists(words, max_size=50))
def test_a_table_finds_the_index_of_each_of_its_keys_and_no_other(keys: list[int], others: list[int]) -> None:
    queries = [*others, *reversed(keys)]
    found = KeyTable(np.array(keys, dtype=np.int64)).find(np.array(queries, dtype=np.int64))
    assert found.tolist() == [keys.index(query) if query in keys else -1 for query in queries]


@given(st.lists(st.one_of(st.integers(0, 5), words), max_size=60), st.integers(0, 2**64 - 1))
def test_keys_are_numbered_by_first_appearance_whatever_the_seed(keys: list[int], seed: int) -> None:
    distinct, codes = encode_keys(np.array(keys, dtype=np.int64), np.uint64(seed))
    assert distinct.tolist() == list(dict.fromkeys(keys))
    assert distinct[codes].tolist() == keys


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
