"""Small hand-made logs of every kind, with every output value checked."""

import gzip
import random
import re
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.preprocess.sources.interactions import IS_GOOD, BadRow, Interactions
from evenrank.preprocess.sources.tabular import read_tabular
from evenrank.preprocess.sources.tabular_config import TabularConfig, read_toml
from evenrank.preprocess.sources.vocabulary import write_vocabularies

HEADER = "time,user,note,item\n"
EVENTS = HEADER + '100,7,"a ""b"", c",30\n200.0015,-3,,10\n'


def _write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def _config(*events: Path, **options: object) -> TabularConfig:
    columns = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    return TabularConfig(events=events, **{**columns, **options})  # type: ignore[arg-type]


def _read(folder: Path, text: str | bytes, name: str = "log.csv", **options: object) -> Interactions:
    return read_tabular(_config(_write(folder / name, text), **options))


def _rows(read: Interactions) -> list[tuple[int, ...]]:
    """The good rows: user, item, action, time."""
    return [row for part in _collected(read) for row in part.filter(IS_GOOD).drop(IS_GOOD).rows()]


def _collected(interactions: Interactions) -> list[pl.DataFrame]:
    parts = [part.events.collect() for part in interactions.parts]
    for events in parts:
        assert dict(events.schema) == {
            "user_id": pl.Int64,
            "item_id": pl.Int64,
            "action": pl.Int32,
            "timestamp_ms": pl.Int64,
            IS_GOOD: pl.Boolean,
        }
    return parts


def _bad(read: Interactions) -> list[tuple[int, str]]:
    """Lines and reasons of the bad rows of the one file; as many as are marked."""
    (part,), (events,) = read.parts, _collected(read)
    found = part.find_bad(1000)
    assert len(found) == (~events.get_column(IS_GOOD)).sum()
    assert list(part.find_bad(1)) == list(found[:1])
    return [(row.line, row.reason) for row in found]


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
def test_columns_are_found_by_name_in_each_kind_of_text(tmp_path: Path, name: str, content: str | bytes) -> None:
    read = _read(tmp_path, content, name)
    assert _rows(read) == [(7, 30, 0, 100_000), (-3, 10, 0, 200_001)]
    assert _bad(read) == []
    assert read.vocabularies == {}
    assert read.num_actions == 1
    assert read.context is None
    (source,) = read.sources()
    assert (source.path, source.bytes) == (name, (tmp_path / name).stat().st_size)
    assert read.options == {
        "events": [name],
        "user_column": "user",
        "item_column": "item",
        "timestamp_column": "time",
        "timestamp_unit": "s",
        "action_columns": [],
        "context": None,
        "context_columns": [],
    }


def test_parquet_with_numbers_of_several_types(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "item": pl.Series([30, 10, 2**63], dtype=pl.UInt64),
            "user": [7.0, 8.5, 9.0],
            "time": [1_700_000_000.123, 1.0, 2.0],
            "other": [[1], [2], []],
        }
    )
    frame.write_parquet(tmp_path / "log.parquet")
    read = read_tabular(_config(tmp_path / "log.parquet"))
    assert _rows(read) == [(7, 30, 0, 1_700_000_000_123)]
    assert _bad(read) == [(2, "user is not a 64-bit whole number"), (3, "item is not a 64-bit whole number")]
    assert read.parts[0].find_bad(1) == [BadRow(line=2, text="8.5,10,1.0", reason=_bad(read)[0][1])]
    assert read.parts[0].size == max((tmp_path / "log.parquet").stat().st_size, 3 * 28)


