"""Rows that cannot be read: counted by the kind of reason, three of each shown, and all of them in rejects.csv."""

import csv
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from evenrank.preprocess.read import text as text_files

TIME = "time is not a time in seconds since 1970 up to the year 9999"
BEGIN = 1_700_000_000
BAD = {"a": "1,2,x", "b": '1,2,"y, ""z"""', "c": "1,2", "d": "1,2,,4", "e": "", "f": "1,2,-5", "g": "1,2,\r\x00"}
REASONS = {
    **dict.fromkeys("abf", TIME),
    "c": "expected 3 fields, got 2",
    "d": "expected 3 fields, got 4",
    "e": "the line is empty",
    "g": "the line contains a NUL byte; the file is damaged there",
}


def write_log(folder: Path, name: str, *, first_item: int = 0) -> list[tuple[str, str, str, str]]:
    """Write a log with bad rows among good ones; return those as rows of rejects.csv."""
    lines = [f"{user},{item + first_item},{BEGIN + first_item + user}" for user in range(40) for item in range(3)]
    for place, text in zip(range(5, 99, 13), BAD.values(), strict=False):
        lines.insert(place, text)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(["user,item,time", *lines]), newline="")
    letters = {text: letter for letter, text in BAD.items()}
    numbered = enumerate(lines, 2)
    return [(name, str(line), REASONS[letters[text]], text) for line, text in numbered if text in letters]


def make(out: Path, *logs: Path, **options: Any) -> dict[str, int]:
    columns: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    given: dict[str, Any] = {"on_error": "skip", "rejects": True, "split": "none", "ids": "dense", **options}
    config = PreprocessConfig(dataset="custom", out=out, custom=TabularConfig(events=logs, **columns), **given)
    return dict(preprocess(config).options["audit"])


def rejects(folder: Path) -> list[tuple[str, ...]]:
    with (folder / "rejects.csv").open(newline="") as file:
        return [tuple(row) for row in csv.reader(file, strict=True)]


HEADER = ("file", "line", "reason", "text")


def test_bad_rows_are_counted_and_shown_by_kind_of_reason(tmp_path: Path) -> None:
    lines = ["1,2,x"] * 4 + ["1,2"] + ["1,2,3,4"] * 3 + [f"1,2,{BEGIN}"]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,time", *lines]))
    with pytest.raises(DataError) as caught:
        make(tmp_path / "out", tmp_path / "log.csv", on_error="fail", rejects=False)
    times = "; ".join(f"line {line} ('1,2,x'): {TIME}" for line in (2, 3, 4))
    ragged = ["line 6 ('1,2'): expected 3 fields, got 2"]
    ragged += [f"line {line} ('1,2,3,4'): expected 3 fields, got 4" for line in (7, 8)]
    message = f"8 bad rows, first {times} (4 such rows); {'; '.join(ragged)} (4 such rows); fix them, or skip them with"
    assert message in str(caught.value)
    audit = make(tmp_path / "out", tmp_path / "log.csv", rejects=False)
    assert not (tmp_path / "out" / "rejects.csv").exists()
    skipped = {what: count for what, count in audit.items() if "bad row" in what}
    assert skipped == {
        f"log.csv: 4 bad rows, first {times}; all skipped": 4,
        f"log.csv: 4 bad rows, first {'; '.join(ragged)}; all skipped": 4,
    }


def test_all_bad_rows_are_written_the_same_in_any_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [HEADER, *write_log(tmp_path / "logs", "a.csv"), *write_log(tmp_path / "logs", "b.csv")]
    make(tmp_path / "out", tmp_path / "logs")
    assert rejects(tmp_path / "out") == expected
    content = (tmp_path / "out" / "rejects.csv").read_bytes()
    monkeypatch.setattr(text_files, "_PIECE_BYTES", 100)
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 40)
    make(tmp_path / "out", tmp_path / "logs")  # which replaces the dataset with the file
    assert (tmp_path / "out" / "rejects.csv").read_bytes() == content
    make(tmp_path / "out", tmp_path / "logs", rejects=False)
    assert not (tmp_path / "out" / "rejects.csv").exists()


def test_the_file_of_an_appended_dataset_is_that_of_both_logs_at_once(tmp_path: Path) -> None:
    write_log(tmp_path, "a.csv")
    write_log(tmp_path, "b.csv", first_item=100)
    make(tmp_path / "once", tmp_path / "a.csv", tmp_path / "b.csv")
    make(tmp_path / "out", tmp_path / "a.csv")
    make(tmp_path / "out", tmp_path / "b.csv", append=True)
    assert (tmp_path / "out" / "rejects.csv").read_bytes() == (tmp_path / "once" / "rejects.csv").read_bytes()


def test_bad_rows_of_parquet_are_written_as_text(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": ["a", 'b\n"', None], "item": 1, "time": [BEGIN, -1, BEGIN]})
    frame.write_parquet(tmp_path / "log.parquet")
    make(tmp_path / "out", tmp_path / "log.parquet")
    assert rejects(tmp_path / "out") == [
        HEADER,
        ("log.parquet", "2", TIME, 'b\n",1,-1'),
        ("log.parquet", "3", "user is missing", f",1,{BEGIN}"),
    ]


def test_the_file_is_written_only_where_bad_rows_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rejects=True applies to on_error='skip', not to on_error='fail'"):
        make(tmp_path / "out", tmp_path / "log.csv", on_error="fail")


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("typed", ["x", "x:int"])
def test_events_without_a_value_are_left_out_and_counted_where_that_is_declared(
    tmp_path: Path, suffix: str, typed: str
) -> None:
    names = ("user", "item", "time", "x", "y")
    rows = [(1, 2, BEGIN, 5, 1), (1, 3, BEGIN, None, 7), (1, 4, BEGIN, 0, None), (None, 2, BEGIN, None, 3)]
    frame = pl.DataFrame(rows, schema=names, orient="row")
    for name, first in (("a", 0), ("b", 1)):
        day = frame.with_columns(pl.col("time") + first)
        getattr(day, {"csv": "write_csv", "jsonl": "write_ndjson", "parquet": "write_parquet"}[suffix])(
            tmp_path / f"{name}.{suffix}"
        )
    logs = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    columns: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}

    def run(out: str, *logs: Path, **options: Any) -> dict[str, int]:
        log = TabularConfig(events=logs, label=f"{typed}=drop", event_columns=("y:float=drop",), **columns)
        given: dict[str, Any] = {"split": "none", "ids": "dense", "on_error": "skip", **options}
        return dict(
            preprocess(PreprocessConfig(dataset="custom", out=tmp_path / out, custom=log, **given)).options["audit"]
        )

    audit = run("once", *logs)
    for name in "ab":
        assert audit[f"{name}.{suffix}: events without x, all skipped"] == 1
        assert audit[f"{name}.{suffix}: events without y, all skipped"] == 1
    assert [reason for reason in audit if "user is missing" in reason]
    assert pl.read_parquet(tmp_path / "once" / "train" / "*.parquet")["x"].to_list() == [[5, 5]]
    run("days", logs[0])
    assert run("days", logs[1], append=True) == audit
    with pytest.raises(DataError, match=f"{suffix}: 1 bad row, first line . .*: user is missing; fix"):
        run("failed", *logs, on_error="fail")
