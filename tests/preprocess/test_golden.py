"""Logs whose datasets are known: the runs of golden/*.toml.

A file has [files], [options] of all runs, and [runs]: each has further options, and what comes out: `names` in its
folder; rows of `show` as lines of JSON, with raw ids; bad rows as `line: reason` or `first-last: reason`; the audit as
`count what`; a part of the manifest; or the line of an `error`, after which all files are as before, an earlier dataset
too. With `formats`, log.csv is written as JSON lines and Parquet, too, with `types`; bad rows have the number of the
row then; with `at_url`, files are read from URLs, too. `after` is a run that comes before.
"""

import bz2
import csv
import gzip
import io
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from evenrank.core.errors import EvenrankError
from evenrank.preprocess import Filters, PreprocessConfig, RequestRule, TabularConfig, preprocess
from tests.preprocess.decoded import NAMES, bytes_in, decode, read_rows
from tests.s3_server import BUCKET, S3, SECRET

_OF_LOG = {field.name for field in fields(TabularConfig)}
_COLUMNS = {"events": ["log.*"], **NAMES}
_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": partial(pa.compress, codec="zstd", asbytes=True),
}
_FOLDER = "a [0] {b,c} l* ** ? $HOME ~ ü"  # where logs and datasets are: names of folders do not matter
_RULES: dict[str, Callable[..., Any]] = {"filters": Filters, "requests": RequestRule}
_EXPECTED = ("show", "bad", "audit", "manifest", "values", "error", "names", "train", "eval", "requests_of", "table")
_FILES = {"requests_of": "requests.parquet", "table": "item_features.parquet"}
_OTHERS = (*_EXPECTED, "after", "formats", "types", "files", "out", "at_url", "is_raw", "encoding", "cut")
_At = Callable[[str], str]  # where a file is


def _config(options: dict[str, Any], out: str, at: _At) -> PreprocessConfig:
    given: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in options.items()}
    log = _COLUMNS | {name: value for name, value in given.items() if name in _OF_LOG}
    log |= {name: tuple(Path(at(path)) for path in log[name]) for name in ("events", "item_features") if name in log}
    log |= {"context": Path(at(log["context"]))} if "context" in log else {}
    others: dict[str, Any] = {"dataset": "custom", "out": Path(out), "split": "none", "allow_empty": True}
    others |= {n: _RULES[n](**v) if n in _RULES else v for n, v in given.items() if n not in _OF_LOG}
    others |= {name: Path(at(others[name])) for name in ("vocabulary", "raw_dir") if name in others}
    if others["split"].startswith("file:"):
        others["split"] = f"file:{at(others['split'].removeprefix('file:'))}"
    return PreprocessConfig(**others, custom=TabularConfig(**log) if others["dataset"] == "custom" else None)


def _write_files(run: dict[str, Any], suffix: str) -> None:
    types, is_raw = run.get("types", {}), run.get("is_raw", False)
    for name, text in run["files"].items():
        is_log = bool(suffix) and name == "log.csv"
        path = Path(name).with_suffix(f".{suffix}") if is_log else Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet" and not is_raw:
            _typed(text, types).write_parquet(path)
        elif suffix == "jsonl" and is_log:
            _typed(text, types).write_ndjson(path)
        else:
            content = text.removeprefix("\n").encode(run.get("encoding", "utf-8"))
            if not is_raw or "cut" in run:
                content = _COMPRESS.get(path.suffix, bytes)(content)
            path.write_bytes(content[: len(content) - run.get("cut", 0)])


def _typed(text: str, types: dict[str, str]) -> pl.DataFrame:
    frame = pl.read_csv(io.StringIO(text), schema_overrides=dict.fromkeys(types, pl.String))
    return frame.with_columns(
        _parsed(pl.col(name), dtype).alias(name) for name, dtype in types.items() if name in frame
    )


def _parsed(text: pl.Expr, dtype: str) -> pl.Expr:
    if dtype in ("Date", "Datetime", "Berlin"):
        time = text.str.to_datetime(time_unit="us")
        return {"Date": time.dt.date(), "Datetime": time, "Berlin": time.dt.replace_time_zone("Europe/Berlin")}[dtype]
    if dtype.startswith("List"):
        return text.str.json_decode(pl.List(getattr(pl, dtype.removeprefix("List"))))
    if dtype.startswith("Decimal"):
        return text.cast(pl.Decimal(38, int(dtype.removeprefix("Decimal") or 0)))
    return text.cast(getattr(pl, dtype))