def test_parquet_with_its_own_times(tmp_path: Path) -> None:
    moment = datetime(2024, 1, 1, 12, 0, 0, 1999)
    base = pl.DataFrame({"user": [1], "item": [2], "time": [moment]})
    berlin = base.with_columns(pl.col("time").dt.replace_time_zone("Europe/Berlin"))
    day = base.with_columns(pl.col("time").dt.date())
    early = base.with_columns(time=datetime(1969, 12, 31, 23, 59, 59, 999_999))
    noon = 1_704_110_400_000
    for frame, expected in ((base, noon + 1), (berlin, noon + 1 - 3_600_000), (day, noon - 43_200_000)):
        frame.write_parquet(tmp_path / "log.parquet")
        assert _rows(read_tabular(_config(tmp_path / "log.parquet"))) == [(1, 2, 0, expected)]
    early.write_parquet(tmp_path / "log.parquet")
    assert _rows(read_tabular(_config(tmp_path / "log.parquet", timestamp_unit="iso"))) == []


def test_several_files_share_one_vocabulary(tmp_path: Path) -> None:
    first = _write(tmp_path / "a.csv", "user,item,time\nzoë,5,3\nb,6,2\n")
    pl.DataFrame({"time": [1, 4], "user": [12, 7], "item": [5, 9]}).write_parquet(tmp_path / "b.parquet")
    read = read_tabular(_config(first, tmp_path / "b.parquet"))
    # Sorted: "12", "7", "b", "zoë".
    assert _rows(read) == [(4, 5, 0, 3000), (3, 6, 0, 2000), (1, 5, 0, 1000), (2, 9, 0, 4000)]
    assert [part.name for part in read.parts] == [str(first), str(tmp_path / "b.parquet")]
    write_vocabularies(read.vocabularies, tmp_path)
    assert [path.name for path in tmp_path.glob("vocabulary_*")] == ["vocabulary_user_id.parquet"]
    written = pl.read_parquet(tmp_path / "vocabulary_user_id.parquet")
    assert dict(written.schema) == {"id": pl.Int64, "value": pl.String}
    assert written.rows() == [(1, "12"), (2, "7"), (3, "b"), (4, "zoë")]


@pytest.mark.parametrize("value", ["007", "1e3", "1.0", " 5", "9223372036854775808", "a", "0x1"])
def test_one_value_that_is_no_plain_number_makes_a_column_of_strings(tmp_path: Path, value: str) -> None:
    lines = [f"1,{item},0\n" for item in (10, 9)]
    read = _read(tmp_path, "user,item,time\n" + "".join(lines) * 1000 + f"1,{value},0\n")
    ordered = sorted(["10", "9", value])
    assert read.vocabularies["item_id"].rows() == list(enumerate(ordered, start=1))
    assert _rows(read) == [(1, ordered.index(item) + 1, 0, 0) for item in ["10", "9"] * 1000 + [value]]
    assert list(read.vocabularies) == ["item_id"]


def test_the_largest_and_smallest_numbers_stay_numbers(tmp_path: Path) -> None:
    low, high = -(2**63), 2**63 - 1
    read = _read(tmp_path, f"user,item,time\n{low},+{high},0\n-0,0,0\n")
    assert _rows(read) == [(low, high, 0, 0), (0, 0, 0, 0)]
    assert read.vocabularies == {}


def test_rows_that_are_bad_otherwise_decide_nothing_about_ids(tmp_path: Path) -> None:
    read = _read(tmp_path, "user,item,time\n1,2,3\nuser,item,time\n4,5,6\n")
    assert _rows(read) == [(1, 2, 0, 3000), (4, 5, 0, 6000)]
    assert _bad(read) == [(3, "time is not a time in seconds since 1970, up to the year 9999")]


