import dataclasses
import gzip
import math
import os
import random
import re
import sys
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import polars as pl
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets import schema
from evenrank.preprocess.log_config import TabularConfig
from evenrank.preprocess.read.features import NO_FEATURES, Interactions
from evenrank.preprocess.read.log import read_tabular
from evenrank.preprocess.read.tabular import open_table
from evenrank.preprocess.read.values import TextIdsError
from tests.preprocess.read.parts import Read, read_part

HEADER = "time,user,note,item\n"
EVENTS = HEADER + '100,7,"a ""b"", c",30\n200.0015,-3,,10\n'
ONE = pl.DataFrame({"user": [1], "item": [2], "time": [3]})


def _write(path: Path, content: str | bytes | pl.DataFrame) -> Path:
    if isinstance(content, pl.DataFrame):
        content.write_parquet(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_table(path: Path, frame: pl.DataFrame) -> None:
    writers: dict[str, Any] = {".csv": frame.write_csv, ".parquet": frame.write_parquet, ".jsonl": frame.write_ndjson}
    writers[path.suffix](path)


def _config(*events: Path, **options: Any) -> TabularConfig:
    columns = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    return TabularConfig(events=events, **{**columns, **options})


AUTO = {"user_id": "auto", "item_id": "auto"}
KEEP = {"user_id": "keep", "item_id": "keep"}
TYPES: dict[str, Any] = {"int64": pl.Int64, "uint64": pl.UInt64, "text": pl.String}


def _read(
    folder: Path,
    content: str | bytes | pl.DataFrame,
    name: str | None = None,
    *,
    rules: dict[str, str] = AUTO,
    known: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Interactions:
    name = name or ("log.parquet" if isinstance(content, pl.DataFrame) else "log.csv")
    return read_tabular(_config(_write(folder / name, content), **options), rules, known)


def _further_events(interactions: Interactions) -> dict[str, str]:
    return {column.name: column.dtype for column in interactions.events if column not in schema.EVENTS}


def _read_parts(interactions: Interactions) -> list[Read]:
    parts = [read_part(part) for part in interactions.parts]
    ids = {name: TYPES[kind] for name, kind in interactions.id_kinds.items()}
    schema = {**ids, "action": pl.Int32, "timestamp_ms": pl.Int64}
    assert all(dict(events.good.schema) == schema for events in parts)
    return parts


def _rows(interactions: Interactions) -> list[tuple[Any, ...]]:
    """Return the good rows as (user, item, action, time)."""
    return [row for part in _read_parts(interactions) for row in part.good.rows()]


def _bad(interactions: Interactions) -> list[tuple[int, str]]:
    """Return lines and reasons of the bad rows of the only file."""
    (events,) = _read_parts(interactions)
    return [(row.line, row.reason) for row in events.bad]


def _bad_rows_of(interactions: Interactions) -> list[tuple[int, str]]:
    """Return the same of a file with more columns."""
    (part,) = interactions.parts
    return [(row.line, row.reason) for row in read_part(part).bad]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("log.csv", EVENTS),
        ("log[1]*.csv", EVENTS),
        ("LOG.CSV", "\ufeff" + EVENTS.replace("\n", "\r\n")),
        ("log.csv.gz", gzip.compress(EVENTS.encode())),
        ("log.tsv", 'time\tuser\tnote\titem\n100\t7\t"a\tb"\t30\n200.0015\t-3\t\t10'),
    ],
)
def test_columns_are_found_by_name_in_each_text_format(tmp_path: Path, name: str, content: str | bytes) -> None:
    interactions = _read(tmp_path, content, name)
    assert _rows(interactions) == [(7, 30, 0, 100_000), (-3, 10, 0, 200_001)]
    assert _bad(interactions) == []
    assert interactions.id_kinds == {"user_id": "int64", "item_id": "int64"}
    assert interactions.num_actions == 1
    assert interactions.context is interactions.item_features is NO_FEATURES
    (source,) = interactions.sources()
    assert (source.path, source.bytes) == (name, (tmp_path / name).stat().st_size)
    config = dataclasses.asdict(_config(tmp_path / name))
    lists = {name: list(value) for name, value in config.items() if isinstance(value, tuple)}
    written = {"events": [name], "timestamp_unit": "s", "delimiter": "\t" if name == "log.tsv" else ","}
    assert interactions.options == {**config, **lists, **written}


def test_parquet_with_other_columns_and_several_types_of_numbers_and_times(tmp_path: Path) -> None:
    items = pl.Series([30, 10], dtype=pl.UInt64)
    columns = {"item": items, "user": [7.0, 8.5], "time": [1_700_000_000.123, 1.0], "other": [[1], [2]]}
    interactions = _read(tmp_path, pl.DataFrame(columns))
    assert _rows(interactions) == [(7, 30, 0, 1_700_000_000_123)]
    assert interactions.id_kinds == {"user_id": "int64", "item_id": "uint64"}
    (part,) = interactions.parts
    assert [(row.line, row.text) for row in read_part(part).bad] == [(2, "8.5,10,1.0")]
    assert part.num_events == 2
    time, noon = pl.lit(datetime(2024, 1, 1, 12, 0, 0, 1999)), 1_704_110_400_000
    for column, expected in (
        (time, [noon + 1]),
        (time.dt.replace_time_zone("Europe/Berlin"), [noon + 1 - 3_600_000]),
        (time.dt.date(), [noon - 43_200_000]),
        (pl.lit(datetime(1969, 12, 31, 23, 59, 59, 999_999)), []),
    ):
        rows = _rows(_read(tmp_path, ONE.with_columns(time=column)))
        assert rows == [(1, 2, 0, time_ms) for time_ms in expected]
        with pytest.raises(ConfigError, match=r"timestamp_unit 's' does not apply to time, which is of type Date"):
            _read(tmp_path, ONE.with_columns(time=column), timestamp_unit="s")


