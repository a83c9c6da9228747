"""Logs whose datasets are known: the runs of golden/*.toml, and the files of malformed.toml.

A file of `golden` has [files], [options] of all runs, and [runs]: each has further options, and what comes out: rows of
`show` as lines of JSON, with raw ids; bad rows as `line: reason` or `first-last: reason`; the audit as `count what`; a
part of the manifest. With `formats`, log.csv is written as JSON lines and Parquet, too, with `types`; bad rows have the
number of the row then. `after` is a run that comes before.
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
from tests.preprocess.decoded import bytes_in, decode, read_rows

_HERE = Path(__file__).parent
_OF_LOG = {field.name for field in fields(TabularConfig)}
_PATHS = ("events", "item_features")
_DEFAULTS: dict[str, Any] = {"split": "none", "allow_empty": True}
_COLUMNS = {"events": ["log.*"], "user_column": "user", "item_column": "item", "timestamp_column": "time"}
_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": partial(pa.compress, codec="zstd", asbytes=True),
}
_FOLDER = "a [0] {b,c} l* ** ? $HOME ~ ü"  # where logs and datasets are: names of folders do not matter
_RULES: dict[str, Callable[..., Any]] = {"filters": Filters, "requests": RequestRule}
_EXPECTED = ("show", "bad", "audit", "manifest", "values", "error", "train", "eval", "requests_of", "table")
_FILES = {"requests_of": "requests.parquet", "table": "item_features.parquet"}
_OTHERS = (*_EXPECTED, "after", "formats", "types", "files", "out")


def _config(options: dict[str, Any], out: str) -> PreprocessConfig:
    given: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in options.items()}
    log = _COLUMNS | {name: value for name, value in given.items() if name in _OF_LOG}
    log |= {
        name: tuple(map(Path, [log[name]] if isinstance(log[name], str) else log[name]))
        for name in _PATHS
        if name in log
    }
    log |= {"context": Path(log["context"])} if "context" in log else {}
    others = {"dataset": "custom", "out": Path(out), **_DEFAULTS}
    others |= {n: _RULES[n](**v) if n in _RULES else v for n, v in given.items() if n not in _OF_LOG}
    others |= {name: Path(others[name]) for name in ("vocabulary", "raw_dir") if name in others}
    custom = TabularConfig(**log) if others["dataset"] == "custom" else None
    return PreprocessConfig(**others, custom=custom)


def _write_files(files: dict[str, str], suffix: str, types: dict[str, str]) -> None:
    for name, text in files.items():
        path = Path(name).with_suffix(f".{suffix}") if suffix and name == "log.csv" else Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            _typed(text, types).write_parquet(path)
        elif suffix == "jsonl" and name == "log.csv":
            _typed(text, types).write_ndjson(path)
        else:
            path.write_bytes(_COMPRESS.get(path.suffix, bytes)(text.removeprefix("\n").encode()))


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


def _run(case: dict[str, Any], name: str, suffix: str = "") -> Path:
    """Write the files and run what a run comes after, and the run itself; return the dataset."""
    run = case["runs"][name]
    if "after" in run:
        _run(case, run["after"])
    _write_files(case.get("files", {}) | run.get("files", {}), suffix, run.get("types", {}))
    options = {key: value for key, value in (case.get("options", {}) | run).items() if key not in _OTHERS}
    if "bad" in run:
        options |= {"on_error": "skip", "rejects": True}
    config = _config(options, run.get("out", "out"))
    preprocess(config)
    return Path(config.out)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")] if text.strip() else []


def _part_of(expected: Any, found: Any) -> Any:
    """Return what is found in place of what is expected."""
    if isinstance(expected, dict):
        return {key: _part_of(value, found[key]) for key, value in expected.items()}
    return found


def _check(dataset: Path, run: dict[str, Any], suffix: str) -> None:
    columns = run.get("show", ["user_id", "item_id"])
    for part in ("train", "eval", "requests_of", "table"):
        if part in run:
            is_file = part in _FILES
            rows = pl.read_parquet(dataset / _FILES[part]).to_dicts() if is_file else read_rows(dataset / part)
            names = [*rows[0]] if is_file else columns
            raw = decode(dataset, rows, features=True)
            found = [json.dumps([row[name] for name in names if name in row], ensure_ascii=False) for row in raw]
            assert sorted(found, key=_user_of) == sorted(_lines(run[part]), key=_user_of)
    manifest = json.loads((dataset / "manifest.json").read_text())
    if "bad" in run:
        with (dataset / "rejects.csv").open(newline="") as file:
            bad = [(int(line) - (suffix == "csv"), reason) for _, line, reason, _ in [*csv.reader(file)][1:]]
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


def _user_of(line: str) -> str:
    return str(json.loads(line)[0])


def _golden() -> Iterator[Any]:
    for path in sorted((_HERE / "golden").glob("*.toml")):
        case = tomllib.loads(path.read_text())
        for name, run in case["runs"].items():
            assert not run.keys().isdisjoint(_EXPECTED), f"{path.stem}: {name} expects nothing"
            for suffix in run.get("formats", [""]):
                yield pytest.param(case, name, suffix, id=f"{path.stem}: {name} {suffix}".strip())


@pytest.mark.parametrize(("case", "name", "suffix"), [*_golden()])
def test_the_dataset_of_a_log_is_the_known_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any], name: str, suffix: str
) -> None:
    run = case["runs"][name]
    (folder := tmp_path / _FOLDER).mkdir()
    monkeypatch.chdir(folder)
    if "error" not in run:
        _check(_run(case, name, suffix), case.get("options", {}) | run, suffix)
        return
    with pytest.raises(EvenrankError) as caught:
        _run(case, name, suffix)
    _check_line(str(caught.value), run["error"])


def _check_line(line: str, expected: str) -> None:
    assert "\n" not in line
    assert re.fullmatch(".*".join(map(re.escape, expected.split("..."))), line), f"{line!r} is not {expected!r}"


_MALFORMED = tomllib.loads((_HERE / "malformed.toml").read_text())


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset, which a run that fails keeps."""
    folder = tmp_path_factory.mktemp("earlier")
    (folder / "log.csv").write_text("user,item,time\n1,2,1600000000\n")
    custom = TabularConfig(
        events=(folder / "log.csv",), user_column="user", item_column="item", timestamp_column="time"
    )
    preprocess(PreprocessConfig(dataset="custom", out=folder / "out", custom=custom, split="none"))
    return folder / "out"


@pytest.mark.parametrize("name", _MALFORMED)
def test_malformed_input_is_one_line_that_names_the_place_and_the_earlier_dataset_stays(
    here: Path, earlier: Path, name: str
) -> None:
    case = _MALFORMED[name]
    shutil.copytree(earlier, "out")
    files = case.get("files", {})
    if not any(file.startswith(("log", "ml", "other")) for file in files):
        files = {"log.csv": "user,item,time\n1,2,1600000000\n", **files}
    for file, text in files.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        content = text.encode(case.get("encoding", "utf-8"))
        if "cut" in case:  # the end of a compressed file
            content = (whole := _COMPRESS[Path(file).suffix](content))[: len(whole) - case["cut"]]
        Path(file).write_bytes(content)
    before = bytes_in(here)
    with pytest.raises(EvenrankError) as caught:
        preprocess(_config(case.get("options", {}), "out"))
    _check_line(str(caught.value), case["error"])
    assert bytes_in(here) == before
