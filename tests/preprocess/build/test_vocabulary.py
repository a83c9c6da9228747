"""Vocabularies of small logs, compared with their definition: values by the time of their first event, then value."""

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.schema import Manifest
from evenrank.preprocess import Filters, job
from evenrank.preprocess.build import distinct, key_table, read_events
from evenrank.preprocess.build import vocabulary as vocabulary_module
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
            patch.setattr(read_events, "EVENTS_PER_RUN", 2)
            patch.setattr(key_table, "_BUFFERED_ROWS", 3)
            patch.setattr(distinct, "_VALUES_PER_RANGE", 2)
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