@pytest.mark.parametrize(
    ("unit", "text", "expected"),
    [
        ("s", "1.001", 1001),
        ("s", "1.9999999", 1999),
        ("s", "253402300799.9999", 253_402_300_799_999),
        ("ms", "1700000000123", 1_700_000_000_123),
        ("us", "1999", 1),
        ("iso", "1970-01-02", 86_400_000),
        ("iso", "1970-01-01T00:01", 60_000),
        ("iso", "1970-01-01 00:00:01.5", 1500),
        ("iso", "2024-02-29T12:00:00.1239Z", 1_709_208_000_123),
        ("iso", "2024-02-29T12:00:00+02:30", 1_709_199_000_000),
        ("iso", "2024-02-29T12:00:00-0100", 1_709_211_600_000),
        ("iso", "9999-12-31T23:59:59.999", 253_402_300_799_999),
    ],
)
def test_times(tmp_path: Path, unit: str, text: str, expected: int) -> None:
    assert _rows(_read(tmp_path, f"user,item,time\n1,2,{text}\n", timestamp_unit=unit)) == [(1, 2, 0, expected)]


def test_the_times_above_are_those_of_the_standard_library() -> None:
    assert datetime(2024, 2, 29, 12, tzinfo=UTC).timestamp() == 1_709_208_000


@pytest.mark.parametrize(
    ("unit", "kind", "texts"),
    [
        ("s", "in seconds since 1970", ["", "x", "-0.001", "253402300800", "9" * 40, "nan", "inf"]),
        ("ms", "in whole ms since 1970", ["", "1.5", "-1", "253402300800000", str(2**63)]),
        ("us", "in whole us since 1970", ["", "1.5", "-1", "253402300800000000"]),
        (
            "iso",
            "in ISO 8601",
            [
                "",
                "0",
                "2023-02-29",
                "2024-01-01T24:01",
                "2024-01-01T00:00:60",
                "1969-12-31T23:59:59.999",
                "1970-01-01T00:00:00+00:01",
                "2024-01-01 and more",
            ],
        ),
    ],
)
def test_times_that_cannot_be_read(tmp_path: Path, unit: str, kind: str, texts: list[str]) -> None:
    read = _read(tmp_path, "user,time,item\n" + "".join(f"1,{text},2\n" for text in texts), timestamp_unit=unit)
    reason = f"time is not a time {kind}, up to the year 9999"
    assert _bad(read) == [(line, reason) for line in range(2, len(texts) + 2)]


def test_rows_whose_ids_or_fields_cannot_be_read(tmp_path: Path) -> None:
    lines = [
        "1,2,3,x",
        ",2,3,x",
        "1,,3,x",
        '"",2,3,x',
        "1,-2,3,x",
        "1,2",
        "",
        "1,2,3,x,5",
        "1,2,3",
        "1,2,3,x,",
        "4,5,6,",
    ]
    read = _read(tmp_path, "user,item,time,note\n" + "\n".join(lines) + "\n")
    assert _bad(read) == [
        (3, "user is empty"),
        (4, "item is empty"),
        (5, "user is empty"),
        (6, "item must not be negative"),
        (7, "2 fields where 4 are expected"),
        (8, "the line is empty"),
        (9, "5 fields where 4 are expected"),
    ]
    assert _rows(read) == [(1, 2, 0, 3000)] * 3 + [(4, 5, 0, 6000)]
    assert [row.text for row in read.parts[0].find_bad(3)] == [",2,3,x", "1,,3,x", '"",2,3,x']


def test_broken_quotes_spoil_their_own_line_alone(tmp_path: Path) -> None:
    lines = ['"a,b",1,1', '"open,2,2', '"x"y,3,3', '5" disk,4,4', '"say ""no""",5,5', ",6,6", "last,7,7"]
    read = _read(tmp_path, "user,item,time\n" + "\n".join(lines) + "\n")
    reason = "a quoted field does not end where its line or a separator is; Parquet can hold any text"
    assert _bad(read) == [(3, reason), (4, reason), (7, "user is empty")]
    users = ['5" disk', "a,b", "last", 'say "no"']
    assert read.vocabularies["user_id"].get_column("value").to_list() == users
    assert _rows(read) == [(2, 1, 0, 1000), (1, 4, 0, 4000), (4, 5, 0, 5000), (3, 7, 0, 7000)]


