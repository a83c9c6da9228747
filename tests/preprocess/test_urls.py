"""Logs and datasets at URLs, on a server with the S3 protocol; see golden/files.toml for files that URLs lead to."""

import json
import logging
import os
import re
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.storage import Remote
from evenrank.datasets import open_store, read_manifest
from evenrank.datasets.distributions import Lognormal
from evenrank.datasets.schema import version_name
from evenrank.datasets.stream import open_stream
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess
from evenrank.preprocess.engine import UnfinishedError
from evenrank.preprocess.job import Job
from tests.preprocess.decoded import bytes_in, number, of_log, synthetic, write_log
from tests.s3_server import BUCKET, S3, SECRET


def _make_another_and_die(url: str, num_uploaded: int) -> None:
    def on_stage(stage: str) -> None:
        if stage.startswith(f"uploaded {num_uploaded} of 3 files"):
            os.kill(os.getpid(), signal.SIGKILL)

    preprocess(synthetic(url, 40, seed=2), on_stage=on_stage)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _make(out: Path | str, seed: int = 1, *, overwrite: bool = False) -> None:
    drawn = SyntheticConfig(num_users=40, lengths=Lognormal(mean=9, std=9, low=1, high=40))
    preprocess(PreprocessConfig(dataset="synthetic", out=out, seed=seed, synthetic=drawn, overwrite=overwrite))


def _check_versions(s3: S3, key: str, earlier: set[str]) -> str:
    """Check that a dataset is there as a whole, and which earlier versions are; return its version."""
    version = version_name(s3.read(f"{key}/manifest.json"))
    assert {name.partition("/")[0] for name in s3.keys(key)} == {"manifest.json", version, *earlier}
    for split, info in read_manifest(s3.url(key)).splits.items():
        assert len(open_store(s3.url(key), split)) == info.rows
        assert len(open_stream(s3.url(key), split).read(0, info.rows)) == info.rows
    return version


def test_a_dataset_at_a_url_is_the_local_one_in_a_folder_of_its_version(s3: S3, tmp_path: Path) -> None:
    _make(f"file://{tmp_path}/local")
    _make(s3.url("equal"))
    local = bytes_in(tmp_path / "local")
    expected = {f"{version_name(local['manifest.json'])}/{name}": content for name, content in local.items()}
    expected["manifest.json"] = local["manifest.json"]
    assert {name: s3.read(f"equal/{name}") for name in s3.keys("equal")} == expected
    assert os.listdir(tmp_path) == ["local"]  # no temporary folders
    s3.put(tmp_path / "local", "equal")  # a copied folder is replaced, too
    for seed in (1, 2, 2):
        _make(s3.url("equal"), seed)
        _check_versions(s3, "equal", set())


def test_where_nothing_may_be_deleted_the_new_version_is_complete_and_the_old_one_stays(
    s3: S3, caplog: pytest.LogCaptureFixture
) -> None:
    resource = f"arn:aws:s3:::{BUCKET}/kept/*"
    refused = {"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject", "Resource": resource}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [refused]}).encode()
    url, headers = f"http://127.0.0.1:{s3.port}/{BUCKET}?policy", {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, policy, headers, method="PUT")).close()
    versions: set[str] = set()
    for seed in (1, 2, 3):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            _make(s3.url("kept"), seed)
        stay = [f"the dataset is complete, but s3://{BUCKET}/kept/{version} cannot be deleted" for version in versions]
        assert [record.message.partition(": ")[0] for record in caplog.records] == sorted(stay)
        versions.add(_check_versions(s3, "kept", versions))


@pytest.mark.processes
def test_a_killed_upload_leaves_the_old_dataset_and_the_next_one_completes_it(s3: S3) -> None:
    for num_uploaded in (1, 3):
        url = s3.url(key := f"killed-{num_uploaded}")
        _make(url)
        old = s3.read(f"{key}/manifest.json")
        killed = get_context("spawn").Process(target=_make_another_and_die, args=(url, num_uploaded))
        killed.start()
        killed.join()
        assert killed.exitcode == -signal.SIGKILL
        assert s3.read(f"{key}/manifest.json") == old
        (other,) = {name.partition("/")[0] for name in s3.keys(key)} - {"manifest.json", version_name(old)}
        _check_versions(s3, key, {other})
        preprocess(synthetic(url, 40, seed=2))
        assert _check_versions(s3, key, set()) == other