def _run(
    case: dict[str, Any], name: str, earlier: Path, suffix: str = "", upload: Callable[[], _At] = lambda: str
) -> str:
    """Write the files, do what a run comes after, and the run itself, and compare; return the line of its error."""
    run = case.get("options", {}) | case["runs"][name]
    if "after" in run:
        assert not _run(case, run["after"], earlier)
    elif "error" in run:
        shutil.copytree(earlier, "out")
    _write_files(run | {"files": case.get("files", {}) | run.get("files", {})}, suffix)
    options = {key: value for key, value in run.items() if key not in _OTHERS}
    if "bad" in run:
        options |= {"on_error": "skip", "rejects": True}
    at, before = upload(), bytes_in(Path())
    try:
        config = _config(options, run.get("out", "out"), at)
        preprocess(config)
    except EvenrankError as error:
        assert bytes_in(Path()) == before
        return str(error)
    assert "error" not in run
    _check(Path(config.out), run, is_csv=suffix == "csv")
    return ""


def _check(dataset: Path, run: dict[str, Any], *, is_csv: bool) -> None:
    assert (names := sorted(path.name for path in dataset.iterdir())) == run.get("names", names)
    for part in {"train", "eval", "requests_of", "table"}.intersection(run):
        is_file = part in _FILES
        rows = pl.read_parquet(dataset / _FILES[part]).to_dicts() if is_file else read_rows(dataset / part)
        columns = [*rows[0]] if is_file else run.get("show", ["user_id", "item_id"])
        raw = decode(dataset, rows, features=True)
        found = [json.dumps([row[name] for name in columns if name in row], ensure_ascii=False) for row in raw]
        assert sorted(found, key=_user_of) == sorted(_lines(run[part]), key=_user_of)
    manifest = json.loads((dataset / "manifest.json").read_text())
    if "bad" in run:
        with (dataset / "rejects.csv").open(newline="") as file:
            bad = [(int(line) - is_csv, reason) for _, line, reason, _ in [*csv.reader(file)][1:]]
        of_lines = (text.partition(": ")[::2] for text in _lines(run["bad"]))
        of_ranges = (([*map(int, lines.split("-"))], reason) for lines, reason in of_lines)
        assert bad == [(line, reason) for ends, reason in of_ranges for line in range(ends[0], ends[-1] + 1)]
    if "audit" in run:
        audit = manifest["options"]["audit"].items()
        for (what, count), expected in zip(audit, _lines(run["audit"]), strict=True):
            _check_line(f"{count} {what}", expected)
    for column, expected in run.get("values", {}).items():
        path = dataset / f"vocabulary_{column}.parquet"
        labels = ((label,) for label in manifest["context_labels"].get(column, ())[1:])
        values = pl.read_parquet(path).select("value", "count").rows() if path.exists() else labels
        assert [*map(list, values)] == expected
    expected = run.get("manifest", {})
    assert _part_of(expected, manifest) == expected


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")] if text.strip() else []


def _part_of(expected: Any, found: Any) -> Any:
    """Return what is found in place of what is expected."""
    if isinstance(expected, dict):
        return {key: _part_of(value, found[key]) for key, value in expected.items()}
    if isinstance(expected, list):
        return [_part_of(*pair) for pair in zip(expected, found, strict=True)]
    return found


def _user_of(line: str) -> str:
    return str(json.loads(line)[0])


def _check_line(line: str, expected: str) -> None:
    assert "\n" not in line
    assert re.fullmatch(".*".join(map(re.escape, expected.split("..."))), line), f"{line!r} is not {expected!r}"


def _golden(*, at_url: bool) -> Iterator[Any]:
    for path in sorted(Path(__file__).parent.glob("golden/*.toml")):
        case = tomllib.loads(path.read_text())
        for name, run in case["runs"].items():
            run = case.get("options", {}) | run
            assert not run.keys().isdisjoint(_EXPECTED), f"{path.stem}: {name} expects nothing"
            for suffix in run.get("formats", [""]) if run.get("at_url") or not at_url else ():
                yield pytest.param(case, name, suffix, id=f"{path.stem}: {name} {suffix}".strip())


@pytest.mark.parametrize(("case", "name", "suffix"), [*_golden(at_url=False)])
def test_the_dataset_of_a_log_is_the_known_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, small_dataset: Path, case: dict[str, Any], name: str, suffix: str
) -> None:
    (here / _FOLDER).mkdir()
    monkeypatch.chdir(here / _FOLDER)
    _check_line(_run(case, name, small_dataset, suffix), case["runs"][name].get("error", ""))


@pytest.mark.parametrize(("case", "name", "suffix"), [*_golden(at_url=True)])
def test_files_at_urls_give_the_known_dataset_too(
    here: Path, s3: S3, small_dataset: Path, case: dict[str, Any], name: str, suffix: str
) -> None:
    def upload() -> _At:
        s3.put(here, here.name)
        return lambda path: s3.url(f"{here.name}/{path}")

    line = _run(case, name, small_dataset, suffix, upload)
    assert SECRET not in line
    _check_line(line.replace(f"s3://{BUCKET}/{here.name}/", ""), case["runs"][name].get("error", ""))
    assert not [path for path in here.iterdir() if path.name.startswith(".")]