def test_first_lines_with_many_fields_too_many(tmp_path: Path) -> None:
    read = _read(tmp_path, "user,item,time\n1,2,3,4,5,6\n1,2\x013,3\n1,2,3\n")
    assert _bad(read) == [(2, "6 fields where 3 are expected")]
    assert read.vocabularies["item_id"].rows() == [(1, "2"), (2, "2\x013")]
    assert _rows(read) == [(1, 2, 0, 3000), (1, 1, 0, 3000)]


def test_rows_are_marked_bad_just_where_bad_rows_are_found(tmp_path: Path) -> None:
    rng = random.Random(7)
    tokens = ["1", "1", "a", '"', '""', ",", ",", ",", "\n", "\n", "1,2,3\n", '"1","2",3\n', " ", "\r", "é"]
    for _ in range(200):
        text = "user,item,time\n" + "".join(rng.choices(tokens, k=rng.randrange(1, 30)))
        if text.count("\n") > 1:
            _bad(_read(tmp_path, text))


def test_text_that_is_not_utf8_is_no_id(tmp_path: Path) -> None:
    read = _read(tmp_path, b"user,item,time,note\na,1,1,\xff\n\xff,1,1,\n")
    assert _bad(read) == [(3, "user is not UTF-8")]
    assert read.vocabularies["user_id"].rows() == [(1, "a")]
    assert _rows(read) == [(1, 1, 0, 1000)]


def test_one_action_column_is_the_action(tmp_path: Path) -> None:
    values = ["0", "2147483647", "2147483648", "-1", "", "x", "1.5"]
    lines = "".join(f"1,2,3,{value}\n" for value in values)
    read = _read(tmp_path, "user,item,time,kind\n" + lines, action_columns=("kind",))
    assert _rows(read) == [(1, 2, 0, 3000), (1, 2, 2_147_483_647, 3000)]
    assert _bad(read) == [(line, "kind is not a whole number of 0..2147483647") for line in range(4, 9)]
    assert read.num_actions is None


def test_several_action_columns_are_bits(tmp_path: Path) -> None:
    text = "click,user,item,time,like,share\n1,1,2,3,0,true\nFalse,1,2,3,1,0\n0,1,2,3,2,0\n0,1,2,3,,0\n"
    read = _read(tmp_path, text, action_columns=("like", "click", "share"))
    assert _rows(read) == [(1, 2, 2 + 4, 3000), (1, 2, 1, 3000)]
    assert _bad(read) == [(4, "like is not 0 or 1"), (5, "like is not 0 or 1")]
    assert read.num_actions == 8


def test_action_columns_of_other_types(tmp_path: Path) -> None:
    ONE.with_columns(kind=datetime(2024, 1, 1)).write_parquet(tmp_path / "log.parquet")
    with pytest.raises(
        DataError, match=r"log\.parquet: column 'kind' is of type Datetime.*, which holds no whole numbers"
    ):
        read_tabular(_config(tmp_path / "log.parquet", action_columns=("kind",)))


def test_31_columns_of_bits_fill_an_int32(tmp_path: Path) -> None:
    names = [f"bit{index}" for index in range(31)]
    frame = pl.DataFrame({"user": [1], "item": [2], "time": [3], **{name: [True] for name in names}})
    frame.write_parquet(tmp_path / "log.parquet")
    read = read_tabular(_config(tmp_path / "log.parquet", action_columns=tuple(names)))
    assert _rows(read) == [(1, 2, 2**31 - 1, 3000)]
    assert read.num_actions == 2**31


