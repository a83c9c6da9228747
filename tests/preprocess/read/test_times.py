"""Times in any unit; golden/times.toml has those that cannot be read."""

from collections.abc import Callable
from datetime import UTC, datetime

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.preprocess.read.tabular import open_table
from evenrank.preprocess.read.times import check_era, decide_unit, timestamp_ms, unit_of, utc_text

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
