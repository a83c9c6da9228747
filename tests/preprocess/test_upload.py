import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import DataError
from evenrank.datasets import open_store, read_manifest
from evenrank.datasets.distributions import Lognormal
from evenrank.datasets.schema import version_name
from evenrank.datasets.stream import open_stream
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, TabularConfig, preprocess
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
    config = PreprocessConfig(dataset="synthetic", out=out, seed=seed, synthetic=_SYNTHETIC, overwrite=overwrite)
    preprocess(config)


def test_a_dataset_at_a_url_is_the_local_one_in_a_folder_of_its_version(s3: S3, tmp_path: Path) -> None:
    _make(tmp_path / "local")
    _make(s3.url("equal"))
    manifest = (tmp_path / "local" / "manifest.json").read_bytes()
    files = [path for path in (tmp_path / "local").rglob("*") if path.is_file()]
    version = version_name(manifest)
    names = {f"{version}/{path.relative_to(tmp_path / 'local')}": path for path in files}
    assert s3.keys("equal") == {"manifest.json", *names}
    assert s3.read("equal/manifest.json") == manifest
    for name, path in names.items():
        assert s3.read(f"equal/{name}") == path.read_bytes()
    assert not list(tmp_path.glob("evenrank-*"))  # temporary folders


def test_a_new_version_replaces_the_old_one_and_a_copied_folder(s3: S3, tmp_path: Path) -> None:
    _make(tmp_path / "local")
    s3.put(tmp_path / "local", "new")
    for seed in (1, 2, 2):
        _make(s3.url("new"), seed)
        version = version_name(s3.read("new/manifest.json"))
        assert {name.partition("/")[0] for name in s3.keys("new")} == {"manifest.json", version}
        assert len(open_store(s3.url("new"))) == read_manifest(s3.url("new")).splits["train"].rows


def test_the_file_of_bad_rows_is_a_part_of_a_dataset_at_a_url(s3: S3, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user_id,item_id\n1,2\nbad\n1,3\n")
    log = TabularConfig(events=(tmp_path / "log.csv",), timestamp_unit="row")
    options: dict[str, Any] = {"custom": log, "on_error": "skip", "rejects": True, "split": "none"}
    for _ in range(2):  # so that it is replaced, without `overwrite`
        preprocess(PreprocessConfig(dataset="custom", out=s3.url("with-rejects"), allow_empty=True, **options))
    content = s3.read(f"with-rejects/{version_name(s3.read('with-rejects/manifest.json'))}/rejects.csv")
    assert content == b'file,line,reason,text\n"log.csv",3,"expected 2 fields, got 1","bad"\n'


def test_where_nothing_may_be_deleted_the_new_version_is_complete_and_the_old_one_stays(
    s3: S3, caplog: pytest.LogCaptureFixture
) -> None:
    refused = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:DeleteObject",
        "Resource": f"arn:aws:s3:::{BUCKET}/kept/*",
    }
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
        versions.append(version_name(s3.read("kept/manifest.json")))
        assert {name.partition("/")[0] for name in s3.keys("kept")} == {"manifest.json", *versions}
        assert len(open_store(s3.url("kept"))) == read_manifest(s3.url("kept")).splits["train"].rows


@pytest.mark.parametrize("num_uploaded", [1, 3])
def test_a_killed_upload_leaves_the_old_dataset_and_the_next_one_completes_it(
    s3: S3, tmp_path: Path, num_uploaded: int
) -> None:
    key = f"killed-{num_uploaded}"
    url = s3.url(key)
    _make(url)
    old = s3.read(f"{key}/manifest.json")
    command = [sys.executable, "-c", _KILLED, url, str(num_uploaded)]
    killed = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=280)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert s3.read(f"{key}/manifest.json") == old
    folders = {name.partition("/")[0] for name in s3.keys(key)} - {"manifest.json"}
    assert len(folders) == 2
    for split, info in read_manifest(url).splits.items():
        assert len(open_store(url, split)) == len(open_stream(url, split).read(0, info.rows)) == info.rows
    command[-1] = "none"
    assert subprocess.run(command, cwd="/", timeout=280).returncode == 0
    assert s3.read(f"{key}/manifest.json") != old
    version = version_name(s3.read(f"{key}/manifest.json"))
    assert version in folders
    assert {name.partition("/")[0] for name in s3.keys(key)} == {"manifest.json", version}


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


def test_a_missing_bucket_is_reported_before_the_work_begins(s3: S3) -> None:
    stages: list[str] = []
    config = PreprocessConfig(dataset="synthetic", out=s3.url("out", bucket="missing"), synthetic=_SYNTHETIC)
    with pytest.raises(DataError, match=r"^s3://missing/out cannot be written: there is no such bucket") as raised:
        preprocess(config, on_stage=stages.append)
    assert SECRET not in str(raised.value)
    assert not stages


def test_a_file_url_is_written_like_a_folder(tmp_path: Path) -> None:
    _make(f"file://{tmp_path}/out")
    assert (tmp_path / "out" / "train" / "part-00000.parquet").exists()
    assert os.listdir(tmp_path) == ["out"]
