"""Logs and datasets at URLs, on a server with the S3 protocol."""

import gzip
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.storage import Remote
from evenrank.datasets import open_store, read_manifest
from evenrank.datasets.distributions import Lognormal
from evenrank.datasets.schema import version_name
from evenrank.datasets.stream import open_stream
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, TabularConfig, preprocess
from evenrank.preprocess.engine import UnfinishedError
from evenrank.preprocess.job import Job
from evenrank.preprocess.read.places import copies_in, find_files
from tests.preprocess.decoded import bytes_in
from tests.s3_server import BUCKET, S3, SECRET

_SYNTHETIC = SyntheticConfig(num_users=40, lengths=Lognormal(mean=9, std=9, low=1, high=40))

# Makes another dataset, and is killed when this many of its files are uploaded.
_KILLED = """
import os, signal, sys
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess
def on_stage(stage):
    if stage.startswith(f"uploaded {sys.argv[2]} of 3 files"):
        os.kill(os.getpid(), signal.SIGKILL)
config = PreprocessConfig(dataset="synthetic", out=sys.argv[1], seed=2, synthetic=SyntheticConfig(num_users=40))
preprocess(config, on_stage=on_stage)
"""


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _make(out: Path | str, seed: int = 1, *, overwrite: bool = False) -> None:
    preprocess(PreprocessConfig(dataset="synthetic", out=out, seed=seed, synthetic=_SYNTHETIC, overwrite=overwrite))


def _versions(s3: S3, key: str) -> set[str]:
    return {name.partition("/")[0] for name in s3.keys(key)} - {"manifest.json"}


def _version(s3: S3, key: str) -> str:
    return version_name(s3.read(f"{key}/manifest.json"))


def test_a_dataset_at_a_url_is_the_local_one_in_a_folder_of_its_version(s3: S3, tmp_path: Path) -> None:
    _make(f"file://{tmp_path}/local")
    _make(s3.url("equal"))
    local = bytes_in(tmp_path / "local")
    version = version_name(local["manifest.json"])
    expected = {f"{version}/{name}": content for name, content in local.items()}
    expected["manifest.json"] = local["manifest.json"]
    assert {name: s3.read(f"equal/{name}") for name in s3.keys("equal")} == expected
    assert os.listdir(tmp_path) == ["local"]  # no temporary folders
    s3.put(tmp_path / "local", "equal")  # a copied folder is replaced, too
    for seed in (1, 2, 2):
        _make(s3.url("equal"), seed)
        assert _versions(s3, "equal") == {_version(s3, "equal")}
        assert len(open_store(s3.url("equal"))) == read_manifest(s3.url("equal")).splits["train"].rows


def test_where_nothing_may_be_deleted_the_new_version_is_complete_and_the_old_one_stays(
    s3: S3, caplog: pytest.LogCaptureFixture
) -> None:
    resource = f"arn:aws:s3:::{BUCKET}/kept/*"
    refused = {"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject", "Resource": resource}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [refused]}).encode()
    url, headers = f"http://127.0.0.1:{s3.port}/{BUCKET}?policy", {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, policy, headers, method="PUT")).close()
    versions: list[str] = []
    for seed in (1, 2, 3):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            _make(s3.url("kept"), seed)
        assert [record.message.partition(": ")[0] for record in caplog.records] == [
            f"the dataset is complete, but s3://{BUCKET}/kept/{version} cannot be deleted"
            for version in sorted(versions)
        ]
        versions.append(_version(s3, "kept"))
        assert _versions(s3, "kept") == {*versions}
        assert len(open_store(s3.url("kept"))) == read_manifest(s3.url("kept")).splits["train"].rows


@pytest.mark.parametrize("num_uploaded", ["1", "3"])
def test_a_killed_upload_leaves_the_old_dataset_and_the_next_one_completes_it(s3: S3, num_uploaded: str) -> None:
    key = f"killed-{num_uploaded}"
    url = s3.url(key)
    _make(url)
    old = s3.read(f"{key}/manifest.json")
    command = [sys.executable, "-c", _KILLED, url, num_uploaded]
    killed = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=280)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert s3.read(f"{key}/manifest.json") == old
    folders = _versions(s3, key)
    assert len(folders) == 2
    for split, info in read_manifest(url).splits.items():
        assert len(open_store(url, split)) == len(open_stream(url, split).read(0, info.rows)) == info.rows
    config = PreprocessConfig(dataset="synthetic", out=url, seed=2, synthetic=SyntheticConfig(num_users=40))
    preprocess(config)
    assert s3.read(f"{key}/manifest.json") != old
    assert _versions(s3, key) == {_version(s3, key)} < folders


def test_what_is_no_dataset_is_only_replaced_on_demand(s3: S3, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"precious")
    for name in ("photo.jpg", "0123456789abcdef/photo.jpg"):
        key = f"foreign-{len(name)}"
        s3.put(tmp_path / "photo.jpg", f"{key}/{name}")
        with pytest.raises(DataError, match=re.escape(f"s3://{BUCKET}/{key} contains {name!r}, which is no part")):
            _make(s3.url(key))
        assert s3.keys(key) == {name}
        with pytest.raises(DataError, match=f"s3://{BUCKET}/{key}/{name} is a file; choose another output folder"):
            _make(s3.url(f"{key}/{name}"), overwrite=True)
        _make(s3.url(key), overwrite=True)
        assert name not in s3.keys(key)
        assert "manifest.json" in s3.keys(key)
    stages: list[str] = []
    with pytest.raises(DataError, match=r"^s3://missing/out cannot be written: there is no such bucket") as raised:
        preprocess(PreprocessConfig(dataset="synthetic", out=s3.url("out", bucket="missing")), on_stage=stages.append)
    assert SECRET not in str(raised.value)
    assert not stages  # before the work begins


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
    (folder / "users.csv").write_text("user_id,country\n" + "".join(f"{n},{n % 3}\n" for n in range(9)))
    (folder / "items.csv").write_text("item_id,brand\n" + "".join(f"i{n},{n % 4}\n" for n in range(17)))
    (folder / "eval.txt").write_text("1\n3\n")
    s3.put(folder, "in")
    return folder