def test_several_files_share_one_type_of_ids(tmp_path: Path) -> None:
    first = _write(tmp_path / "a.csv", "user,item,time\nzoë,5,3\nb,6,2\n")
    pl.DataFrame({"time": [1, 4], "user": [12, 7], "item": [5, 9]}).write_parquet(tmp_path / "b.parquet")
    interactions = read_tabular(_config(first, tmp_path / "b.parquet"), AUTO, {})
    assert _rows(interactions) == [("zoë", 5, 0, 3000), ("b", 6, 0, 2000), ("12", 5, 0, 1000), ("7", 9, 0, 4000)]
    assert [part.name for part in interactions.parts] == [str(first), str(tmp_path / "b.parquet")]
    assert interactions.id_kinds == {"user_id": "text", "item_id": "int64"}


@pytest.mark.parametrize(
    ("dtype", "good", "bad", "integers"),
    [
        (pl.Float32, [2**24 - 1, 1 - 2**24], [2**24, -(2**24), 1.5], "-2^24+1..2^24-1, where Float32 is exact"),
        (pl.Float64, [2**53 - 1, 1 - 2**53], [2.0**53, -1e300, math.inf], "-2^53+1..2^53-1, where Float64 is exact"),
        (pl.UInt64, [2**63 - 1], [2**63, 2**64 - 1], "-2^63..2^63-1"),
        (pl.Int128, [2**63 - 1, -(2**63)], [2**63, -(2**63) - 1], "-2^63..2^63-1"),
        (pl.Decimal(38, 0), [2**63 - 1, -(2**63)], [2**63, -(2**63) - 1, 10**30], "-2^63..2^63-1"),
    ],
)
def test_exact_integers_are_ids(tmp_path: Path, dtype: Any, good: list[int], bad: list[float], integers: str) -> None:
    users = pl.Series([*map(Decimal, good), *map(Decimal, bad)] if dtype == pl.Decimal else [*good, *bad], dtype=dtype)
    frame = pl.DataFrame({"user": users, "item": 1, "time": 0})
    rules = {"user_id": "keep", "item_id": "auto"}
    interactions = _read(tmp_path, frame, rules=rules)
    assert _rows(interactions) == [(user, 1, 0, 0) for user in good]
    assert [reason for _, reason in _bad(interactions)] == [f"user is not an integer in {integers}"] * len(bad)
    assert interactions.id_kinds == {"user_id": "int64", "item_id": "int64"}
    if dtype != pl.UInt64:
        assert _rows(_read(tmp_path, frame)) == _rows(interactions)


def test_unsigned_ids_up_to_64_bits_are_exact_unless_they_are_kept(tmp_path: Path) -> None:
    users = pl.Series([0, 2**63, 2**64 - 1], dtype=pl.UInt64)
    _write(tmp_path / "a.parquet", pl.DataFrame({"user": users, "item": [1, 2, 3], "time": 0}))
    _write(tmp_path / "b.csv", "user,item,time\n7,4,0\n-1,5,0\n")
    interactions = read_tabular(_config(tmp_path / "a.parquet", tmp_path / "b.csv"), AUTO, {})
    assert interactions.id_kinds == {"user_id": "uint64", "item_id": "int64"}
    assert _rows(interactions) == [(0, 1, 0, 0), (2**63, 2, 0, 0), (2**64 - 1, 3, 0, 0), (7, 4, 0, 0)]
    (bad,) = read_part(interactions.parts[1]).bad
    assert (bad.line, bad.reason) == (3, "user is not an integer in 0..2^64-1")


