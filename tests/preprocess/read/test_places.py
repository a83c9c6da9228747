import bz2
import gzip
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.storage import Remote
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from evenrank.preprocess.engine import UnfinishedError
from evenrank.preprocess.job import Job
from evenrank.preprocess.read.places import (
    JSON,
    PARQUET,
    TEXT,
    checked_format,
    copies_in,
    find_files,
    format_of,
    partition_values,
)
from tests.s3_server import BUCKET, S3, SECRET

FILES = ("a.csv", "b.csv.gz", "day=1/p.csv", "day=2/sub/q.csv", "_tmp/x.csv", ".hidden.csv", "_SUCCESS", "notes.csv")


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "logs"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("" if name in ("notes.csv", "_SUCCESS") else "x\n")
    return Path("logs")


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["logs"], ["a.csv", "b.csv.gz", "day=1/p.csv", "day=2/sub/q.csv"]),  # none that are hidden or empty
        (["logs/*.csv"], ["a.csv"]),
        (["logs/**/*.csv"], ["a.csv", "day=1/p.csv", "day=2/sub/q.csv"]),
        (["logs/day=[12]"], ["day=1/p.csv", "day=2/sub/q.csv"]),
        (["logs/day=2", "logs/a.csv", "logs/_tmp/x.csv"], ["day=2/sub/q.csv", "a.csv", "_tmp/x.csv"]),
        (["logs/.hidden.csv"], [".hidden.csv"]),
    ],
)
def test_files_folders_and_patterns_are_found_in_order(logs: Path, paths: list[str], found: list[str]) -> None:
    assert list(find_files([Path(path) for path in paths])) == [logs / name for name in found]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["logs"], ["a.csv", "b.csv.gz", "day=1/p.csv", "day=2/sub/q.csv"]),
        (["logs/day=1", "logs/day=2", "logs/a.csv"], ["day=1/p.csv", "day=2/sub/q.csv", "a.csv"]),
        (["logs/day=1/p.csv", "logs/day=2/sub"], ["day=1/p.csv", "q.csv"]),
        (["logs/**/*.csv"], ["a.csv", "day=1/p.csv", "day=2/sub/q.csv"]),
    ],
)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_the_names_of_files_depend_neither_on_the_machine_nor_on_other_paths(
    logs: Path, paths: list[str], names: list[str], is_absolute: bool
) -> None:
    given = [Path(path).absolute() if is_absolute else Path(path) for path in paths]
    assert [file.source for file in find_files(given).values()] == names
    assert [file.source for path in given for file in find_files([path]).values()] == names


def test_the_names_of_files_include_the_keys_of_all_folders_above_them(logs: Path) -> None:
    (logs / "day=1" / "hour=2" / "minute=3").mkdir(parents=True)
    (logs / "day=1" / "hour=2" / "minute=3" / "p.csv").write_text("x\n")
    for given in ("minute=3", "minute=3/p.csv"):
        (file,) = find_files([logs / "day=1" / "hour=2" / given]).values()
        assert file.source == "day=1/hour=2/minute=3/p.csv"


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        (["logs/none.csv"], DataError, "logs/none.csv cannot be read: No such file or directory; check the path"),
        (["logs/x.csv,logs/a.csv"], DataError, "there is no file logs/x.csv,logs/a.csv; give several files one by one"),
        (
            ["logs/*.tsv"],
            DataError,
            "logs/*.tsv leads to no data file (neither empty files nor",
        ),
        (
            ["void"],
            DataError,
            "void leads to no data file (neither empty files nor names that begin with . or _ count); check it",
        ),
        (["logs", "logs/day=1/p.csv"], ConfigError, "/logs/day=1/p.csv is in logs, logs/day=1/p.csv twice, and its ev"),
        (
            ["mixed"],
            DataError,
            "mixed has files of several formats: b.jsonl is JSON lines and a.csv is delimited text; use a pattern",
        ),
        (
            ["other"],
            DataError,
            "other/a.log has an unknown suffix; expected one of .csv, .tsv, .txt, .dat, .json, .jso",
        ),
    ],
)
def test_paths_without_one_kind_of_files_are_refused(
    logs: Path, paths: list[str], error: type[Exception], message: str
) -> None:
    for name in ("mixed/a.csv", "mixed/b.jsonl", "other/a.log", "void/.a.csv", "void/b.csv"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("x\n" * (name != "void/b.csv"))
    with pytest.raises(error, match=re.escape(message)):
        find_files([Path(path) for path in paths])


def test_the_name_tells_the_format() -> None:
    for suffixes, expected in ((".csv .TSV .txt .dat", TEXT), (".json .jsonl .ndjson", JSON)):
        for suffix in suffixes.split():
            for compression in ("", ".gz", ".zst", ".BZ2"):
                assert format_of(Path(f"log{suffix}{compression}")) == expected
    assert format_of(Path("log.parquet")) == PARQUET
    for name in ("log.parquet.gz", "log.gz", "log", "log.csv.zip"):
        with pytest.raises(DataError, match=f"{name} has an unknown suffix"):
            format_of(Path(name))


def test_a_file_that_holds_nothing_is_left_out_of_a_folder_compressed_or_not(tmp_path: Path) -> None:
    codecs: dict[str, Callable[..., bytes]] = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "zst": partial(pa.compress, codec="zstd", asbytes=True),
    }
    for codec, compress in codecs.items():
        for name, content in ((f"none.csv.{codec}", b""), (f"some.csv.{codec}", b"a,b\n")):
            (tmp_path / name).write_bytes(compress(content))
    (tmp_path / "none.csv").touch()
    (tmp_path / "damaged.csv.gz").write_bytes(b"\x1f\x8b")
    names = ["damaged.csv.gz", "some.csv.bz2", "some.csv.gz", "some.csv.zst"]
    assert [path.name for path in find_files([tmp_path])] == names
    assert [path.name for path in find_files([tmp_path / "none.csv.gz"])] == ["none.csv.gz"]


