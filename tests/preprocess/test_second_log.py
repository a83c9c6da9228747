"""Splits by a second log: its events are those to predict."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.event_statistics import read_statistics
from evenrank.preprocess import Filters, PreprocessConfig, TabularConfig, preprocess

BEGIN = 1_700_000_000
Event = tuple[int, int, int]  # user, item, time
events = st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(BEGIN, BEGIN + 8))


def write_log(path: Path, log: list[Event]) -> Path:
    schema = dict.fromkeys(("user", "item", "time"), pl.Int64())
    pl.DataFrame(log, schema=schema, orient="row").write_csv(path)
    return path


def divide(folder: Path, first: Path, second: Path, **options: Any) -> Mapping[str, pl.DataFrame]:
    names: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    custom = TabularConfig(events=(first,), **names)
    split = f"file:{second}"
    out = folder / "out"
    preprocess(PreprocessConfig(dataset="custom", out=out, split=split, custom=custom, ids="keep", **options))
    return {name: pl.read_parquet(out / name / "*.parquet", glob=True) for name in ("train", "eval")}


@given(st.lists(events, min_size=1, max_size=20), st.lists(events, min_size=1, max_size=20))
def test_the_events_of_a_second_log_are_predicted_from_earlier_ones_of_the_first(
    tmp_path_factory: pytest.TempPathFactory, first: list[Event], second: list[Event]
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    splits = divide(folder, write_log(folder / "a.csv", first), write_log(folder / "b.csv", second))

    def by_user(log: list[Event], user: int) -> list[tuple[int, int]]:
        return [(item, time) for of_user, item, time in sorted(log, key=lambda event: event[2]) if of_user == user]

    rows = {}
    for name, frame in splits.items():
        for row in frame.iter_rows(named=True):
            times = [time // 1000 for time in row["timestamp_ms"]]
            num_targets = row["num_targets"] if name == "eval" else 0
            rows[name, row["user_id"]] = (list(zip(row["item_id"], times, strict=True)), num_targets)
    expected = {}
    for user in range(5):
        history, targets = by_user(first, user), by_user(second, user)
        if history:
            expected["train", user] = (history, 0)
        if targets:
            # At equal times, the first log comes first.
            known = [event for event in history if event[1] <= targets[0][1]]
            expected["eval", user] = (known + targets, len(targets))
    assert rows == expected


def test_columns_and_statistics_are_those_of_two_logs(tmp_path: Path) -> None:
    first = write_log(tmp_path / "a.csv", [(1, 1, BEGIN), (1, 2, BEGIN + 50), (2, 1, BEGIN + 1)])
    second = write_log(tmp_path / "b.csv", [(1, 9, BEGIN + 20), (3, 1, BEGIN + 60)])
    custom = TabularConfig(events=(first,), user_column="user", item_column="item", timestamp_column="time")
    config = PreprocessConfig(dataset="custom", out=tmp_path / "out", split=f"file:{second}", custom=custom)
    manifest = preprocess(config)
    assert manifest.options["split"] == "file:b.csv"
    assert [source.path for source in manifest.sources] == ["a.csv", "b.csv"]
    lines = read_statistics(manifest).describe()
    assert lines["events"] == "5, each counted once"
    assert lines["eval events before the newest train event"] == "1 (LEAK in time; the logs overlap)"
    assert lines["cold items of eval"] == "1 of 2, in 1 or 50.0 % of its events (expected: new since the split)"
    assert lines["cold users of eval"] == "1 of 2 (expected: new since the split)"


def test_a_second_log_may_have_several_files(tmp_path: Path) -> None:
    first = write_log(tmp_path / "a.csv", [(1, 1, BEGIN), (2, 2, BEGIN)])
    (tmp_path / "second").mkdir()
    for user in (1, 2, 3):
        write_log(tmp_path / "second" / f"{user}.csv", [(user, 9, BEGIN + user)])
    for path in (tmp_path / "second", tmp_path / "second" / "*.csv"):
        splits = divide(tmp_path, first, path)
        assert sorted(splits["train"].get_column("item_id").to_list()) == [[1], [2]]
        assert sorted(splits["eval"].get_column("item_id").to_list()) == [[1, 9], [2, 9], [9]]
        assert splits["eval"].get_column("num_targets").to_list() == [1, 1, 1]


def test_a_second_log_without_new_users_that_pass_the_filters_is_refused(tmp_path: Path) -> None:
    first = write_log(tmp_path / "a.csv", [(1, 1, BEGIN), (1, 2, BEGIN + 50)])
    second = write_log(tmp_path / "b.csv", [(2, 1, BEGIN + 60)])
    custom = TabularConfig(events=(first,), user_column="user", item_column="item", timestamp_column="time")
    config = PreprocessConfig(
        dataset="custom", out=tmp_path / "out", split=f"file:{second}", custom=custom, filters=Filters(min_length=2)
    )
    with pytest.raises(DataError, match=r"b.csv leaves eval without rows, .*; give a second log with other events, or"):
        preprocess(config)
    with pytest.raises(
        ConfigError, match=rf"^{first} is in {first}, {first} twice, and its events would count twice; give each file"
    ):
        divide(tmp_path, first, first)
