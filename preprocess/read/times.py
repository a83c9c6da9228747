"""Times of events: the unit of a column, and its values as milliseconds since 1970 in UTC."""

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from evenrank.core.errors import DataError
from evenrank.datasets.schema import TIMESTAMP_MS
from evenrank.preprocess.log_config import TimestampUnit
from evenrank.preprocess.read.table import Hint, Table
from evenrank.preprocess.read.values import Checked, as_integer, integer_bits, number_hints

# The last millisecond of the year 9999; the first time stamp allowed is 0, the start of 1970.
MAX_TIMESTAMP_MS = 253_402_300_799_999
UNITS: Mapping[TimestampUnit, str] = {
    "auto": "Parquet's date and time types",  # where there is nothing to decide
    "s": "seconds since 1970",
    "ms": "whole milliseconds since 1970",
    "us": "whole microseconds since 1970",
    "ns": "whole nanoseconds since 1970",
    "iso": "ISO 8601",
    "date": "dates such as 2015-01-06 or 20150106",
    "row": "one second for each row, from 1970 on",
}
PER_SECOND: Mapping[TimestampUnit, int] = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_SAMPLE_ROWS = 1000
_YEAR_MS = 31_536_000_000
_LEAST_MS = 10**11  # in 1973; the milliseconds below it are taken for seconds
# Not `\d`, which matches the digits of all scripts. Leap seconds cannot be expressed in ms since 1970.
_ZONE = "(?:Z| UTC|([+-])([01][0-9]|2[0-3])(?::?([0-5][0-9]))?)"
_ISO = (
    "^([0-9]{4}-[0-9]{2}-[0-9]{2})"
    f"(?:[T ]([0-9]{{2}}:[0-9]{{2}})(?::([0-5][0-9])(?:[.,]([0-9]{{1,3}})[0-9]*)?)?{_ZONE}?)?$"
)
_CLOCK_AND_ZONE = "^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?(.*)$"
# The second form is also a number, so it is limited to years that occur; .0 is of integers stored as floats.
_DATE = r"^(?:([0-9]{4})-([0-9]{2})-([0-9]{2})|((?:19|20)[0-9]{2})([0-9]{2})([0-9]{2})(?:\.0)?)$"


def unit_of(number: float) -> TimestampUnit:
    """Return the unit of a number of seconds, milliseconds, microseconds or nanoseconds since 1970, by its size."""
    # As seconds, 1e11 is in the year 5138; as milliseconds, in 1973.
    return next((unit for unit, count in PER_SECOND.items() if number < _LEAST_MS * count), "ns")


def utc_text(time_ms: int) -> str:
    """Return a time to the second, such as 2015-01-06T12:30:00Z."""
    return str(np.datetime_as_string(np.datetime64(time_ms, "ms"), unit="s", timezone="UTC", casting="unsafe"))


def decide_unit(tables: Sequence[Table], column: str) -> TimestampUnit:
    """Return the unit of a column, by its first values in the first file whose type does not tell it.

    Raises a DataError if they are not all of one kind: numbers, dates or ISO 8601; values of no kind do not count.
    """
    untyped = [table for table in tables if table.dtypes[column] == pl.String or table.dtypes[column].is_numeric()]
    text, number = pl.col("text"), pl.col("text").cast(pl.Float64, strict=False)
    is_date, is_iso = _date_ms(text).is_not_null(), _iso_ms(text).is_not_null()
    kinds: dict[TimestampUnit, pl.Expr] = {"date": is_date, "iso": is_iso, "s": number.is_finite() & ~is_date}
    for table in untyped:
        value = pl.col(column).cast(pl.String)
        sample = table.head(_SAMPLE_ROWS, value != "").select(text=value)
        checked = sample.with_columns(check.fill_null(False).alias(kind) for kind, check in kinds.items())
        known = checked.filter(pl.any_horizontal(*kinds))
        for kind in kinds:
            if len(known) and known.get_column(kind).all():
                return kind if kind != "s" else unit_of(known.select(number.abs().median()).item())
        if len(sample):
            differing = (known if len(known) else checked).unique(list(kinds), keep="first", maintain_order=True)
            shown = ", ".join(repr(value[:80]) for value in differing.get_column("text"))
            remedy = "set --timestamp-unit" if len(known) else "convert them, for example to ISO 8601"
            raise DataError(f"{table.path}: column {column!r} has {shown}, not times of one known kind; {remedy}")
    return "s" if untyped else "auto"


def least_ms(tables: Sequence[Table], column: str, unit: TimestampUnit) -> dict[str, int]:
    """Return the least time of numbers, by the reason to report of earlier ones, unless the first times are earlier.

    So seconds among milliseconds, or 0 for a missing time, do not become events of January 1970.
    """
    for table in tables if unit in PER_SECOND else ():
        if not table.dtypes[column].is_temporal():
            time = timestamp_ms(table, column, unit)
            if (median := table.head(_SAMPLE_ROWS, time.is_not_null()).select(time.median()).item()) is not None:
                reason = f"is before 1973 in {UNITS[unit]}, unlike other times; check its unit"
                return {reason: _LEAST_MS} if median >= _LEAST_MS else {}
    return {}