_HELD = {
    "csv": b"a,b\n",
    "gz": gzip.compress(b"a\n"),
    "bz2": bz2.compress(b""),
    "zst": pa.compress(b"a\n", codec="zstd", asbytes=True),
    "parquet": b"PAR1\x15\x00PAR1",
    "zip": b"PK\x03\x04",
    "xls": b"\xd0\xcf\x11\xe0",
}


@pytest.mark.parametrize("held", _HELD)
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "csv.gz", "csv.bz2", "csv.zst", "parquet"])
def test_a_file_whose_name_belies_its_content_is_refused(tmp_path: Path, held: str, suffix: str) -> None:
    file, expected = tmp_path / f"log.{suffix}", suffix.rpartition(".")[2].replace("jsonl", "csv")
    file.write_bytes(_HELD[held])
    if held == expected or (held, expected) == ("csv", "zst"):  # whose content may begin with anything
        checked_format(file)
        return
    with pytest.raises(DataError, match=rf"^{file} holds (no )?[\w ]+ data, unlike its name; [^\n]*$"):
        checked_format(file)


def test_folders_add_columns() -> None:
    name = "a/day=1/city=S%C3%A3o%2FPaulo/x=__HIVE_DEFAULT_PARTITION__/y=1=2/z=/log.csv"
    assert partition_values(name) == {"day": "1", "city": "São/Paulo", "x": None, "y": "1=2", "z": ""}


@pytest.mark.parametrize("is_absolute", [False, True])
@pytest.mark.parametrize(
    ("path", "added"),
    [
        ("a.csv", {}),
        (".", {"shop": "2"}),
        ("shop=2", {}),
        ("shop=2/b.csv", {}),
        ("shop=*", {"shop": "2"}),
        ("shop=*/*.csv", {"shop": "2"}),
        ("shop=2/*.csv", {}),
        ("**/b.csv", {"shop": "2"}),
    ],
)
def test_folders_add_columns_below_the_path_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, added: dict[str, str], is_absolute: bool
) -> None:
    folder = tmp_path / "day=7" / "logs"
    (folder / "shop=2").mkdir(parents=True)
    for name in ("a.csv", "shop=2/b.csv"):
        (folder / name).write_text("x\n")
    monkeypatch.chdir(folder)
    (*_, file) = find_files([folder / path if is_absolute else Path(path)]).values()
    assert file.folders == added


_ROWS = [{"user_id": user, "item_id": f"i{user * n % 17}", "timestamp": 10**9 + n} for user in range(9) for n in (1, 5)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Path:
    """Return a folder of logs and features, of which the bucket has a copy at `in`."""
    folder = tmp_path_factory.mktemp("logs") / "in"
    frame = pl.DataFrame(_ROWS)
    for day in (1, 2):
        (folder / f"day={day}").mkdir(parents=True)
        (folder / f"day={day}" / "log.csv.gz").write_bytes(gzip.compress(frame.write_csv().encode()))
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "log.csv.gz").write_text("incomplete")
    (folder / "empty.csv.gz").touch()
    (folder / "json" / "deep").mkdir(parents=True)
    frame.with_columns(day=pl.lit(3)).write_ndjson(folder / "json" / "deep" / "log.jsonl")
    frame.with_columns(day=pl.lit(4)).write_parquet(folder / "log.parquet")
    frame.select("user_id", country=pl.col("user_id") % 3).unique("user_id").sort("user_id").write_csv(
        folder / "users.csv"
    )
    (folder / "items.jsonl").write_text(
        "".join(json.dumps({"item_id": f"i{n}", "brand": n % 4}) + "\n" for n in range(17))
    )
    (folder / "eval.txt").write_text("1\n3\n")
    s3.put(folder, "in")
    return folder


