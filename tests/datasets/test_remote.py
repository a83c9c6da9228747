import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evenrank.core.errors import DataError
from evenrank.datasets import open_store, read_manifest
from evenrank.datasets.distributions import Histogram
from evenrank.datasets.schema import version_name
from evenrank.datasets.stream import open_stream
from tests.s3_server import BUCKET, S3, SECRET

OPEN = "import sys; from evenrank.datasets import open_store; print(len(open_store(sys.argv[1])), flush=True)"
# Is killed when it begins to write the copy of a split, under the lock.
KILLED = """
import os, signal, sys
def kill(event, arguments):
    if event == "open" and "-train-" in str(arguments[0]) and ".partial" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
"""


def _upload(s3: S3, dataset: Path, key: str) -> str:
    """Put a dataset where an upload by `evenrank preprocess` puts it, and return the key of its version."""
    version = f"{key}/{version_name((dataset / 'manifest.json').read_bytes())}"
    s3.put(dataset, version)
    s3.put(dataset / "manifest.json", f"{key}/manifest.json")
    return version


def test_all_layouts_are_read_like_the_local_folder(dataset: Path, s3: S3, tmp_path: Path) -> None:
    s3.put(dataset, "copied")
    _upload(s3, dataset, "uploaded")
    cache = tmp_path / "home" / ".cache" / "evenrank"
    for url, place in {s3.url("copied"): cache, s3.url("uploaded"): cache, f"file://{dataset}": tmp_path}.items():
        assert read_manifest(url) == read_manifest(Path(url)) == read_manifest(dataset)
        for split in ("train", "eval"):
            expected, store = open_store(dataset, split), open_store(url, split)
            for found in (store, open_stream(url, split).read(0, len(expected)), pickle.loads(pickle.dumps(store))):
                assert found.offsets.tolist() == expected.offsets.tolist()
                for name, values in expected.columns.items():
                    assert np.array_equal(found.columns[name], values)
        assert store.folder is not None
        assert store.folder.parent == place
        assert SECRET not in f"{store} {Histogram.read(url)}"
        counts = store.item_counts()  # in train, also of another split
        assert counts.tolist() == np.bincount(open_store(dataset).columns["item_id"], minlength=len(counts)).tolist()


def test_processes_that_open_a_url_at_once_fetch_it_once_also_after_one_was_killed_or_a_copy_was_damaged(
    dataset: Path, s3: S3, tmp_path: Path
) -> None:
    url, home = s3.url("at-once"), tmp_path / "home"
    path = f"{_upload(s3, dataset, 'at-once')}/train/part-00000.parquet"
    killed = subprocess.run([sys.executable, "-c", KILLED + OPEN, url], cwd="/", timeout=280)
    assert (killed.returncode, len([*home.rglob("*.partial")])) == (-signal.SIGKILL, 1)
    before, command = s3.num_reads(path), [sys.executable, "-c", OPEN, url]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") for _ in range(2)]
    rows = [int(process.communicate(timeout=280)[0]) for process in processes]
    assert rows == [read_manifest(dataset).splits["train"].rows] * 2
    assert (s3.num_reads(path), s3.num_reads(path.replace("train", "eval"))) == (before + 1, 0)
    assert not [*home.rglob("*.partial")]
    (column,) = home.rglob("events/item_id.npy")
    column.write_bytes(column.read_bytes()[:-8])
    assert open_store(url).columns["item_id"].tolist() == open_store(dataset).columns["item_id"].tolist()
    assert s3.num_reads(path) == before + 2
    with s3.files.open_output_stream(f"{BUCKET}/{path}") as file:
        file.write(b"other data")
    shutil.rmtree(home)
    with pytest.raises(DataError, match=f"^s3://{BUCKET}/{path} does not have the SHA-256") as raised:
        open_store(url)
    assert SECRET not in str(raised.value)
    assert not {".parquet", ".partial"} & {found.suffix for found in home.rglob("*")}