def test_context_of_users_with_strings_for_ids(tmp_path: Path) -> None:
    context = _write(
        tmp_path / "users.csv", 'age,user,city,x\n9,b,"Bonn, am Rhein",\n10,a,,\n,c,Aachen,\n8,nobody,Ulm,\n'
    )
    options = {"context": context, "context_columns": ("city", "age")}
    read = _read(tmp_path, "user,item,time\nc,1,1\na,1,1\nb,1,1\nd,1,1\n", **options)
    found = read.context
    assert found is not None
    assert found.features.columns == ["user_id", "city", "age"]
    assert found.features.dtypes == [pl.Int64] * 3
    assert found.features.rows() == [(2, 2, 1), (1, 0, 2), (3, 1, 0)]
    # Ages are sorted as numbers.
    assert found.labels == {"city": (None, "Aachen", "Bonn, am Rhein"), "age": (None, "9", "10")}
    assert [source.path for source in read.sources()] == ["log.csv", "users.csv"]
    assert read.options["context"] == "users.csv"
    assert read.options["context_columns"] == ["city", "age"]


def test_context_in_parquet_of_users_with_numbers_for_ids(tmp_path: Path) -> None:
    users = pl.DataFrame({"user": ["7", "007", "8", "9", "1"], "age": [3.0, 4.0, None, float("nan"), 1.0]})
    users.write_parquet(tmp_path / "users.parquet")
    options = {"context": tmp_path / "users.parquet", "context_columns": ("age",)}
    found = _read(tmp_path, "user,item,time\n7,1,1\n8,1,1\n9,1,1\n", **options).context
    assert found is not None
    assert found.features.rows() == [(7, 1), (8, 0), (9, 0)]
    assert found.labels == {"age": (None, "3.0")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user,age\n1,2\n3,4\n1,5\n", "users.csv: user 1 appears twice; keep one row per user"),
        ("user,age\n1,2\n,4\n", "users.csv, line 3 (',4'): user is empty or no id; mend or remove the line"),
        ("user,age\n1\n", "users.csv, line 2 ('1'): 1 fields where 2 are expected; mend or remove the line"),
        ("user,aged\n1,1\n", "users.csv has no column 'age'; there are user, aged"),
    ],
)
def test_bad_context(tmp_path: Path, text: str, message: str) -> None:
    context = _write(tmp_path / "users.csv", text)
    with pytest.raises(DataError, match=re.escape(message)):
        _read(tmp_path, EVENTS, context=context, context_columns=("age",))


def _parquet_bytes(folder: Path, frame: pl.DataFrame) -> bytes:
    frame.write_parquet(folder / "made.parquet")
    return (folder / "made.parquet").read_bytes()


ONE = pl.DataFrame({"user": [1], "item": [2], "time": [3]})
MANY_LINES = (HEADER + "".join(f"{line * 7919 % 1001},{line},,{line}\n" for line in range(50_000))).encode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.csv", "time,user,thing\n1,2,3\n", "has no column 'item'; there are time, user, thing"),
        ("log.csv", "user,item,time,item\n1,2,3,4\n", "has 2 columns 'item'; rename all but one"),
        ("log.csv", "", "is empty; make it again"),
        ("log.csv", HEADER, "holds no row; make it again, or leave it out"),
        ("log.csv", '"user,item,time\n1,2,3\n', "the line of column names cannot be read"),
        ("log.xlsx", EVENTS, "known by its suffix; there are .csv, .csv.gz, .tsv, .parquet"),
        ("log.csv.gz", EVENTS, "cannot be read: Not a gzipped file"),
        ("log.csv.gz", gzip.compress(MANY_LINES)[:-50], "cannot be read: unexpected end of file; is it whole?"),
        ("log.csv.gz", gzip.compress(MANY_LINES)[:20], "cannot be read: "),
        ("log.parquet", ONE, "has no column"),
        ("log.parquet", ONE.clear(), "holds no row"),
        ("log.parquet", EVENTS, "cannot be read: parquet: File out of specification"),
        (
            "log.parquet",
            ONE.with_columns(user=pl.concat_list("user")),
            "'user' is of type List(Int64), which holds no ids",
        ),
        ("log.parquet", ONE.with_columns(time=True), "'time' is of type Boolean, which holds no times"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str | bytes | pl.DataFrame, message: str) -> None:
    if isinstance(content, pl.DataFrame):
        frame = content.rename({"item": "thing"}) if message == "has no column" else content
        content = _parquet_bytes(tmp_path, frame)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        _read(tmp_path, content, name)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_truncated_parquet(tmp_path: Path) -> None:
    content = _parquet_bytes(tmp_path, ONE)
    with pytest.raises(DataError, match=r"log\.parquet cannot be read: .*; is it whole\?"):
        _read(tmp_path, content[:-10], "log.parquet")