def _config(base: str, out: Path | str) -> PreprocessConfig:
    def at(name: str) -> Path:
        return Path(base.replace("NAME", name))

    log = TabularConfig(
        events=(at("day=*/*.csv.gz"), at("json"), at("log.parquet")),
        user_column="user_id",
        item_column="item_id",
        timestamp_column="timestamp",
        event_columns=("day:int",),
        context=at("users.csv"),
        context_columns=("country",),
        item_features=at("items.jsonl"),
        item_columns=("brand",),
    )
    return PreprocessConfig(dataset="custom", custom=log, out=out, split=f"file:{at('eval.txt')}")


def _contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_logs_at_urls_give_the_same_bytes_as_local_files(source: Path, s3: S3, tmp_path: Path) -> None:
    preprocess(_config(f"{source}/NAME", tmp_path / "local"))
    stages: list[str] = []
    preprocess(_config(s3.url("in/NAME"), tmp_path / "fetched"), on_stage=stages.append)
    local = _contents(tmp_path / "local")
    assert _contents(tmp_path / "fetched") == local
    assert [entry["path"] for entry in json.loads(local["manifest.json"])["sources"]] == [
        "day=1/log.csv.gz",
        "day=2/log.csv.gz",
        "deep/log.jsonl",
        "log.parquet",
        "users.csv",
        "items.jsonl",
        "eval.txt",
    ]
    assert f"fetching s3://{BUCKET}/in/log.parquet, file 1 of 1" in stages
    assert not any(SECRET in stage or str(tmp_path) in stage for stage in stages)
    assert {path.name for path in tmp_path.iterdir()} == {"local", "fetched"}


def _log_config(events: Path | str, out: Path | str, **options: Any) -> PreprocessConfig:
    log = TabularConfig(
        events=(Path(events),), user_column="user_id", item_column="item_id", timestamp_column="timestamp"
    )
    return PreprocessConfig(dataset="custom", custom=log, out=out, split="none", allow_empty=True, **options)


def _run(events: Path | str, out: Path | str, vocabulary: Path | str | None = None, *, overwrite: bool = False) -> None:
    earlier = None if vocabulary is None else Path(vocabulary)
    preprocess(_log_config(events, out, vocabulary=earlier, overwrite=overwrite))


def test_ids_of_a_dataset_at_a_url_are_kept(source: Path, s3: S3, tmp_path: Path) -> None:
    pl.DataFrame(_ROWS).reverse().write_csv(tmp_path / "later.csv")
    for out in (s3.url("monday"), tmp_path / "monday"):
        _run(source / "log.parquet", out)
    _run(tmp_path / "later.csv", tmp_path / "kept", s3.url("monday"))
    _run(tmp_path / "later.csv", tmp_path / "expected", tmp_path / "monday")
    _run(tmp_path / "later.csv", tmp_path / "other")
    assert _contents(tmp_path / "kept") == _contents(tmp_path / "expected") != _contents(tmp_path / "other")


@pytest.mark.parametrize(
    "pattern",
    [
        "*.csv.gz",
        "**/*.csv.gz",
        "day=?",
        "day=[2]/*.gz",
        "*/deep/log.jsonl",
        "json/**",
        "users.csv",
        "day=1",
        "no*",
        "_temporary/*",
    ],
)
def test_a_url_stands_for_the_files_that_the_path_would(source: Path, s3: S3, tmp_path: Path, pattern: str) -> None:
    def found(path: Path, root: Path | str) -> list[str] | str:
        try:
            return [str(file).removeprefix(str(root)) for file in find_files([path])]
        except DataError as error:
            return str(error).replace(str(root).replace("s3:/", "s3://"), "")

    with copies_in(tmp_path / "copies", on_stage=lambda stage: None) as copies:
        path = copies.path_of(Path(s3.url(f"in/{pattern.replace('?', '*')}")))
        assert found(path, tmp_path / "copies" / "s3:" / BUCKET / "in") == found(
            source / pattern.replace("?", "*"), source
        )
        fetched = {file.relative_to(tmp_path) for file in (tmp_path / "copies").rglob("*") if file.is_file()}
    assert all("_temporary" not in file.parts for file in fetched) == (pattern != "_temporary/*")