def test_unsigned_ids_are_the_same_numbers_in_text_and_in_parquet(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": pl.Series([5, 2**64 - 1], dtype=pl.UInt64), "item": [1, 2], "time": 0})
    as_texts: dict[str, Any] = {"user_id": "text"}
    for suffix in (".csv", ".parquet", ".jsonl"):
        write_table(tmp_path / f"log{suffix}", frame)
        for known, users in (({}, [5, 2**64 - 1]), (as_texts, ["5", "18446744073709551615"])):
            interactions = read_tabular(_config(tmp_path / f"log{suffix}"), AUTO, known)
            assert interactions.id_kinds["user_id"] == ("text" if known else "uint64")
            assert [row[0] for row in _rows(interactions)] == users
            assert _bad(interactions) == []


def test_numbers_without_an_exact_text_are_faults_among_ids_that_are_texts(tmp_path: Path) -> None:
    users = pl.Series([7.0, 2.5, None])
    interactions = _read(tmp_path, pl.DataFrame({"user": users, "item": 1, "time": 0}), known={"user_id": "text"})
    assert _rows(interactions) == [("7", 1, 0, 0)]
    reason = "user is not an integer in -2^53+1..2^53-1, where Float64 is exact"
    assert [found for _, found in _bad(interactions)] == [reason, "user is missing"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("user-column", "x"),
        ("item-column", "x"),
        ("timestamp-column", "x"),
        ("action-columns", ("x", "flag")),
        ("event-columns", ("flag:int=0", "x:int=0")),
        ("label", "x:int"),
        ("weight", "x"),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_column_that_a_log_does_not_have_is_reported_with_its_option(
    tmp_path: Path, option: str, value: Any, suffix: str
) -> None:
    log = pl.DataFrame({"user": [1], "item": [2], "time": [3], "flag": [0]})
    write_table(tmp_path / f"log.{suffix}", log)
    message = f"has no column 'x' (--{option}); known: user, item, time, flag; choose one of them"
    with pytest.raises(DataError, match=re.escape(message)):
        read_tabular(_config(tmp_path / f"log.{suffix}", **{option.replace("-", "_"): value}), AUTO, {})


def test_a_key_that_json_lines_do_not_have_is_an_error(tmp_path: Path) -> None:
    message = r"log.jsonl: column 'usr' \(--user-column\) is missing in the first rows; check its name"
    with pytest.raises(DataError, match=message):
        _read(tmp_path, '{"user": 1, "item": 2, "time": 3}\n', name="log.jsonl", user_column="usr")


def test_a_line_that_is_no_json_object_is_a_bad_row_with_a_remedy(tmp_path: Path) -> None:
    good = '{"user": 7, "item": 30, "time": 100}'
    interactions = _read(tmp_path, f"[{good}]\n{good}\n", "log.json")
    assert _bad(interactions) == [(1, "the line is not a JSON object (jq -c '.[]' divides an array into lines)")]
    assert _rows(interactions) == [(7, 30, 0, 100_000)]


@pytest.mark.parametrize("dtype", [pl.String, pl.Categorical])
def test_different_texts_are_different_ids(tmp_path: Path, dtype: Any) -> None:
    texts = ["+7", "-0", "0", "00", "7", "7.5"]
    interactions = _read(tmp_path, pl.DataFrame({"user": pl.Series(texts, dtype=dtype), "item": texts, "time": 0}))
    assert _rows(interactions) == [(text, text, 0, 0) for text in texts]
    assert interactions.id_kinds == {"user_id": "text", "item_id": "text"}


@pytest.mark.parametrize("value", ["007", "+7", "-0", "1.5", "18446744073709551616", "a"])
def test_one_value_that_is_not_a_plain_integer_makes_the_column_strings(tmp_path: Path, value: str) -> None:
    lines = [f"1,{item},0\n" for item in (10, 9)]
    text = "user,item,time\n" + "".join(lines) * 1000 + f"1,{value},0\n"
    interactions = _read(tmp_path, text)
    if interactions.id_kinds["item_id"] != "text":  # the value is not among the first rows
        with pytest.raises(TextIdsError) as caught:
            _rows(interactions)
        assert caught.value.args == ({"item_id": f"{tmp_path / 'log.csv'} has {value!r} in column 'item'"},)
    interactions = _read(tmp_path, text, known={"item_id": "text"})
    assert _rows(interactions) == [(1, item, 0, 0) for item in ["10", "9"] * 1000 + [value]]
    assert interactions.id_kinds == {"user_id": "int64", "item_id": "text"}
    interactions = _read(tmp_path, f"user,item,time\n1,10,0\n1,{value},0\n")
    assert _rows(interactions) == [(1, "10", 0, 0), (1, value, 0, 0)]


def test_text_in_a_column_whose_integers_are_kept_is_a_fault(tmp_path: Path) -> None:
    interactions = _read(tmp_path, "user,item,time\na,1,0\n1,a,0\n-1,-1,0\n-1,1,0\n", rules=KEEP)
    assert _rows(interactions) == [(-1, 1, 0, 0)]
    integer = "is not an integer in -2^63..2^63-1"
    assert _bad(interactions) == [(2, f"user {integer}"), (3, f"item {integer}"), (4, "item must not be negative")]


LEAP_DAY = 1_709_164_800_000  # 2024-02-29
BAD = ("", "1.5", "-1")


@pytest.mark.parametrize(
    ("unit", "time_format", "good", "bad"),
    [
        (
            "s",
            "in seconds since 1970",
            {"1.001": 1001, "1.9999999": 1999, "253402300799.9999": 253_402_300_799_999},
            ["", "x", "-0.001", "253402300800", "9" * 40, "nan", "inf"],
        ),
        (
            "ms",
            "in whole milliseconds since 1970",
            {"1700000000123": 1_700_000_000_123},
            [*BAD, "253402300800000", str(2**63)],
        ),
        ("us", "in whole microseconds since 1970", {"1999": 1}, [*BAD, "253402300800000000"]),
        (
            "ns",
            "in whole nanoseconds since 1970",
            {"1999999": 1, str(2**63 - 1): 9_223_372_036_854},
            [*BAD, str(2**63)],
        ),
        (
            "date",
            "in dates such as 2015-01-06 or 20150106",
            {"2024-02-29": LEAP_DAY, "20240229": LEAP_DAY, "20240229.0": LEAP_DAY, "1970-01-01": 0},
            [*BAD, "1709164800", "2024-02-30", "20240230", "18991231", "2024-0229", "2024-02-29 ", "2024-02-29T00:00"],
        ),
        (
            "iso",
            "in ISO 8601",
            {
                "1970-01-02": 86_400_000,
                "1970-01-01T00:01": 60_000,
                "1970-01-01 00:00:01.5": 1500,
                "1970-01-01 00:00:01 UTC": 1000,
                "2024-02-29T12:00:00.1239Z": LEAP_DAY + 43_200_123,
                "2024-02-29T12:00:00+02:30": LEAP_DAY + 34_200_000,
                "2024-02-29T12:00:00-0100": LEAP_DAY + 46_800_000,
                "2024-02-29T00:00:00+23:59": LEAP_DAY - 86_340_000,
                "2024-02-29T00:00:00-2359": LEAP_DAY + 86_340_000,
                "9999-12-31T23:59:59.999": 253_402_300_799_999,
            },
            [
                *("", "0", "2023-02-29", "2024-02-30", "2024-13-01", "0000-01-01"),
                *("\u0662024-01-01", "2024-01-01 and more"),
                *("1969-12-31T23:59:59.999", "1970-01-01T00:00:00+00:01"),
                *(f"2024-01-01{end}" for end in ("Z", "T00", "T24:01", "T00:60", "T00:00:60", "T00:00:00.")),
                *(f"2024-01-01T00:00{end}" for end in (":00.\u0663", "+5", "+05:3", "+05:60", "+24:00", "-99:99")),
                "2024-01-01T00:00+0\u0663:00",
            ],
        ),
    ],
)
def test_times_are_converted_to_milliseconds_and_invalid_ones_are_bad_rows(
    tmp_path: Path, unit: str, time_format: str, good: dict[str, int], bad: list[str]
) -> None:
    lines = "".join(f"1,{text},2\n" for text in (*bad, *good))
    interactions = _read(tmp_path, f"user,time,item\n{lines}", timestamp_unit=unit)
    reason = f"time is not a time {time_format} up to the year 9999"
    zone = "time has a time zone that cannot be read; write UTC, or an offset such as +02:00"
    are_zones = [unit == "iso" and bool(re.search(r":.*[+-]", text)) and text[:4] != "1970" for text in bad]
    assert _bad(interactions) == [(line, zone if is_zone else reason) for line, is_zone in enumerate(are_zones, 2)]
    assert _rows(interactions) == [(1, 2, 0, expected) for expected in good.values()]


@pytest.mark.parametrize(
    "zone", ["CET", " CET", " Europe/Berlin", "+02:00[Europe/Berlin]", " GMT", "+2", " +02:00", "z"]
)
def test_a_zone_that_cannot_be_read_has_its_remedy(tmp_path: Path, zone: str) -> None:
    text = f"user,item,time\n1,2,2024-01-01T12:00:00{zone}\n,2,2024-01-01T12:00:00Z\n1,2,2024-13-01T12:00:00+02:00\n"
    _, *reasons = (reason for _, reason in _bad(_read(tmp_path, text, timestamp_unit="iso")))
    assert reasons == ["user is missing", "time is not a time in ISO 8601 up to the year 9999"]
    remedy = "time has a time zone that cannot be read; write UTC, or an offset such as +02:00"
    assert _bad(_read(tmp_path, text, timestamp_unit="iso"))[0] == (2, remedy)


@pytest.mark.parametrize(
    "options",
    [
        *({"event_columns": (column,)} for column in ("n", "n=0", "n:int", "n:int=0")),
        *({"action_columns": ("n",), "action_map": rule} for rule in ("", "stars", "bins:1,2", "float")),
        {"timestamp_column": "n", "timestamp_unit": "s"},
    ],
)
def test_a_decimal_comma_has_its_remedy(tmp_path: Path, options: dict[str, Any]) -> None:
    text = "user;item;time;n\n1;2;3;3,5\n1;2;3;3\n1;2;3;3,x\n"
    bad = _bad_rows_of(_read(tmp_path, text, **options))
    assert bad[0] == (2, "n has a decimal comma; write a decimal point")
    assert [line for line, _ in bad] == [2, 4]
    assert "comma" not in bad[1][1]


def test_rows_with_faults_are_found_and_do_not_affect_the_type_of_ids(tmp_path: Path) -> None:
    low, high = -(2**63), 2**63 - 1
    lines = f'{low},{high},3,x\n,2,3,x\n1,,3,x\n"",2,3,x\n1,-2,3,x\n1,2\n\n1,2,3,x,5\n1,2,3\n1,2,3,x,\nx,2,y,\n4,5,6,\n'
    interactions = _read(tmp_path, "user,item,time,note\n" + lines)
    assert interactions.id_kinds == {"user_id": "int64", "item_id": "int64"}
    kept = _read(tmp_path, "user,item,time,note\n" + lines, rules=KEEP)
    negative = (6, "item must not be negative")
    assert _bad(kept) == sorted([*_bad(interactions), negative])
    assert _bad(interactions) == [
        (3, "user is missing"),
        (4, "item is missing"),
        (5, "user is missing"),
        (7, "expected 4 fields, got 2"),
        (8, "the line is empty"),
        (9, "expected 4 fields, got 5"),
        (10, "expected 4 fields, got 3"),
        (11, "expected 4 fields, got 5"),
        (12, "time is not a time in seconds since 1970 up to the year 9999"),
    ]
    assert _rows(kept) == [(low, high, 0, 3000), (4, 5, 0, 6000)]
    assert _rows(interactions) == [_rows(kept)[0], (1, -2, 0, 3000), *_rows(kept)[1:]]
    assert [row.text for row in read_part(interactions.parts[0]).bad[:3]] == [",2,3,x", "1,,3,x", '"",2,3,x']


def test_exactly_the_rows_marked_bad_are_found(tmp_path: Path) -> None:
    rng = random.Random(7)
    tokens = [*'11a",,,\n\n \ré\0\ufeff', '""', "1,2,3\n", '"1","2",3\n']
    for _ in range(100):
        text = "user,item,time\n" + "".join(rng.choices(tokens, k=rng.randrange(1, 30)))
        if text.count("\n") > 1:
            _bad(_read(tmp_path, text, timestamp_unit="s"))


def test_text_that_is_not_utf8_is_not_an_id(tmp_path: Path) -> None:
    interactions = _read(tmp_path, b"user,item,time,note\na,1,1,\xff\n\xff,1,1,\n")
    assert _bad(interactions) == [(3, "the line is not UTF-8; convert the file, for example with iconv")]
    assert _rows(interactions) == [("a", 1, 0, 1000)]


@pytest.mark.parametrize(
    ("dtype", "values", "good", "largest"),
    [
        (pl.String, ["0", "2147483647", "2147483648", "-1", "", "x", "1.5"], [0, 2**31 - 1], 2**31 - 1),
        (pl.Float32, [2**24 - 1, 2**24], [2**24 - 1], 2**24 - 1),
    ],
)
def test_one_column_is_the_action(tmp_path: Path, dtype: Any, values: list[Any], good: list[int], largest: int) -> None:
    frame = pl.DataFrame({"user": 1, "item": 2, "time": 3, "kind": pl.Series(values, dtype=dtype)})
    interactions = _read(tmp_path, frame, action_columns=("kind",))
    assert _rows(interactions) == [(1, 2, action, 3000) for action in good]
    reason = f"kind is not an integer in 0..{largest}"
    assert _bad(interactions) == [(line, reason) for line in range(len(good) + 1, len(values) + 1)]
    assert interactions.num_actions is None


def test_several_action_columns_are_bits(tmp_path: Path) -> None:
    text = "click,user,item,time,like,share\n1,1,2,3,0,true\nFalse,1,2,3,1,0\n0,1,2,3,2,0\n0,1,2,3,,0\n"
    interactions = _read(tmp_path, text, action_columns=("like", "click", "share"))
    assert _rows(interactions) == [(1, 2, 2 + 4, 3000), (1, 2, 1, 3000)]
    assert _bad(interactions) == [(4, "like is not 0 or 1"), (5, "like is not 0 or 1")]
    assert interactions.num_actions == 8
    names = tuple(f"bit{index}" for index in range(31))  # as many as fit in an int32
    interactions = _read(tmp_path, ONE.with_columns(**dict.fromkeys(names, True)), action_columns=names)
    assert _rows(interactions) == [(1, 2, 2**31 - 1, 3000)]
    assert interactions.num_actions == 2**31


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        (pl.lit(date(2024, 1, 1)).alias("kind"), {"action_columns": ("kind",)}, "of type Date cannot hold integ"),
        (pl.col("time"), {"timestamp_unit": "iso"}, "'time' of type Int64 is not text; set timestamp_unit"),
        (pl.col("time").cast(pl.Float32), {}, "'time' of type Float32 is too coarse for times; store the times as"),
        (pl.lit(True).alias("time"), {}, "'time' of type Boolean cannot hold times"),
        (pl.concat_list("user"), {}, r"'user' of type List\(Int64\) cannot hold ids"),
    ],
)
def test_unsuitable_columns_raise(tmp_path: Path, column: pl.Expr, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"log\.parquet: .*{message}"):
        _read(tmp_path, ONE.with_columns(column), **options)


