"""Vocabularies of small logs, compared with their definition: values by the time of their first event, then value."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.hashing import mix64
from evenrank.datasets.schema import ITEM_ID, USER_ID, Manifest
from evenrank.preprocess import Filters, job
from evenrank.preprocess.build import events
from evenrank.preprocess.build import vocabulary as vocabulary_module
from evenrank.preprocess.build.vocabulary import choose
from evenrank.preprocess.config import parse_ids, parse_unknown
from evenrank.preprocess.read import keys as key_table
from tests.preprocess.build.id_logs import Event, expected_vocabulary, number, vocabulary, write_log
from tests.preprocess.decoded import decode, read_rows

DAY = 86_400
FEW = settings(max_examples=25)  # because each is several runs of preprocessing
integers = st.one_of(st.integers(0, 9), st.integers(-(2**63) + 1, 2**63 - 1))
texts = st.one_of(st.sampled_from(["a", "A", "a a", "ä", "007", "7", "一"]), st.text("abc0", min_size=1, max_size=9))


def logs(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Event]]:
    return st.lists(st.tuples(values, values, st.integers(0, 5)), min_size=1, max_size=30)


def events_of(out: Path) -> Counter[tuple[Any, Any, int]]:
    """Return the events of a dataset with their raw ids."""
    counts: Counter[tuple[Any, Any, int]] = Counter()
    for row in decode(out, read_rows(out / "train")):
        times = (time // 1000 - 1_700_000_000 for time in row["timestamp_ms"])
        counts.update((row["user_id"], item, time) for item, time in zip(row["item_id"], times, strict=True))
    return counts


@pytest.mark.parametrize(("values", "dtype"), [(integers, pl.Int64), (texts, pl.String)], ids=["integers", "texts"])
def test_ids_are_dense_by_first_appearance_whatever_the_parts(
    tmp_path_factory: pytest.TempPathFactory, values: st.SearchStrategy[Any], dtype: Any
) -> None:
    @FEW
    @given(logs(values))
    def check(log: list[Event]) -> None:
        folder = tmp_path_factory.mktemp("log")
        path = write_log(folder / "log.parquet", log, dtype=dtype)
        with pytest.MonkeyPatch.context() as patch:
            whole = number(folder / "whole", path, ids="dense")
            # Many buckets, on disk, and many ranges of values.
            patch.setattr(job, "EVENTS_PER_BUCKET", 3)
            patch.setattr(events, "EVENTS_PER_RUN", 2)
            patch.setattr(key_table, "_BUFFERED_ROWS", 3)
            patch.setattr(vocabulary_module, "_VALUES_PER_RANGE", 2)
            patch.setattr(vocabulary_module, "_ROWS_PER_GROUP", 3)
            in_parts = number(folder / "parts", path, ids="dense")
        for column, name in enumerate(("user_id", "item_id")):
            expected = expected_vocabulary(log, column)
            assert vocabulary(folder / "whole", name) == vocabulary(folder / "parts", name) == expected
            assert whole.ids[name].distinct == len(expected)
            assert whole.vocabulary_sizes[name] == len(expected) + 1
        assert whole.content_hash == in_parts.content_hash
        assert events_of(folder / "whole") == events_of(folder / "parts") == Counter(log)

    check()


@FEW
@given(logs(texts), logs(texts))
def test_later_days_renumber_nothing(
    tmp_path_factory: pytest.TempPathFactory, first: list[Event], second: list[Event]
) -> None:
    folder = tmp_path_factory.mktemp("days")
    later = [(user, item, time + DAY) for user, item, time in second]
    paths = [write_log(folder / f"{name}.parquet", log) for name, log in (("b", first), ("a", later))]
    monday = number(folder / "monday", paths[0])
    number(folder / "both", *paths)  # in the order of names, that is, the later one first
    appended = number(folder / "tuesday", paths[1], vocabulary=folder / "monday")
    for name in ("user_id", "item_id"):
        known = [row[:2] for row in vocabulary(folder / "monday", name)]
        both = [row[:2] for row in vocabulary(folder / "both", name)]
        assert both[: len(known)] == known
        assert [row[:2] for row in vocabulary(folder / "tuesday", name)] == both
        assert appended.ids[name].extends(monday.ids[name].version)
        assert [version.size for version in appended.ids[name].versions] == sorted({len(known), len(both)})
    assert events_of(folder / "tuesday") == Counter(later)
    counts = dict(row[1:] for row in vocabulary(folder / "tuesday"))
    assert counts == {value: 0 for _, value, _ in vocabulary(folder / "monday")} | Counter(row[1] for row in later)


MONDAY: list[Event] = [("u", "x", 0), ("v", "y", 1)]
TUESDAY: list[Event] = [("u", "y", 0), ("u", "new", 1), ("w", "x", 2), ("w", "newer", 3), ("w", "newer", 4)]


def tuesday(tmp_path: Path, **options: Any) -> Manifest:
    number(tmp_path / "monday", write_log(tmp_path / "monday.csv", MONDAY))
    log = write_log(tmp_path / "tuesday.csv", TUESDAY)
    return number(tmp_path / "out", log, vocabulary=tmp_path / "monday", **options)


def test_unknown_values_follow_the_known_ones(tmp_path: Path) -> None:
    manifest = tuesday(tmp_path)
    assert vocabulary(tmp_path / "out") == [(1, "x", 1), (2, "y", 1), (3, "new", 1), (4, "newer", 2)]
    assert vocabulary(tmp_path / "out", "user_id") == [(1, "u", 2), (2, "v", 0), (3, "w", 3)]
    assert (manifest.ids["item_id"].unknown_values, manifest.ids["item_id"].unknown_events) == (2, 3)
    assert dict(manifest.vocabulary_sizes) == {"user_id": 4, "item_id": 5, "action": 1}


def test_unknown_values_can_share_the_id_0(tmp_path: Path) -> None:
    manifest = tuesday(tmp_path, unknown="item=oov")
    assert vocabulary(tmp_path / "out") == [(1, "x", 1), (2, "y", 1)]
    assert {row["user_id"]: row["item_id"] for row in read_rows(tmp_path / "out" / "train")} == {
        1: [2, 0],
        3: [1, 0, 0],
    }
    assert manifest.ids["item_id"].unknown_events == 3
    assert len(manifest.ids["item_id"].versions) == 1
    assert dict(manifest.vocabulary_sizes) == {"user_id": 4, "item_id": 3, "action": 1}


def test_events_of_unknown_values_can_be_dropped(tmp_path: Path) -> None:
    manifest = tuesday(tmp_path, unknown="drop")
    assert events_of(tmp_path / "out") == Counter([("u", "y", 0)])
    assert vocabulary(tmp_path / "out") == [(1, "x", 0), (2, "y", 1)]
    assert manifest.options["audit"] == {"events of unknown users or items (dropped)": 4}


def test_unknown_values_can_be_refused(tmp_path: Path) -> None:
    message = (
        r"the vocabulary of item_id lacks 2 of the values, in 3 events, first 'new', 'newer'; set unknown to append"
    )
    with pytest.raises(DataError, match=message):
        tuesday(tmp_path, unknown="item=fail")
    with pytest.raises(DataError, match=r"the vocabulary of user_id lacks 1 of the values, in 3 events, first 'w'"):
        tuesday(tmp_path, unknown="item=oov,user=fail")
    assert not (tmp_path / "out").exists()


@FEW
@given(
    first=logs(texts),
    second=logs(texts),
    rules=st.tuples(*[st.sampled_from(["append", "oov", "drop", "fail"])] * 2),
)
def test_every_rule_for_unknown_values_is_its_definition(
    tmp_path_factory: pytest.TempPathFactory, first: list[Event], second: list[Event], rules: tuple[str, str]
) -> None:
    folder = tmp_path_factory.mktemp("days")
    number(folder / "old", write_log(folder / "old.parquet", first, dtype=pl.String))
    path = write_log(folder / "new.parquet", second, dtype=pl.String)
    known = [[row[1] for row in expected_vocabulary(first, column)] for column in (0, 1)]
    drops = [column for column in (0, 1) if rules[column] == "drop"]
    kept = [event for event in second if all(event[column] in known[column] for column in drops)]
    fails = any(rules[c] == "fail" and any(event[c] not in known[c] for event in kept) for c in (0, 1))
    options: dict[str, Any] = {"vocabulary": folder / "old", "unknown": f"user={rules[0]},item={rules[1]}"}
    if fails or not kept:
        message = (
            "lacks [0-9]+ of the values" if fails else "no users are left; [0-9]+ events of unknown users or items"
        )
        with pytest.raises(DataError, match=message):
            number(folder / "out", path, **options)
        return
    number(folder / "out", path, **options)
    expected: list[Any] = kept
    for column, name in enumerate(("user_id", "item_id")):
        found = {row[1]: row[2] for row in expected_vocabulary(kept, column)}
        values = known[column] + [value for value in found if value not in known[column]]
        if rules[column] == "oov":
            values = known[column]
            expected = [(*e[:column], e[column] if e[column] in values else None, *e[column + 1 :]) for e in expected]
        assert vocabulary(folder / "out", name) == [(i, v, found.get(v, 0)) for i, v in enumerate(values, 1)]
    assert events_of(folder / "out") == Counter(expected)


def test_filters_come_before_the_vocabulary(tmp_path: Path) -> None:
    log = [("u", "rare", 0), ("u", "x", 1), ("v", "x", 2)]
    number(tmp_path / "out", write_log(tmp_path / "log.csv", log), filters=Filters(min_item_events=2))
    assert vocabulary(tmp_path / "out") == [(1, "x", 2)]


def test_a_vocabulary_of_another_kind_or_damaged_is_refused(tmp_path: Path) -> None:
    tuesday_log = write_log(tmp_path / "tuesday.csv", TUESDAY)
    number(tmp_path / "integers", write_log(tmp_path / "integers.csv", [(1, -2, 0)]), ids="dense")
    with pytest.raises(
        DataError, match=r"tuesday\.csv has 'u' in column 'user', and user_id of .*integers is int64; write all"
    ):
        number(tmp_path / "out", tuesday_log, vocabulary=tmp_path / "integers")
    number(tmp_path / "monday", write_log(tmp_path / "monday.csv", MONDAY))
    path = tmp_path / "monday" / "vocabulary_item_id.parquet"
    pl.read_parquet(path).reverse().write_parquet(path)
    with pytest.raises(DataError, match=r"vocabulary_item_id.parquet does not match its manifest; preprocess it again"):
        number(tmp_path / "out", tuesday_log, vocabulary=tmp_path / "monday")
    path.unlink()
    with pytest.raises(DataError, match=r"vocabulary_item_id.parquet cannot be read \(.*\); preprocess that dataset"):
        number(tmp_path / "out", tuesday_log, vocabulary=tmp_path / "monday")


def test_kept_ids_have_no_rule_for_unknown_values(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", [(1, 2, 0)])
    number(tmp_path / "monday", log, ids="keep")
    with pytest.raises(ConfigError, match=r"unknown has a rule for user_id, but .*monday has no vocabulary of it"):
        number(tmp_path / "out", log, vocabulary=tmp_path / "monday", unknown="drop")


def test_integers_of_a_later_day_are_the_texts_that_an_earlier_vocabulary_has(tmp_path: Path) -> None:
    number(tmp_path / "monday", write_log(tmp_path / "monday.csv", [("u1", "7", 0), ("u2", "007", 1), ("u1", "x", 2)]))
    number(tmp_path / "out", write_log(tmp_path / "log.csv", [("u2", 7, 5)]), vocabulary=tmp_path / "monday")
    assert vocabulary(tmp_path / "out") == [(1, "7", 1), (2, "007", 0), (3, "x", 0)]


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
