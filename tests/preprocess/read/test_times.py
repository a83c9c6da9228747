import itertools
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from evenrank.preprocess.read.log import read_tabular
from evenrank.preprocess.read.tabular import open_table
from evenrank.preprocess.read.times import (
    MAX_TIMESTAMP_MS,
    UNITS,
    check_era,
    decide_unit,
    timestamp_ms,
    unit_of,
    utc_text,
)
from tests.preprocess.read.parts import read_part
from tests.preprocess.read.test_log import write_table


def _write(path: Path, values: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pl.DataFrame({"time": values}).write_parquet(path)
    else:
        path.write_text("\n".join(["note,time", *(f",{value}" for value in values), ""]))
    return path


def _decide(*paths: Path) -> str:
    return decide_unit([open_table(path, ["time"]) for path in paths], "time")


def _times(path: Path) -> list[int | None]:
    table = open_table(path, ["time"])
    return table.head(99).select(timestamp_ms(table, "time", decide_unit([table], "time"))).to_series().to_list()


@pytest.mark.parametrize(
    ("name", "values", "unit"),
    [
        ("a.csv", ["", "1420070400", "1420070400.5"], "s"),
        ("a.csv", ["1420070400000", "0", "-1", "n/a", "1420070400001"], "ms"),  # the median, of what is a number
        ("a.csv", ["1420070400000000"], "us"),
        ("a.csv", ["1420070400000000000"], "ns"),
        ("a.csv", ["2015-01-06", "20150106"], "date"),
        ("a.csv", ["2015-01-06", "2015-01-06 12:30:00", "2015-01-06T12:30Z", "2015-01-06 12:30:00 UTC"], "iso"),
        ("a.csv", ["20151306", "18991231"], "s"),  # no dates of the calendar or of this time
        ("a.parquet", [20150106, None], "date"),
        ("a.parquet", [20150106.0, None], "date"),
        ("a.parquet", [1.42e12, None, float("nan")], "ms"),
        ("a.parquet", ["1420070400"], "s"),
        ("a.parquet", [date(2015, 1, 6)], "auto"),
        ("a.parquet", [datetime(2015, 1, 6)], "auto"),
    ],
)
def test_the_unit_is_decided_by_the_first_values(tmp_path: Path, name: str, values: list[Any], unit: str) -> None:
    assert _decide(_write(tmp_path / name, values)) == unit


@pytest.mark.parametrize(("limit", "below", "above"), [(10**11, "s", "ms"), (10**14, "ms", "us"), (10**17, "us", "ns")])
def test_numbers_are_told_apart_by_their_size(limit: int, below: str, above: str) -> None:
    assert (unit_of(limit - 1), unit_of(limit)) == (below, above)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (["1420070400", "2015-01-06 12:30"], "'1420070400', '2015-01-06 12:30'"),
        (["1420070400", "20150106"], "'1420070400', '20150106'"),
        (["20150106", "", "20150107", "2015-01-06 12:30"], "'20150106', '2015-01-06 12:30'"),
        (["06.01.2015", "07.01.2015"], "'06.01.2015'"),
        (["x" * 1000], f"'{'x' * 80}'"),
    ],
)
def test_values_of_several_kinds_or_of_none_raise(tmp_path: Path, values: list[str], shown: str) -> None:
    path = _write(tmp_path / "a.csv", values)
    remedy = "set --timestamp-unit" if ", " in shown else "convert them, for example to ISO 8601"
    message = f"{path}: column 'time' has {shown}, not times of one known kind; {remedy}"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        _decide(path)


def test_one_file_decides_for_all(tmp_path: Path) -> None:
    empty, dates = _write(tmp_path / "empty.csv", ["", ""]), _write(tmp_path / "b.parquet", [date(2015, 1, 6)])
    millis = _write(tmp_path / "c.csv", [1420070400000])
    seconds = _write(tmp_path / "d.csv", [1420070400])
    assert _decide(empty, dates, millis, seconds) == "ms"
    assert _decide(seconds, millis) == "s"
    assert _decide(empty) == "s"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("times")


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


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
@settings(max_examples=30, deadline=None)
@given(moments=st.lists(MOMENTS, min_size=1), unit=st.sampled_from(sorted(WRITTEN)))
def test_times_of_this_time_are_read_in_any_unit(folder: Path, name: str, moments: list[datetime], unit: str) -> None:
    resets = {"hour": 0, "minute": 0, "second": 0} if unit == "date" else {}
    moments = [moment.replace(microsecond=0, **resets) for moment in moments]  # type: ignore[arg-type]
    path = _write(folder / name, [WRITTEN[unit](moment) for moment in moments])
    assert _times(path) == [int(moment.timestamp()) * 1000 for moment in moments]