def test_parquet_with_damaged_pages(tmp_path: Path) -> None:
    ids = [f"id {number}" for number in range(10_000)]
    content = _parquet_bytes(tmp_path, pl.DataFrame({"user": ids, "item": ids, "time": range(10_000)}))
    with pytest.raises(DataError, match=r"log\.parquet cannot be read: .*; is it whole\?"):
        _read(tmp_path, content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :], "log.parquet")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"log\.csv is not there"):
        read_tabular(_config(tmp_path / "log.csv"))


def test_numbers_are_no_iso_times(tmp_path: Path) -> None:
    ONE.write_parquet(tmp_path / "log.parquet")
    with pytest.raises(DataError, match="'time' is of type Int64, not text"):
        read_tabular(_config(tmp_path / "log.parquet", timestamp_unit="iso"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"events": ()}, "events names no file"),
        ({"timestamp_unit": "h"}, "timestamp_unit must be one of s, ms, us, iso, got 'h'"),
        ({"action_columns": tuple(map(str, range(32)))}, "at most 31 columns, got 32"),
        ({"context": Path("users.csv")}, "context and context_columns go together"),
        ({"context_columns": ("age",)}, "context and context_columns go together"),
        ({"item_column": "user"}, "column 'user' is named twice"),
        ({"context": Path("u.csv"), "context_columns": ("a", "a")}, "column 'a' is named twice"),
        ({"context": Path("u.csv"), "context_columns": ("length",)}, "context column 'length' cannot be a column"),
        ({"context": Path("u.csv"), "context_columns": ("a/b",)}, "context column 'a/b' cannot be a column"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    columns = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    with pytest.raises(ConfigError, match=message):
        TabularConfig(**{"events": (Path("log.csv"),), **columns, **options})  # type: ignore[arg-type]


TOML = 'user_column = "user"\nitem_column = "item"\ntimestamp_column = "time"\n'


def test_toml(tmp_path: Path) -> None:
    text = 'events = ["a.csv", "/b.csv"]\ntimestamp_unit = "ms"\naction_columns = ["x", "y"]\n'
    path = _write(tmp_path / "log.toml", TOML + text + 'context = "users.csv"\ncontext_columns = "age"\n')
    assert read_toml(path) == TabularConfig(
        events=(tmp_path / "a.csv", Path("/b.csv")),
        user_column="user",
        item_column="item",
        timestamp_column="time",
        timestamp_unit="ms",
        action_columns=("x", "y"),
        context=tmp_path / "users.csv",
        context_columns=("age",),
    )


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('events = "a.csv"\nuser = "u"\n' + TOML, ConfigError, "unknown key 'user'; known are events, user_column, "),
        (TOML, ConfigError, "log.toml lacks events; add it"),
        ("events = 3\n" + TOML, ConfigError, "events must be a string or a list of strings, got 3"),
        ('events = ["a.csv", 3]\n' + TOML, ConfigError, "events must be a string or a list of strings, got"),
        ('events = "a.csv"\ncontext = ["b"]\n' + TOML, ConfigError, "context must be a string, got ['b']"),
        ("events = \n", DataError, "log.toml is not valid TOML"),
    ],
)
def test_bad_toml(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        read_toml(_write(tmp_path / "log.toml", text))


def test_missing_toml(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"log\.toml cannot be read: No such file"):
        read_toml(tmp_path / "log.toml")