def timestamp_ms(table: Table, column: str, unit: TimestampUnit) -> pl.Expr:
    """Return event times as int64, rounded down; null where they cannot be read."""
    time, dtype = pl.col(column), table.dtypes[column]
    described = f"{table.path}: column {column!r} of type {dtype}"
    if dtype.base_type() in (pl.Datetime, pl.Date):
        return (time.cast(pl.Datetime("ms")) if dtype == pl.Date else time).dt.epoch("ms")
    if unit == "iso":
        if dtype != pl.String:
            raise DataError(f"{described} is not text; set timestamp_unit to s, ms, us or ns")
        return _iso_ms(time)
    if dtype != pl.String and not dtype.is_numeric():
        raise DataError(f"{described} cannot hold times; convert it to numbers or text")
    if integer_bits(dtype) < integer_bits(pl.Float64()):
        raise DataError(f"{described} is too coarse for times; store the times as Float64 or integers")
    if unit == "date":
        return _date_ms(time.cast(pl.String))
    if unit == "s" and dtype.is_integer():
        return as_integer(table, column).clip(-1, MAX_TIMESTAMP_MS // 1000 + 1) * 1000
    if unit == "s":
        # Decimals are exact where floats may be off by a millisecond; the digits of a float below 1 us are noise.
        seconds = time.cast(pl.Decimal(24, 6 if dtype.is_float() else 9), strict=False)
        return (seconds * 1000).floor().cast(pl.Int64, strict=False)
    return as_integer(table, column) // (PER_SECOND[unit] // 1000)


def as_time(table: Table, column: str, unit: TimestampUnit) -> Checked:
    """Return the times of a column, with hints why a text is none of this unit."""
    time, hints = timestamp_ms(table, column, unit), dict[str, pl.Expr]()
    if unit in PER_SECOND:
        hints = number_hints(table, column)
    elif unit == "iso" and table.dtypes[column] == pl.String:
        zone = pl.col(column).str.extract(_CLOCK_AND_ZONE)
        is_known = zone.str.contains(f"^{_ZONE}?$") | ~zone.str.contains("[A-Za-z+-]")
        reason = f"{column} has a time zone that cannot be read; write UTC, or an offset such as +02:00"
        hints = {Hint(reason): is_known.fill_null(True)}
    reason = f"{column} is not a time in {UNITS[unit]} up to the year 9999"
    return time.alias(TIMESTAMP_MS), hints | {reason: time.is_between(0, MAX_TIMESTAMP_MS)}


def _iso_ms(text: pl.Expr) -> pl.Expr:
    return text.map_batches(_parse_iso, return_dtype=pl.Int64, is_elementwise=True)


def _parse_iso(texts: pl.Series) -> pl.Series:
    # Polars' parser expects a single format for a column, but logs mix several. As one expression, it would divide the
    # texts again for each part of a time.
    parts = texts.str.extract_groups(_ISO).struct.unnest()
    date, clock, seconds, millis, sign, offset_hours, offset_minutes = (pl.col(str(i)) for i in range(1, 8))
    moment = pl.concat_str(date, clock.fill_null("00:00"), seconds.fill_null("00"), separator=" ")
    local = moment.str.to_datetime("%Y-%m-%d %H:%M %S", time_unit="ms", strict=False).dt.epoch("ms")
    minutes = offset_hours.cast(pl.Int64) * 60 + offset_minutes.cast(pl.Int64).fill_null(0)
    offset = pl.when(sign == "-").then(-minutes).otherwise(minutes).fill_null(0)
    return parts.select(local + millis.str.pad_end(3, "0").cast(pl.Int64).fill_null(0) - offset * 60_000).to_series()


def _date_ms(text: pl.Expr) -> pl.Expr:
    return _iso_ms(pl.when(text.str.contains(_DATE)).then(text.str.replace(_DATE, "${1}${4}-${2}${5}-${3}${6}")))


def check_era(spans: Mapping[str, tuple[int, int]], unit: TimestampUnit) -> None:
    """Raise a DataError if a file ends, or a log of numbers begins, in 1970, as times that are read in a smaller unit.

    `spans` are the times of the first and the last event by file.
    """
    name, (_, time_ms) = min(spans.items(), key=lambda span: span[1][1])
    event = f"last event of {name}"
    if time_ms >= _LEAST_MS and unit in PER_SECOND:
        event, time_ms = "first event", min(first for first, _ in spans.values())
    if time_ms >= _YEAR_MS or unit == "row":
        return
    times = {other: time_ms * PER_SECOND.get(unit, 0) // count for other, count in PER_SECOND.items()}
    plausible = [f"{utc_text(ms)} with --timestamp-unit {other}" for other, ms in times.items() if ms >= 10 * _YEAR_MS]
    remedy = f"it is at {plausible[-1]}" if plausible else "check the column of times"
    read = f"the {event} is at {utc_text(time_ms)}, read as {UNITS[unit]}"
    raise DataError(f"{read}; {remedy}, or pass --allow-empty")