MANY_LINES = gzip.compress((HEADER + "".join(f"{line * 7919 % 1001},{line},,3\n" for line in range(50_000))).encode())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "log.csv",
            "time,user,thing\n1,2,3\n",
            "has no column 'item' (--item-column); known: time, user, thing; choose one of them or, if th",
        ),
        ("log.csv", "user,item,time,item\n1,2,3,4\n", "has 2 columns 'item'; rename all but one"),
        ("log.csv", "", "is empty; create it again"),
        ("log.csv", '"user,item,time\n1,2,3\n', "the first line '\"user,item,time' cannot be parsed"),
        ("log.xlsx", EVENTS, "has an unknown suffix; expected one of .csv, .tsv, .txt, .dat, .json, .jsonl, .nd"),
        ("log.csv.gz", EVENTS, "holds no gzip data, unlike its name; rename it, or create it again"),
        (
            "log.csv.gz",
            MANY_LINES[:-50],
            "cannot be read: Truncated compressed stream; check that the file is complete",
        ),
        (
            "log.parquet",
            ONE.drop("item"),
            "has no column 'item' (--item-column); known: user, time; choose one of them",
        ),
        ("log.parquet", EVENTS, "holds no Parquet data, unlike its name; rename it, or create it again"),
    ],
)
def test_invalid_files_raise(tmp_path: Path, name: str, content: str | bytes | pl.DataFrame, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        _read(tmp_path, content, name)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("name", ["*", "^.*$"])
def test_a_column_whose_name_is_a_pattern_is_refused(tmp_path: Path, name: str, suffix: str) -> None:
    write_table(tmp_path / f"log.{suffix}", ONE.rename({"user": name}))
    with pytest.raises(DataError, match=re.escape(f"log.{suffix}: a column cannot be called {name!r}; rename it")):
        read_tabular(_config(tmp_path / f"log.{suffix}", user_column=name), AUTO, {})


def test_parquet_with_damaged_pages_raises(tmp_path: Path) -> None:
    ids = [f"id {number}" for number in range(10_000)]
    frame = pl.DataFrame({"user": ids, "item": ids, "time": range(10_000)})
    content = _write(tmp_path / "log.parquet", frame).read_bytes()
    half = len(content) // 2
    with pytest.raises(DataError, match=r"log\.parquet cannot be read: .*; check that the file is complete"):
        _read(tmp_path, content[:4] + bytes(half) + content[4 + half :], "log.parquet")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"events": ()}, "events must be at least one file, got \\(\\)"),
        ({"timestamp_unit": "h"}, "timestamp_unit must be one of auto, s, ms, us, ns, iso, date, row, got 'h'"),
        ({"action_columns": tuple(map(str, range(32)))}, "action_columns must be at most 31 columns, got "),
        ({"item_column": "user"}, "column 'user' is given twice"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(_config(Path("log.csv")), **options)


@pytest.mark.timeout(60, method="thread")  # a read that waits cannot be interrupted
def test_a_named_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is a named pipe, not a regular file"):
        open_table(tmp_path / "pipe", ("user",))


@pytest.mark.parametrize(
    ("action_map", "good", "bad", "num_actions", "reason"),
    [
        ("stars", {"1": 0, "4.0": 3, "5": 4}, ["0", "5.5", "", "x"], 5, "not on the scale 1 to 5 in steps of 1"),
        ("half-stars", {"0.5": 0, "4.50": 8}, ["0", "4.2", "nan"], 10, "not on the scale 0.5 to 5 in steps of 0.5"),
        ("bins:-1,2.5,4", {"-1": 1, "-2": 0, "2.4": 1, "2.5": 2, "1e9": 3}, ["", "inf", "x"], 4, "not a number"),
        ("values:pv,cart,buy", {"pv": 0, "buy": 2, "cart": 1}, ["", "PV", "fav"], 3, "not one of pv, cart, buy"),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_a_map_turns_ratings_and_words_into_actions(
    tmp_path: Path, suffix: str, action_map: str, good: dict[str, int], bad: list[str], num_actions: int, reason: str
) -> None:
    frame = pl.DataFrame({"user": 1, "item": 2, "time": 3, "kind": [*good, *bad]})
    path = tmp_path / f"log.{suffix}"
    write_table(path, frame)
    config = _config(path, action_columns=("kind",), action_map=action_map)
    interactions = read_tabular(config, AUTO, {})
    assert _rows(interactions) == [(1, 2, action, 3000) for action in good.values()]
    assert [found for _, found in _bad(interactions)] == [f"kind is {reason}"] * len(bad)
    assert interactions.num_actions == num_actions


@pytest.mark.parametrize("dtype", [pl.Float32, pl.Decimal(4, 1), pl.Int64, pl.UInt8])
def test_ratings_of_every_type_of_numbers_are_mapped(tmp_path: Path, dtype: Any) -> None:
    frame = pl.DataFrame({"user": 1, "item": 2, "time": 3, "kind": pl.Series([1, 5, 3]).cast(dtype)})
    interactions = _read(tmp_path, frame, action_columns=("kind",), action_map="half-stars")
    assert [action for _, _, action, _ in _rows(interactions)] == [1, 9, 5]


def test_booleans_have_values_too(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": 1, "item": 2, "time": 3, "kind": [True, False]})
    interactions = _read(tmp_path, frame, action_columns=("kind",), action_map="values:false,true")
    assert [action for _, _, action, _ in _rows(interactions)] == [1, 0]


EXTRA = (
    "user,item,time,price,dwell,w\n1,2,3,1.5,7,0.25\n1,2,3,,,1\n1,2,3,-2,-9,1\n1,2,3,x,1,1\n1,2,3,1,1.5,1\n1,2,3,1,1,\n"
    "1,2,3,\\N,\\N,2\n1,2,3,1,1,\\N\n1,\\N,3,1,1,1\n"
)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_further_columns_are_numbers_with_a_declared_fill(tmp_path: Path, suffix: str) -> None:
    frame = pl.read_csv(EXTRA.encode(), infer_schema=False)
    path = tmp_path / f"log.{suffix}"
    write_table(path, frame)
    options: dict[str, Any] = {"event_columns": ("price=-1", "dwell:int=0"), "weight": "w:float"}
    interactions = read_tabular(_config(path, **options), AUTO, {})
    assert _further_events(interactions) == {"price": "float32", "dwell": "int64", "w": "float32"}
    (part,) = interactions.parts
    good = read_part(part).good.select("price", "dwell", "w")
    assert good.dtypes == [pl.Float32, pl.Int64, pl.Float32]
    assert good.rows() == [(1.5, 7, 0.25), (-1, 0, 1), (-2, -9, 1), (-1, 0, 2)]
    assert [row.reason for row in read_part(part).bad] == [
        "price is not a finite float32",
        "dwell is not an integer in -2^63..2^63-1",
        "w is missing; declare a value instead, such as w=0, w=drop or w:float?",
        "w is missing; declare a value instead, such as w=0, w=drop or w:float?",
        "item is missing",
    ]
    assert (interactions.options["weight"], interactions.options["label"]) == ("w:float", "")


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_integers_of_further_columns_are_exact(tmp_path: Path, suffix: str) -> None:
    values = [2**53 + 1, -(2**63), 2**63 - 1]
    path = tmp_path / f"log.{suffix}"
    write_table(path, pl.DataFrame({"user": 1, "item": 2, "time": 3, "x": values}))
    (part,) = read_tabular(_config(path, event_columns=("x:int",)), AUTO, {}).parts
    assert read_part(part).good.get_column("x").to_list() == values


def test_missing_numbers_in_parquet_are_null_or_nan(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": 1, "item": 2, "time": 3, "price": [1.0, None, math.nan, math.inf, 1e300]})
    (part,) = _read(tmp_path, frame, event_columns=("price:float=0.5",)).parts
    assert read_part(part).good.get_column("price").to_list() == [1, 0.5, 0.5]
    assert [row.line for row in read_part(part).bad] == [4, 5]


@pytest.mark.parametrize("missing", ["", "NaN", "-nan", "None", "NULL", "NA", "<NA>"])
def test_missing_numbers_in_text_are_empty_nan_or_stand_for_null(tmp_path: Path, missing: str) -> None:
    text = f"user,item,time,price,dwell\na,2,3,{missing},{missing}\nb,2,3,1.5,4\n"
    (part,) = _read(tmp_path, text, event_columns=("price=-1", "dwell:int=-2")).parts
    assert read_part(part).good.select("user_id", "price", "dwell").rows() == [
        ("a", -1, -2),
        ("b", 1.5, 4),
    ]
    (part,) = _read(tmp_path, text, event_columns=("price",)).parts
    assert [row.reason for row in read_part(part).bad] == [
        "price is missing; declare a value instead, such as price=0, price=drop or price:float?"
    ]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("column", [{"label": "x:float?"}, {"event_columns": ("x:float?",)}, {}])
def test_missing_numbers_may_stay_missing(tmp_path: Path, suffix: str, column: dict[str, Any]) -> None:
    values = [1.5, None, -0.0, math.nan, 2.0**24, 0.1]
    path = tmp_path / f"log.{suffix}"
    write_table(path, pl.DataFrame({"user": 1, "item": 2, "time": 3, "x": values}))
    options: dict[str, Any] = column or {"action_columns": ("x:float?",), "action_map": "float"}
    interactions = read_tabular(_config(path, **options), AUTO, {})
    assert interactions.events[-1].type == "float32?"
    (part,) = interactions.parts
    good = read_part(part).good.get_column("x")
    assert good.dtype == pl.Float32
    expected = np.array([1.5, math.nan, -0.0, math.nan, 0.1], np.float32)
    np.testing.assert_array_equal(good.to_numpy().view(np.int32), expected.view(np.int32))
    assert [row.reason for row in read_part(part).bad] == [
        "x is 2^24 or more, where float32 rounds integers; declare x:int"
    ]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("column", [{"label": "x"}, {"weight": "x"}, {"event_columns": ("x=0",)}, {}])
@pytest.mark.parametrize("dtype", [pl.Int64, pl.Float64])
def test_numbers_that_float32_rounds_are_bad_rows_and_exact_as_integers(
    tmp_path: Path, suffix: str, column: dict[str, Any], dtype: Any
) -> None:
    values = pl.Series([2**24 - 1, 2**24, 1_600_000_001], dtype=dtype)
    path = tmp_path / f"log.{suffix}"
    write_table(path, pl.DataFrame({"user": 1, "item": 2, "time": 3, "x": values}))
    options: dict[str, Any] = column or {"action_columns": ("x",), "action_map": "float"}
    (part,) = read_tabular(_config(path, **options), AUTO, {}).parts
    assert read_part(part).good["x"].to_list() == [2**24 - 1]
    reason = "x is 2^24 or more, where float32 rounds integers; declare x:int"
    assert [row.reason for row in read_part(part).bad] == [reason] * 2
    if suffix == "parquet" and dtype == pl.Float64:
        write_table(path, pl.read_parquet(path).cast({"x": pl.Float32}))  # in which nothing more is rounded
        (part,) = read_tabular(_config(path, **options), AUTO, {}).parts
        assert read_part(part).good["x"].to_list() == pl.read_parquet(path)["x"].to_list()
    if dtype == pl.Int64:
        (part,) = read_tabular(_config(path, label="x:int"), AUTO, {}).parts
        assert read_part(part).good["x"].to_list() == values.to_list()


def test_a_column_without_any_value_is_filled(tmp_path: Path) -> None:
    frame = ONE.with_columns(price=None, dwell=None, kind=None)
    (part,) = _read(tmp_path, frame, event_columns=("price=-1", "dwell:int=7")).parts
    assert read_part(part).good.select("price", "dwell").rows() == [(-1, 7)]
    required: list[dict[str, Any]] = [{"event_columns": ("price",)}, {"action_columns": ("kind",)}]
    for options in (*required, {"user_column": "kind"}):
        (part,) = _read(tmp_path, frame, rules=KEEP, **options).parts
        assert len(read_part(part).bad) == 1


def test_a_negative_weight_is_a_fault(tmp_path: Path) -> None:
    text = "user,item,time,w,price\n1,2,3,0,-1\n1,2,3,-0.5,-1\n"
    (part,) = _read(tmp_path, text, event_columns=("price",), weight="w").parts
    assert [(row.line, row.reason) for row in read_part(part).bad] == [(3, "w is a negative weight")]


def test_a_column_with_a_fill_that_json_lines_never_have_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "day=1"
    folder.mkdir()
    late = '{"user": 1, "item": 2, "time": 3}\n' * 5000 + '{"user": 1, "item": 2, "time": 3, "price": 7}\n'
    (folder / "a.jsonl").write_text(late)
    (folder / "b.jsonl").write_text('{"user": 1, "item": 2, "time": 3}\n')
    good = _config(tmp_path, event_columns=("price=0", "day:int=0"))
    prices = [read_part(part).good["price"].sum() for part in read_tabular(good, AUTO, {}).parts]
    assert prices == [7, 0]
    with pytest.raises(
        DataError, match=r"b\.jsonl has no column 'prize' \(--event-columns\) in any row; check its name$"
    ):
        read_tabular(_config(tmp_path, event_columns=("prize=0",)), AUTO, {})


def test_an_action_can_be_a_float_of_the_event(tmp_path: Path) -> None:
    text = "user,item,time,rating\n1,2,3,4.7\n1,2,3,\n"
    interactions = _read(tmp_path, text, action_columns=("rating",), action_map="float")
    assert (interactions.num_actions, _further_events(interactions)) == (1, {"rating": "float32"})
    events = read_part(interactions.parts[0])
    assert events.good.select("action", "rating").rows() == [(0, pytest.approx(4.7))]
    assert len(events.bad) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action_map": "stars"}, "action_map='stars' applies to action_columns=COLUMN, not to action_columns=()"),
        ({"action_map": "halves", "action_columns": ("a",)}, "invalid action_map 'halves'; expected stars, half-stars"),
        ({"action_map": "bins:2,1", "action_columns": ("a",)}, "invalid action_map 'bins:2,1'"),
        ({"action_map": "bins:", "action_columns": ("a",)}, "invalid action_map 'bins:'"),
        ({"action_map": "values:a,a", "action_columns": ("a",)}, "invalid action_map 'values:a,a'"),
        (
            {"event_columns": ("price:text",)},
            "column 'price:text' must be NAME or NAME:TYPE, with a type of int, float",
        ),
        (
            {"event_columns": ("price=16777216",)},
            "column 'price=16777216' has the fill '16777216', no float below 2",
        ),
        ({"event_columns": ("price=x",)}, "column 'price=x' has the fill 'x', no float"),
        (
            {"event_columns": ("n:int?",)},
            "column 'n:int[?]' has no integer that stands for .*; declare n:float[?], or n:int=FILL or n:int=drop",
        ),
        (
            {"event_columns": ("n:float?=0",)},
            "'n:float[?]=0' has missing values and something in their place; give one",
        ),
        ({"label": "n:float?=drop"}, "'n:float[?]=drop' has missing values and something in their place; give one"),
        ({"weight": "w:float?"}, "weight must be .* without missing values: give =FILL or =drop, got 'w:float[?]'"),
        ({"weight": "w:int?"}, "weight must be .* without missing values: give =FILL or =drop, got 'w:int[?]'"),
        ({"event_columns": ("item",)}, "column 'item' is given twice"),
        ({"event_columns": ("action",)}, "'action'"),
        ({"timestamp_unit": "row"}, "give either timestamp_column or timestamp_unit 'row'"),
        ({"timestamp_column": ""}, "give either timestamp_column or timestamp_unit 'row'"),
    ],
)
def test_invalid_columns_of_events_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        dataclasses.replace(_config(Path("log.csv")), **options)
    assert "\n" not in str(caught.value)


def test_many_small_files_cost_little_more_than_to_read_them(tmp_path: Path) -> None:
    def num_calls(num_files: int) -> int:
        folder, calls = tmp_path / str(num_files), 0
        folder.mkdir()
        for number in range(num_files):
            (folder / f"{number}.csv").write_text("user,item,time\n1,2,3\n")

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)  # of this thread
        try:
            for part in read_tabular(_config(folder), AUTO, {}).parts:
                read_part(part)
        finally:
            sys.setprofile(None)
        return calls

    num_calls(1)  # so that all is imported and compiled
    assert (num_calls(30) - num_calls(10)) / 20 < 9_000
