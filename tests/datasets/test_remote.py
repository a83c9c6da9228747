import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets import open_store, read_manifest
from evenrank.datasets.distributions import Histogram
from evenrank.datasets.schema import version_name
from evenrank.datasets.stream import open_stream
from tests.datasets.crafted import copy_dataset
from tests.s3_server import BUCKET, S3, SECRET

_OPEN = "import sys; from evenrank.datasets import open_store; print(len(open_store(sys.argv[1])), flush=True)"


# Is killed when it begins to write the copy of a split, under the lock.
_KILLED = """
import os, signal, sys
from evenrank.datasets import open_store
def kill(event, arguments):
    if event == "open" and "-train-" in str(arguments[0]) and ".partial" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
open_store(sys.argv[1])
"""


def _upload(s3: S3, dataset: Path, key: str) -> str:
    """Put a dataset where an upload by `evenrank preprocess` puts it, and return the key of its version."""
    version = f"{key}/{version_name((dataset / 'manifest.json').read_bytes())}"
    s3.put(dataset, version)
    s3.put(dataset / "manifest.json", f"{key}/manifest.json")
    return version


@pytest.mark.parametrize("is_copied_folder", [False, True])
def test_both_layouts_are_read_like_the_local_folder(
    dataset: Path, s3: S3, is_copied_folder: bool, tmp_path: Path
) -> None:
    key = f"layout-{is_copied_folder}"
    if is_copied_folder:
        s3.put(dataset, key)
    else:
        _upload(s3, dataset, key)
    url = s3.url(key)
    assert read_manifest(url) == read_manifest(Path(url)) == read_manifest(dataset)
    for split in ("train", "eval"):
        expected, store = open_store(dataset, split), open_store(url, split)
        read = open_stream(url, split).read(0, len(expected))
        for found in (store, read):
            assert found.offsets.tolist() == expected.offsets.tolist()
            for name, values in expected.columns.items():
                assert np.array_equal(found.columns[name], values)
    assert pickle.loads(pickle.dumps(store)).columns["user_id"].tolist() == store.columns["user_id"].tolist()
    assert store.folder is not None
    assert store.folder.parent == tmp_path / "home" / ".cache" / "evenrank"
    assert SECRET not in f"{store} {Histogram.read(url)}"


def test_file_urls_are_folders(dataset: Path) -> None:
    store = open_store(f"file://{dataset}")
    assert store.folder == dataset
    assert len(open_stream(f"file://{dataset}", "train").read(0, 5)) == 5
    assert read_manifest(f"file://{dataset}") == store.manifest


def test_items_are_counted_in_train_also_of_another_split_at_a_url(dataset: Path, s3: S3) -> None:
    _upload(s3, dataset, "counts")
    counts = open_store(s3.url("counts"), "eval").item_counts()
    expected = np.bincount(open_store(dataset).columns["item_id"], minlength=len(counts))
    assert counts.tolist() == expected.tolist()


def test_processes_that_open_a_url_at_once_fetch_it_once(dataset: Path, s3: S3) -> None:
    version = _upload(s3, dataset, "at-once")
    command = [sys.executable, "-c", _OPEN, s3.url("at-once")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") for _ in range(2)]
    rows = [int(process.communicate(timeout=280)[0]) for process in processes]
    assert rows == [read_manifest(dataset).splits["train"].rows] * 2
    assert s3.num_reads(f"{version}/train/part-00000.parquet") == 1
    assert s3.num_reads(f"{version}/eval/part-00000.parquet") == 0


def test_a_process_that_is_killed_while_it_fetches_blocks_no_other(dataset: Path, s3: S3, tmp_path: Path) -> None:
    _upload(s3, dataset, "killed")
    command = [sys.executable, "-c", _KILLED, s3.url("killed")]
    killed = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=280)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list((tmp_path / "home").rglob("*.partial"))
    store = open_store(s3.url("killed"))
    assert store.columns["item_id"].tolist() == open_store(dataset).columns["item_id"].tolist()
    assert not list((tmp_path / "home").rglob("*.partial"))


@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_a_damaged_copy_is_fetched_again(dataset: Path, s3: S3, damage: str) -> None:
    version = _upload(s3, dataset, damage)
    url = s3.url(damage)
    store = open_store(url)
    expected = store.columns["item_id"].tolist()
    assert store.folder is not None
    (column,) = store.folder.glob(".cache/*/events/item_id.npy")
    if damage == "truncated":
        column.write_bytes(column.read_bytes()[:-8])
    else:
        column.unlink()
    assert open_store(url).columns["item_id"].tolist() == expected
    assert s3.num_reads(f"{version}/train/part-00000.parquet") == 2


def test_what_cannot_be_read_is_reported_with_the_url_and_nothing_stays(dataset: Path, s3: S3, tmp_path: Path) -> None:
    version = _upload(s3, dataset, "faulty")
    with s3.files.open_output_stream(f"{BUCKET}/{version}/train/part-00000.parquet") as file:
        file.write(b"other data")
    with s3.files.open_output_stream(f"{BUCKET}/malformed/manifest.json") as file:
        file.write(b"\xff")
    for url, split, message in (
        (s3.url("faulty"), "train", f"s3://{BUCKET}/{version}/train/part-00000.parquet does not have the SHA-256"),
        (s3.url("faulty"), "test", f"s3://{BUCKET}/faulty has no split 'test'; known: eval, train"),
        (s3.url("malformed"), "train", f"s3://{BUCKET}/malformed/manifest.json is not valid JSON"),
        (s3.url("nothing"), "train", f"s3://{BUCKET}/nothing is not a dataset: it contains no manifest.json"),
    ):
        with pytest.raises(DataError, match=f"^{message}") as raised:
            open_store(url, split)
        assert SECRET not in str(raised.value)
    assert not list((tmp_path / "home").rglob("*.parquet"))
    assert not list((tmp_path / "home").rglob("*.partial"))
    with pytest.raises(ConfigError, match=f"columns are for a folder of Parquet files, not for s3://{BUCKET}/faulty"):
        open_store(s3.url("faulty"), columns={"item_id": "item_id"})


def test_a_dataset_that_replaces_another_is_found_and_the_store_keeps_its_own(
    dataset: Path, rich_dataset: Path, s3: S3, tmp_path: Path
) -> None:
    _upload(s3, dataset, "replaced")
    before = open_store(s3.url("replaced"))
    _upload(s3, copy_dataset(rich_dataset, tmp_path / "rich"), "replaced")
    assert open_store(s3.url("replaced")).manifest == read_manifest(rich_dataset)
    assert before.manifest == read_manifest(dataset)
    assert before.columns["item_id"].tolist() == open_store(dataset).columns["item_id"].tolist()