def _log_config(events: Path | str, out: Path | str, **options: Any) -> PreprocessConfig:
    log = TabularConfig(events=(Path(events),), timestamp_column="timestamp")
    options = {"split": "none", "allow_empty": True, **options}
    return PreprocessConfig(dataset="custom", custom=log, out=out, **options)


def test_logs_at_urls_give_the_same_bytes_as_local_files(source: Path, s3: S3, tmp_path: Path) -> None:
    def run(base: str, out: str, **options: Any) -> dict[str, bytes]:
        def at(name: str) -> Path:
            return Path(base.replace("NAME", name))

        log = TabularConfig(
            events=(at("day=*/*.csv.gz"), at("json"), at("log.parquet")),
            timestamp_column="timestamp",
            event_columns=("day:int",),
            context=at("users.csv"),
            context_columns=("country",),
            item_features=(at("items.csv"),),
            item_columns=("brand",),
        )
        split = f"file:{at('eval.txt')}"
        preprocess(PreprocessConfig(dataset="custom", custom=log, out=tmp_path / out, split=split), **options)
        return bytes_in(tmp_path / out)

    stages: list[str] = []
    local = run(f"{source}/NAME", "local")
    assert run(s3.url("in/NAME"), "fetched", on_stage=stages.append) == local
    names = "day=1/log.csv.gz day=2/log.csv.gz deep/log.jsonl log.parquet users.csv items.csv eval.txt"
    assert [entry["path"] for entry in json.loads(local["manifest.json"])["sources"]] == names.split()
    assert f"fetching s3://{BUCKET}/in/log.parquet, file 1 of 1" in stages
    assert not any(SECRET in stage or str(tmp_path) in stage for stage in stages)
    assert {path.name for path in tmp_path.iterdir()} == {"local", "fetched"}


_PATTERNS = "*.csv.gz **/*.csv.gz day=? day=[2]/*.gz */deep/log.jsonl json/** users.csv day=1 no* _temporary/*"


@pytest.mark.parametrize("pattern", _PATTERNS.replace("?", "*").split())
def test_a_url_stands_for_the_files_that_the_path_would(source: Path, s3: S3, tmp_path: Path, pattern: str) -> None:
    def found(path: Path, root: Path | str) -> list[str] | str:
        try:
            return [str(file).removeprefix(str(root)) for file in find_files([path])]
        except DataError as error:
            return str(error).replace(str(root).replace("s3:/", "s3://"), "")

    with copies_in(tmp_path / "copies", on_stage=lambda stage: None) as copies:
        path = copies.path_of(Path(s3.url(f"in/{pattern}")))
        of_copies = found(path, tmp_path / "copies" / "s3:" / BUCKET / "in")
        assert of_copies == found(source / pattern, source)
        fetched = {file.relative_to(tmp_path) for file in (tmp_path / "copies").rglob("*") if file.is_file()}
    assert all("_temporary" not in file.parts for file in fetched) == (pattern != "_temporary/*")


def test_errors_name_the_url_of_the_file(source: Path, s3: S3, tmp_path: Path) -> None:
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
                preprocess(_log_config(s3.url(events), out, **options))
            assert SECRET not in str(raised.value)
    assert s3.keys("errors") == set()
    line = f"s3://{BUCKET}/bad/bad.csv is read, and would be replaced with s3://{BUCKET}"
    for out in ("bad", ""):
        with pytest.raises(ConfigError, match=line):
            preprocess(_log_config(s3.url("bad"), s3.url(out), overwrite=True))
    assert s3.keys("bad") == {"bad.csv"}


def test_copies_that_a_killed_run_left_count_only_if_they_are_what_is_there_now(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, bucket = "user_id,item_id,timestamp\n{},2,1600000000\n", tmp_path / tmp_path.name
    bucket.mkdir()
    for name in "abc":
        (bucket / f"{name}.csv").write_text(text.format(name))
    s3.put(bucket, bucket.name)
    config = _log_config(s3.url(f"{bucket.name}/*.csv"), tmp_path / "out")

    def end(job: Job, workers: object) -> None:
        raise UnfinishedError("the disk is full")

    with monkeypatch.context() as patch:  # after all files are fetched
        patch.setattr(Job, "run", end)
        with pytest.raises(UnfinishedError):
            preprocess(config)
    (bucket / "a.csv").unlink()  # compacted into d.csv
    s3.files.delete_file(f"{BUCKET}/{bucket.name}/a.csv")
    for name, user in (("b", "x"), ("d", "a")):  # the former within the same second, perhaps, and of the same size
        (bucket / f"{name}.csv").write_text(text.format(user))
        s3.put(bucket / f"{name}.csv", f"{bucket.name}/{name}.csv")
    preprocess(config)
    preprocess(_log_config(f"{bucket}/*.csv", tmp_path / "expected"))
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "expected")
    assert s3.num_reads(f"{bucket.name}/c.csv") == 1  # which is as it was


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
    line = rf"^s3://{BUCKET}/late/log.csv was replaced while it was fetched; run it again"
    with pytest.raises(DataError, match=line):
        preprocess(_log_config(s3.url("late/log.csv"), tmp_path / "out"))
