"""Vocabularies of small logs, compared with their definition: values by the time of their first event, then value."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.core.hashing import mix64
from evenrank.datasets.schema import ITEM_ID
from evenrank.preprocess import job
from evenrank.preprocess.build import events
from evenrank.preprocess.build import vocabulary as vocabulary_module
from evenrank.preprocess.read import keys as key_table
from tests.preprocess.build.id_logs import BEGIN, Event, expected_vocabulary, number, vocabulary, write_log
from tests.preprocess.decoded import bytes_in, decode, read_rows

DAY = 86_400
NAMES = ("user_id", "item_id")
RULES = st.tuples(*[st.sampled_from(["append", "append", "oov", "drop", "fail"])] * 2)
VALUES: dict[str, tuple[st.SearchStrategy[Any], Any]] = {
    "integers": (st.one_of(st.integers(0, 9), st.integers(-(2**63) + 1, 2**63 - 1)), pl.Int64),
    "texts": (
        st.one_of(st.sampled_from(["a", "A", "a a", "ä", "007", "7", "一"]), st.text("abc0", min_size=1, max_size=9)),
        pl.String,
    ),
}


def events_of(out: Path) -> Counter[tuple[Any, Any, int]]:
    """Return the events of a dataset with their raw ids."""
    counts: Counter[tuple[Any, Any, int]] = Counter()
    for row in decode(out, read_rows(out / "train")):
        times = (time // 1000 - BEGIN for time in row["timestamp_ms"])
        counts.update((row["user_id"], item, time) for item, time in zip(row["item_id"], times, strict=True))
    return counts


def small_parts(patch: pytest.MonkeyPatch) -> None:
    """Divide into many buckets, on disk, and many ranges of values."""
    patch.setattr(job, "EVENTS_PER_BUCKET", 3)
    patch.setattr(events, "EVENTS_PER_RUN", 2)
    patch.setattr(key_table, "_BUFFERED_ROWS", 3)
    patch.setattr(vocabulary_module, "_VALUES_PER_RANGE", 2)
    patch.setattr(vocabulary_module, "_ROWS_PER_GROUP", 3)


@pytest.mark.parametrize("kind", VALUES)
def test_ids_are_numbered_by_first_appearance_and_unknown_values_follow_their_rule(
    tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    values, dtype = VALUES[kind]
    logs = st.lists(st.tuples(values, values, st.integers(0, 5)), min_size=1, max_size=30)

    @settings(max_examples=12)
    @given(logs, logs, RULES)
    def check(first: list[Event], second: list[Event], rules: tuple[str, str]) -> None:
        folder = tmp_path_factory.mktemp("days")
        path = write_log(folder / "monday.parquet", first, dtype=dtype)
        monday = number(folder / "monday", path, ids="dense")
        with pytest.MonkeyPatch.context() as patch:
            small_parts(patch)
            number(folder / "parts", path, ids="dense")
            patch.setattr(vocabulary_module, "_ROWS_PER_GROUP", 1 << 20)
            check_tuesday(folder, first, second, rules)
        for column, name in enumerate(NAMES):
            expected = expected_vocabulary(first, column)
            assert vocabulary(folder / "monday", name) == vocabulary(folder / "parts", name) == expected
            assert monday.vocabulary_sizes[name] == len(expected) + 1
        whole, parts = (bytes_in(folder / name / "train") for name in ("monday", "parts"))
        assert whole == parts
        assert events_of(folder / "monday") == Counter(first)

    def check_tuesday(folder: Path, first: list[Event], second: list[Event], rules: tuple[str, str]) -> None:
        later = [(user, item, time + DAY) for user, item, time in second]
        path = write_log(folder / "tuesday.parquet", later, dtype=dtype)
        known = [[row[1] for row in expected_vocabulary(first, column)] for column in (0, 1)]
        drops = [column for column in (0, 1) if rules[column] == "drop"]
        kept = [event for event in later if all(event[column] in known[column] for column in drops)]
        fails = any(rules[c] == "fail" and any(event[c] not in known[c] for event in kept) for c in (0, 1))
        options: dict[str, Any] = {"vocabulary": folder / "monday", "unknown": f"user={rules[0]},item={rules[1]}"}
        if fails or not kept:
            with pytest.raises(DataError, match="lacks [0-9]+ of the values" if fails else "no users are left"):
                number(folder / "tuesday", path, **options)
            return
        manifest = number(folder / "tuesday", path, **options)
        expected: list[Any] = kept
        for column, name in enumerate(NAMES):
            of_column = expected_vocabulary(kept, column, known[column])
            if rules[column] == "oov":
                of_column = of_column[: len(known[column])]
                expected = [
                    (*e[:column], e[column] if e[column] in known[column] else None, *e[column + 1 :]) for e in expected
                ]
            assert vocabulary(folder / "tuesday", name) == of_column
            sizes = [version.size for version in manifest.ids[name].versions]
            assert sizes == sorted({len(known[column]), len(of_column)})
        assert events_of(folder / "tuesday") == Counter(expected)

    check()


@settings(max_examples=30)
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
    assert (manifest.ids[ITEM_ID].distinct, manifest.vocabulary_sizes[ITEM_ID]) == (len(ids), size)
    assert not list((folder / "out").glob("vocabulary_*"))