def test_errors_name_the_url_of_the_file(source: Path, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "bad.csv").write_text("user_id,item_id,timestamp\n1,2,3\n1,2\n")
    (tmp_path / "good.csv").write_text("user_id,item_id,timestamp\n1,2,1600000000\n")
    for name in ("bad", "good"):
        s3.put(tmp_path / f"{name}.csv", f"{name}/{name}.csv")
    preprocess(_log_config(s3.url("good"), s3.url("made"), ids="dense"))
    damaged = next(name for name in s3.keys("made") if name.endswith("vocabulary_user_id.parquet"))
    s3.put(tmp_path / "good.csv", f"made/{damaged}")
    here, options = f"s3://{BUCKET}", dict[str, Any]()
    for events, message, options in (
        ("bad/*.csv", "bad/bad.csv: 1 bad row, first line 3", {}),
        ("bad/missing.csv", "bad/missing.csv cannot be read: No such file or directory", {}),
        ("none/*.csv", "none/*.csv leads to no data file", {}),
        ("in/*.txt", "in/eval.txt has no column 'user_id'", {}),
        ("out/../x.csv", "out/../x.csv has a part that is no name of a file", {}),
        ("good", "none.csv cannot be read: No such file", {"split": f"file:{s3.url('none.csv')}"}),
        ("good", f"made/{damaged} cannot be read", {"vocabulary": Path(s3.url("made"))}),
    ):
        for out in (tmp_path / "out", s3.url("errors")):
            with pytest.raises(DataError, match=f"^{re.escape(f'{here}/{message}')}") as raised:
                preprocess(replace(_log_config(s3.url(events), out), **options))
            assert SECRET not in str(raised.value)
    assert s3.keys("errors") == set()
    for out in ("bad", ""):
        with pytest.raises(
            ConfigError, match=f"s3://{BUCKET}/bad/bad.csv is read, and would be replaced with s3://{BUCKET}"
        ):
            _run(s3.url("bad"), s3.url(out), overwrite=True)
    with pytest.raises(ConfigError, match=f"raw_dir s3://{BUCKET}/raw is a URL; choose a folder of this host"):
        PreprocessConfig(dataset="ml-1m", out=tmp_path / "out", raw_dir=Path(s3.url("raw")))
    assert s3.keys("bad") == {"bad.csv"}


def _leave_copies(config: PreprocessConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run end after it has fetched its files, as if the disk were full, so that the next one goes on."""

    def end(job: Job, workers: object) -> None:
        raise UnfinishedError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Job, "run", end)
        with pytest.raises(UnfinishedError):
            preprocess(config)


@pytest.mark.parametrize("pattern", ["", "/*.csv", "/b.csv"])
def test_copies_that_a_killed_run_left_count_only_if_they_are_what_is_there_now(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    text, bucket = "user_id,item_id,timestamp\n{},2,1600000000\n", tmp_path / tmp_path.name
    bucket.mkdir()
    for name in "abc":
        (bucket / f"{name}.csv").write_text(text.format(name))
    s3.put(bucket, bucket.name)
    config = _log_config(s3.url(f"{bucket.name}{pattern}"), tmp_path / "out")
    _leave_copies(config, monkeypatch)
    (bucket / "a.csv").unlink()  # compacted into d.csv
    s3.files.delete_file(f"{BUCKET}/{bucket.name}/a.csv")
    for name, user in (("b", "x"), ("d", "a")):  # the former within the same second, perhaps, and of the same size
        (bucket / f"{name}.csv").write_text(text.format(user))
        s3.put(bucket / f"{name}.csv", f"{bucket.name}/{name}.csv")
    preprocess(config)
    expected = _log_config(f"{bucket}{pattern}", tmp_path / "expected")
    preprocess(expected)
    assert _contents(tmp_path / "out") == _contents(tmp_path / "expected")
    assert s3.num_reads(f"{bucket.name}/c.csv") == (pattern != "/b.csv")  # which is as it was


def test_an_object_that_is_gone_is_not_read_from_the_copy_of_a_killed_run(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,2,1600000000\n")
    s3.put(tmp_path / "log.csv", "gone/log.csv")
    config = _log_config(s3.url("gone/log.csv"), tmp_path / "out")
    _leave_copies(config, monkeypatch)
    s3.files.delete_file(f"{BUCKET}/gone/log.csv")
    with pytest.raises(DataError, match=rf"^s3://{BUCKET}/gone/log.csv cannot be read: No such file"):
        preprocess(config)


def test_an_object_that_is_replaced_while_it_is_fetched_is_an_error(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,2,1600000000\n")
    s3.put(tmp_path / "log.csv", "late/log.csv")
    chunks = Remote.chunks

    def replaced(remote: Remote) -> Iterator[bytes]:
        yield from chunks(remote)
        (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,3,1600000000\n")
        s3.put(tmp_path / "log.csv", "late/log.csv")

    monkeypatch.setattr(Remote, "chunks", replaced)
    with pytest.raises(
        DataError, match=rf"^s3://{BUCKET}/late/log.csv was replaced while it was fetched; run it again"
    ):
        preprocess(_log_config(s3.url("late/log.csv"), tmp_path / "out"))
