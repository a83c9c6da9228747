"""The rule of ids, the same in all formats and columns: which are equal, which are missing, which are no ids."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from evenrank.preprocess.read.log import read_tabular
from tests.preprocess.decoded import decode, read_rows
from tests.preprocess.read.parts import read_part

BEGIN = 1_700_000_000
# The id of each text; two texts are equal ids if and only if they have the same one.
IDS = {
    "7": ["7", "7.0", " 7", "7\u00a0", "7.", "7.000", "7.0E0"],
    "12345678": ["12345678", "1.2345678E7", "1.2345678e7"],
    "-3": ["-3", "-3.0"],
    "4873214862074862123": ["4873214862074862123"],
    **{text: [text] for text in ("007", "+7", "-0", "7.5", "007.0", "4e18", "1e3", "0x7")},
    "ann": ["ann", " ann", "ann  "],
    "Ann": ["Ann"],
    "null ann": ["null ann"],
}
MISSING = ["", " ", r"\N", "nan", "NaN", " NaN", "None", "NULL", "null", "<NA>", "N/A", "#N/A"]
ROUNDED = ["4.873214862074862e+18", "4.873214862074862E18", "9007199254740993.0", "-9007199254740992.0", "1e+18"]
ROUNDED += ["4.87E+12", "1.0E300", "1e+400"]
WRITERS: dict[str, Callable[[pl.DataFrame, Path], Any]] = {
    "csv": pl.DataFrame.write_csv,
    "jsonl": pl.DataFrame.write_ndjson,
    "parquet": pl.DataFrame.write_parquet,
    "categorical.parquet": lambda frame, path: frame.cast({pl.String: pl.Categorical}).write_parquet(path),
}


def log_of(*paths: Path, **options: Any) -> TabularConfig:
    columns: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    return TabularConfig(events=paths, **columns, **options)


def read_users(*paths: Path, **known: Any) -> tuple[list[Any], list[tuple[str, str]]]:
    """Return the users of all events, and text and reason of the rows that are bad."""
    parts = read_tabular(log_of(*paths), {"user_id": "auto", "item_id": "auto"}, known).parts
    events = [read_part(part) for part in parts]
    bad = [(row.text, row.reason) for of_part in events for row in of_part.bad]
    return [user for of_part in events for user in of_part.good["user_id"]], bad


def write(path: Path, users: Sequence[str | None]) -> Path:
    frame = pl.DataFrame({"user": users, "item": 1, "time": range(BEGIN, BEGIN + len(users))})
    WRITERS[path.name.partition(".")[2]](frame, path)
    return path


@pytest.mark.parametrize("suffix", WRITERS)
def test_equal_ids_have_one_text_in_every_format(tmp_path: Path, suffix: str) -> None:
    texts = {text: id for id, of_id in IDS.items() for text in of_id}
    users, bad = read_users(write(tmp_path / f"log.{suffix}", [*texts]))
    assert dict(zip(texts, users, strict=True)) == texts
    assert not bad
    integers = [text for text in texts if texts[text].lstrip("-").isdigit() and texts[text] not in ("007", "-0")]
    users, _ = read_users(write(tmp_path / f"integers.{suffix}", integers))
    assert [*map(str, users)] == [texts[text] for text in integers]
    assert {*map(type, users)} == {str if suffix.endswith("parquet") else int}  # Parquet's texts are texts


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("others", [["5", "-6"], ["5", "b7"]], ids=["integers", "texts"])
def test_missing_and_rounded_ids_are_bad_rows_in_every_format(tmp_path: Path, suffix: str, others: list[str]) -> None:
    users, bad = read_users(write(tmp_path / f"log.{suffix}", [*others, *MISSING, None, *ROUNDED]))
    assert [*map(str, users)] == others
    rounded = "user may have been rounded by a float; write integers"
    assert [reason for _, reason in bad] == ["user is missing"] * (len(MISSING) + 1) + [rounded] * len(ROUNDED)


@pytest.mark.parametrize("suffix", WRITERS)
def test_na_is_missing_among_integers_and_a_text_among_texts(tmp_path: Path, suffix: str) -> None:
    users, bad = read_users(write(tmp_path / f"log.{suffix}", ["DE", "NA", "1"]))
    assert (users, bad) == (["DE", "NA", "1"], [])
    if not suffix.endswith("parquet"):
        users, bad = read_users(write(tmp_path / f"log.{suffix}", ["2", "NA", "1"]))
        assert (users, [reason for _, reason in bad]) == ([2, 1], ["user is missing"])


@pytest.mark.parametrize("known", [{}, {"user_id": "text"}], ids=["integers", "texts"])
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        *(
            ("7", "7"),
            ("7.0", "7"),
            ("7e0", "7"),
            ("1.2345678E7", "12345678"),
            ("9007199254740991.0", "9007199254740991"),
        ),
        *((str(2**63 - 1), str(2**63 - 1)), ("-7.00", "-7"), ("90071992547409.91e2", "9007199254740991")),
        *((text, "rounded") for text in ("9007199254740993.0", "9.007199254740993e15", "4.5e18", "1e19", "-1e+19")),
        *(("90071992547409.93e2", "rounded"), ("1e400", "rounded"), ("NaN", "missing"), ("null", "missing")),
    ],
)
def test_numbers_of_json_are_ids_by_the_same_rule(tmp_path: Path, number: str, expected: str, known: Any) -> None:
    path = tmp_path / "log.jsonl"
    rows = [f'{{"user": {user}, "note": "x, {number}", "item": 1, "time": {BEGIN}}}\n' for user in (5, number)]
    path.write_text("".join(rows))
    users, bad = read_users(path, **known)
    assert [*map(str, users)] == ["5", expected][: 2 - len(bad)]
    assert all(expected in reason for _, reason in bad)


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "-Infinity", "1e400", '[NaN, {"a": 1e999}]'])
def test_numbers_that_json_lacks_do_not_affect_fields_that_are_used(tmp_path: Path, odd: str) -> None:
    texts = ['"NaN, 1"', '"\\\\"', '"a\\"b, Infinity"', "7"]
    rows = [f'{{"x": {odd}, "user": {user}, "item": 1, "time": {BEGIN}, "y":{odd}}}\n' for user in texts]
    (tmp_path / "log.jsonl").write_text("".join(rows))
    users, bad = read_users(tmp_path / "log.jsonl", user_id="text")
    assert (users, bad) == ([str(json.loads(text)) for text in texts], [])
    for malformed in (f'{{{odd}: 1, "user": 1}}', f'{{"x": {odd} {odd}, "user": 1}}', f'{{"x": 0{odd}, "user": 1}}'):
        (tmp_path / "log.jsonl").write_text(rows[-1] + malformed + "\n")
        assert [text for text, _ in read_users(tmp_path / "log.jsonl")[1]] == [malformed]


def test_users_are_the_same_in_logs_features_lists_and_vocabularies(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", ["7", "ann", "8"])
    write(tmp_path / "b.csv", ["7.0", " ann", "8"])
    pl.DataFrame({"user": [7.0, 8.0], "item": 1, "time": BEGIN}).write_parquet(tmp_path / "c.parquet")
    (tmp_path / "users.csv").write_text("user,city\n7.0,Bonn\n ann ,Ulm\n7,Bonn\n")
    (tmp_path / "eval.txt").write_text(" 7.0\nann  \nann\n")
    context: dict[str, Any] = {"context": tmp_path / "users.csv", "context_columns": ("city",)}
    for day in (1, 2):
        log = log_of(*(tmp_path / name for name in ("a.csv", "b.csv", "c.parquet")), **context)
        out, earlier = tmp_path / f"out{day}", None if day == 1 else tmp_path / "out1"
        split = f"file:{tmp_path / 'eval.txt'}"
        manifest = preprocess(PreprocessConfig(dataset="custom", out=out, custom=log, split=split, vocabulary=earlier))
        assert (manifest.ids["user_id"].distinct, manifest.ids["user_id"].unknown_values) == (3, 0)
        rows = {name: decode(out, read_rows(out / name)) for name in ("train", "eval")}
        assert [(row["user_id"], row["city"], row["length"]) for row in rows["train"]] == [("8", 0, 3)]
        assert sorted((row["user_id"], row["city"], row["length"]) for row in rows["eval"]) == [
            ("7", 1, 3),
            ("ann", 2, 2),
        ]
