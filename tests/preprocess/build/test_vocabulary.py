"""Vocabularies of small logs, compared with their definition: values by the time of their first event, then value."""

from collections import Counter
from collections.abc import Iterable, Sequence
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
from tests.preprocess.decoded import BEGIN, Event, bytes_in, decode, number, read_rows, write_log

DAY, NAMES = 86_400, ("user_id", "item_id")
RULES = st.tuples(*[st.sampled_from(["append", "append", "oov", "drop"])] * 2)
VALUES: dict[str, tuple[st.SearchStrategy[Any], Any]] = {
    "integers": (st.integers(0, 9) | st.integers(-(2**63) + 1, 2**63 - 1), pl.Int64),
    "texts": (
        st.sampled_from(["a", "A", "a a", "ä", "007", "7", "一"]) | st.text("abc0", min_size=1, max_size=9),
        pl.String,
    ),
}
# Many buckets, on disk, and many ranges of values.
SMALL_PARTS = [
    (job, "EVENTS_PER_BUCKET", 3),
    (events, "EVENTS_PER_RUN", 2),
    (key_table, "_BUFFERED_ROWS", 3),
    (vocabulary_module, "_VALUES_PER_RANGE", 2),
    (vocabulary_module, "_ROWS_PER_GROUP", 3),
]
Rows = list[tuple[int, Any, int]]  # id, value, count


def _rows(out: Path, name: str) -> Rows:
    return pl.read_parquet(out / f"vocabulary_{name}.parquet").select("id", "value", "count").rows()


def _defined(log: Sequence[Event], column: int, known: Iterable[Any] = ()) -> Rows:
    """Return the vocabulary of users (column 0) or items (1) as its definition has it, after values that are known."""
    counts = Counter(event[column] for event in log)
    firsts = {value: min(event[2] for event in log if event[column] == value) for value in counts}
    new = sorted(counts.keys() - {*known}, key=lambda value: (firsts[value], value))
    return [(index, value, counts[value]) for index, value in enumerate([*known, *new], start=1)]


def _frequent(log: Sequence[Event], column: int, least: int, known: Iterable[Any] = ()) -> Rows:
    """Return the vocabulary of a log whose values need a number of events, unless they are known."""
    rows = [row for row in _defined(log, column, known) if row[2] >= least or row[1] in known]
    return [(index, value, count) for index, (_, value, count) in enumerate(rows, start=1)]


def _events(out: Path) -> Counter[Event]:
    """Return the events of a dataset with their raw ids."""
    return Counter(
        (row["user_id"], item, ms // 1000 - BEGIN)
        for row in decode(out, read_rows(out / "train"))
        for item, ms in zip(row["item_id"], row["timestamp_ms"], strict=True)
    )


def _check_tuesday(folder: Path, monday: list[Event], tuesday: list[Event], rules: tuple[str, str], dtype: Any) -> None:
    """Check a log that is preprocessed with the vocabulary of an earlier one."""
    later = [(user, item, time + DAY) for user, item, time in tuesday]
    path = write_log(folder / "tuesday.parquet", later, dtype=dtype)
    known = [[value for _, value, _ in _defined(monday, column)] for column in (0, 1)]
    kept = [event for event in later if all(event[c] in known[c] for c in (0, 1) if rules[c] == "drop")]
    if not kept:
        return
    options: dict[str, Any] = {"vocabulary": folder / "monday", "unknown": f"user={rules[0]},item={rules[1]}"}
    manifest, expected = number(folder / "tuesday", path, **options), list[Any](kept)
    for c, name in enumerate(NAMES):
        of_column = _defined(kept, c, known[c])
        if rules[c] == "oov":
            of_column = of_column[: len(known[c])]
            expected = [(*e[:c], e[c] if e[c] in known[c] else None, *e[c + 1 :]) for e in expected]
        assert _rows(folder / "tuesday", name) == of_column
        assert [of.size for of in manifest.ids[name].versions] == sorted({len(known[c]), len(of_column)})
    assert _events(folder / "tuesday") == Counter(expected)


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
            for module, name, size in SMALL_PARTS:
                patch.setattr(module, name, size)
            number(folder / "parts", path, ids="dense")
            patch.setattr(vocabulary_module, "_ROWS_PER_GROUP", 1 << 20)
            _check_tuesday(folder, first, second, rules, dtype)
        for column, name in enumerate(NAMES):
            expected = _defined(first, column)
            assert _rows(folder / "monday", name) == _rows(folder / "parts", name) == expected
            assert monday.vocabulary_sizes[name] == len(expected) + 1
        assert bytes_in(folder / "monday" / "train") == bytes_in(folder / "parts" / "train")
        assert _events(folder / "monday") == Counter(first)

    check()


@pytest.mark.parametrize("kind", VALUES)
def test_values_with_fewer_events_share_the_id_0_and_later_ones_count_anew(
    tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    values, dtype = VALUES[kind]
    logs = st.lists(st.tuples(values, values, st.integers(0, 5)), min_size=1, max_size=30)

    @settings(max_examples=12)
    @given(st.tuples(logs, logs), st.tuples(st.integers(1, 3), st.integers(1, 3)))
    def check(days: tuple[list[Event], list[Event]], least: tuple[int, int]) -> None:
        folder, known = tmp_path_factory.mktemp("days"), [list[Any](), list[Any]()]
        with pytest.MonkeyPatch.context() as patch:
            for module, name, size in SMALL_PARTS:
                patch.setattr(module, name, size)
            for day, events_of_day in enumerate(days):
                log = [(user, item, time + day * DAY) for user, item, time in events_of_day]
                path, out = write_log(folder / f"{day}.parquet", log, dtype=dtype), folder / f"out {day}"
                options: dict[str, Any] = {"vocabulary": folder / "out 0"} if day else {}
                options["min_count"] = f"user={least[0]},item={least[1]}"
                rows = [_frequent(log, column, least[column], known[column]) for column in (0, 1)]
                if not all(rows):
                    with pytest.raises(DataError, match=r"all \d+ values of .*; lower min_count"):
                        number(out, path, **options)
                    return
                audit, expected = number(out, path, **options).options["audit"], list[Any](log)
                for c, name in enumerate(NAMES):
                    assert _rows(out, name) == rows[c]
                    known[c] = [value for _, value, _ in rows[c]]
                    rare = [event[c] for event in log if event[c] not in known[c]]
                    expected = [(*e[:c], e[c] if e[c] in known[c] else None, *e[c + 1 :]) for e in expected]
                    what = f"rare {name.removesuffix('_id')}s (kept"
                    assert audit.get(f"{what}, with the id 0)", 0) == len({*rare})
                    assert audit.get(f"events of {what})", 0) == len(rare)
                assert _events(out) == Counter(expected)

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
    summary, shared = manifest.ids[ITEM_ID], Counter(ids.values())
    assert summary.collisions == sum(count for count in shared.values() if count > 1)
    assert (summary.distinct, manifest.vocabulary_sizes[ITEM_ID]) == (len(ids), size)
    assert not list((folder / "out").glob("vocabulary_*"))