def test_whole_seconds_outside_of_the_range_of_times_stay_outside(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.parquet", [1_420_070_400, 0, 1, -1, -(2**63), MAX_TIMESTAMP_MS // 1000, 2**63 - 1])
    table = open_table(path, ["time"])
    times = table.head(99).select(timestamp_ms(table, "time", "s")).to_series().to_list()
    assert [time for time in times if 0 <= time <= MAX_TIMESTAMP_MS] == [
        1_420_070_400_000,
        0,
        1000,
        MAX_TIMESTAMP_MS // 1000 * 1000,
    ]
    assert len(times) == 7


@pytest.mark.parametrize(
    ("last_ms", "unit", "remedy"),
    [
        (1_420_070_400, "ms", "it is at 2015-01-01T00:00:00Z with --timestamp-unit s"),
        (1_420_070_400, "us", "it is at 2015-01-01T00:00:00Z with --timestamp-unit ms"),
        (1_420_070, "us", "it is at 2014-12-31T23:53:20Z with --timestamp-unit s"),
        (1_420_070, "s", "check the column of times"),
        (1_420_070, "iso", "check the column of times"),
    ],
)
def test_a_log_that_ends_in_1970_raises_and_a_plausible_unit_is_named(last_ms: int, unit: Any, remedy: str) -> None:
    with pytest.raises(
        DataError, match=rf"^the last event of b.csv is at 1970-.*, read as .*; {remedy}, or pass --allow-empty$"
    ):
        check_era({"a.csv": (0, 1 << 41), "b.csv": (0, last_ms)}, unit)
    new_year_1971 = int((datetime(1971, 1, 1) - datetime(1970, 1, 1)) / timedelta(milliseconds=1))
    check_era({"a.csv": (0, new_year_1971)}, unit)
    with pytest.raises(DataError, match="1970-12-31T23:59:59Z"):
        check_era({"a.csv": (0, new_year_1971 - 1)}, unit)


TIMES = {"s": 1_600_000_000, "ms": 1_600_000_000_000, "us": 1_600_000_000_000_000, "ns": 1_600_000_000_000_000_000}


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "auto"])
@pytest.mark.parametrize(("unit", "other"), [*itertools.combinations(reversed(TIMES), 2), ("s", "0"), ("ms", "0")])
def test_times_of_a_larger_unit_among_others_are_bad_rows(
    tmp_path: Path, name: str, unit: Any, other: str, given: bool
) -> None:
    times = [TIMES[unit], TIMES.get(other, 0), TIMES[unit] + 1]
    write_table(tmp_path / name, pl.DataFrame({"user": [1, 2, 3], "item": 1, "time": times}))
    names: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    config = TabularConfig(events=(tmp_path / name,), timestamp_unit=unit if given else "auto", **names)
    (part,) = read_tabular(config, {"user_id": "keep", "item_id": "keep"}, {}).parts
    events = read_part(part)
    assert events.good["user_id"].to_list() == [1, 3]
    reason = f"time is before 1973 in {UNITS[unit]}, unlike other times; check its unit"
    assert [row.reason for row in events.bad] == [reason]


def test_a_log_that_begins_in_another_unit_raises(tmp_path: Path) -> None:
    times = [*range(TIMES["s"], TIMES["s"] + 1000), TIMES["ms"]]
    pl.DataFrame({"user": 1, "item": 1, "time": times}).write_csv(tmp_path / "log.csv")
    names: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    config = TabularConfig(events=(tmp_path / "log.csv",), timestamp_unit="ms", **names)
    message = (
        "^the first event is at 1970-01-19T12:26:40Z, read as whole millis.*; it is at 2020-09-13T.* with --timest"
    )
    with pytest.raises(DataError, match=message):
        preprocess(PreprocessConfig(dataset="custom", out=tmp_path / "out", custom=config, split="none"))


def test_times_are_shown_to_the_second_in_utc() -> None:
    assert utc_text(1_420_547_400_999) == "2015-01-06T12:30:00Z"
    assert utc_text(253_402_300_799_999) == "9999-12-31T23:59:59Z"