def test_what_is_no_dataset_is_only_replaced_on_demand(s3: S3, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"precious")
    for key, name in (("photo", "photo.jpg"), ("version", "0123456789abcdef/photo.jpg")):
        s3.put(tmp_path / "photo.jpg", f"{key}/{name}")
        for out, overwrite, message in (
            (key, False, f"{key} contains {name!r}, which is no part"),
            (f"{key}/{name}", True, f"{key}/{name} is a file; choose another output folder"),
        ):
            with pytest.raises(DataError, match=re.escape(f"s3://{BUCKET}/{message}")):
                _make(s3.url(out), overwrite=overwrite)
            assert s3.keys(key) == {name}
        _make(s3.url(key), overwrite=True)
        _check_versions(s3, key, set())


def test_errors_name_urls_without_secrets(s3: S3, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", [(1, 2, 0)])
    for key in ("good/log.csv", "in/log.csv"):
        s3.put(log, key)
    preprocess(of_log(s3.url("made"), Path(s3.url("good")), ids="dense"))
    damaged = next(name for name in s3.keys("made") if name.endswith("vocabulary_user_id.parquet"))
    s3.put(log, f"made/{damaged}")
    here, stages = f"s3://{BUCKET}", list[str]()
    cases: list[tuple[str, Path | str, dict[str, Any], str]] = [
        ("out/../x.csv", tmp_path / "out", {}, f"{here}/out/../x.csv has a part that is no name of a file"),
        ("good", tmp_path / "out", {"vocabulary": Path(s3.url("made"))}, f"{here}/made/{damaged} cannot be read"),
        ("in", s3.url("in"), {}, f"{here}/in/log.csv is read, and would be replaced with {here}/in;"),
        ("in", s3.url(""), {}, f"{here}/in/log.csv is read, and would be replaced with {here}"),
        ("in", s3.url("out", bucket="missing"), {}, "s3://missing/out cannot be written: there is no such bucket"),
    ]
    for events, out, options, message in cases:
        stages.clear()
        with pytest.raises((ConfigError, DataError), match=f"^{re.escape(message)}") as raised:
            preprocess(of_log(out, Path(s3.url(events)), overwrite=True, **options), on_stage=stages.append)
        assert SECRET not in str(raised.value)
    assert not stages  # before the work begins
    assert s3.keys("in") == {"log.csv"}


def test_copies_that_a_killed_run_left_count_only_if_they_are_what_is_there_now(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bucket := tmp_path / tmp_path.name).mkdir()
    for name in "abc":
        write_log(bucket / f"{name}.csv", [(name, 2, 0)])
    s3.put(bucket, bucket.name)
    config, stages = of_log(tmp_path / "out", Path(s3.url(f"{bucket.name}/*.csv"))), list[str]()

    def end(job: Job, workers: object) -> None:
        raise UnfinishedError("the disk is full")

    with monkeypatch.context() as patch:  # after all files are fetched
        patch.setattr(Job, "run", end)
        with pytest.raises(UnfinishedError):
            preprocess(config, on_stage=stages.append)
    assert f"fetching s3://{BUCKET}/{bucket.name}/b.csv, file 2 of 3" in stages
    assert not any(SECRET in stage or str(tmp_path) in stage for stage in stages)
    (bucket / "a.csv").unlink()  # compacted into d.csv
    s3.files.delete_file(f"{BUCKET}/{bucket.name}/a.csv")
    for name, user in (("b", "x"), ("d", "a")):  # the former within the same second, perhaps, and of the same size
        s3.put(write_log(bucket / f"{name}.csv", [(user, 2, 0)]), f"{bucket.name}/{name}.csv")
    preprocess(config)
    number(tmp_path / "expected", Path(f"{bucket}/*.csv"))
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "expected")
    assert s3.num_reads(f"{bucket.name}/c.csv") == 1  # which is as it was


def test_an_object_that_is_replaced_while_it_is_fetched_is_an_error(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put(write_log(tmp_path / "log.csv", [(1, 2, 0)]), "late/log.csv")
    chunks = Remote.chunks

    def replaced(remote: Remote) -> Iterator[bytes]:
        yield from chunks(remote)
        s3.put(write_log(tmp_path / "log.csv", [(1, 3, 0)]), "late/log.csv")

    monkeypatch.setattr(Remote, "chunks", replaced)
    with pytest.raises(DataError, match=rf"^s3://{BUCKET}/late/log.csv was replaced while it was fetched; run it aga"):
        number(tmp_path / "out", Path(s3.url("late/log.csv")))
