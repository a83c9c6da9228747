"""How a dataset takes the place of another: whole or not at all, and of nothing else."""

import dataclasses
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenrank.core.errors import DataError
from evenrank.datasets import open_store
from evenrank.datasets.schema import read_manifest, sha256_of
from evenrank.preprocess import Filters, PreprocessConfig, SyntheticConfig, preprocess, replace
from tests.deep_folder import deep_folder
from tests.preprocess.decoded import bytes_in


def _config(out: Path | str, num_users: int = 10) -> PreprocessConfig:
    return PreprocessConfig(dataset="synthetic", out=out, synthetic=SyntheticConfig(num_users=num_users))


def _preprocess_and_wait_before_replacing(out: Path, written: Connection) -> None:
    def wait(dataset: Path, out: Path, old: Path) -> None:
        written.send("written")
        signal.pause()

    replace._put_in_place = wait
    preprocess(_config(out, num_users=20))


def test_a_killed_run_keeps_the_old_dataset_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old = preprocess(_config(out))
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_preprocess_and_wait_before_replacing, args=(out, sender))
    process.start()
    sender.close()
    assert receiver.recv() == "written"  # raises EOFError if the process fails
    with pytest.raises(DataError, match=r"out is being written by another process; wait for it"):
        preprocess(_config(out))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert read_manifest(out) == old
    new = preprocess(_config(out, num_users=30))
    assert read_manifest(out) == new
    assert sum(split.rows for split in new.splits.values()) == 30
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_run_leaves_is_put_back_or_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old = preprocess(_config(out))
    out.rename(tmp_path / ".out.old")  # between the two renames
    (tmp_path / ".out.partial").write_text("left behind")
    with pytest.raises(DataError, match="no users are left; 10 users left out by filters; relax"):
        preprocess(dataclasses.replace(_config(out), filters=Filters(min_length=10**6)))
    assert read_manifest(out) == old
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_of_runs_at_the_same_time_one_writes_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    ready = threading.Barrier(3)

    def run(num_users: int) -> str:
        ready.wait()
        try:
            preprocess(_config(out, num_users))
        except DataError as error:
            return str(error)
        return str(num_users)

    with ThreadPoolExecutor(3) as threads:
        ended = list(threads.map(run, (10, 20, 30)))
    complete = [result for result in ended if result.isdecimal()]
    refused = f"{out} is being written by another process; wait for it, or choose another folder"
    assert complete
    assert {*ended} - {*complete} <= {refused}
    manifest = read_manifest(out)
    assert str(sum(split.rows for split in manifest.splits.values())) in complete
    files = [file for split in manifest.splits.values() for file in split.files]
    assert [sha256_of(out / file.path) for file in files] == [file.sha256 for file in files]
    assert bytes_in(out).keys() == {"manifest.json", *(file.path for file in files)}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("place", ["notes.txt", "train/notes.csv", "eval/part-00009.parquet", "manifest.json"])
def test_a_folder_with_anything_else_is_only_replaced_on_demand(tmp_path: Path, place: str) -> None:
    for is_link in (False, True):
        out, precious = tmp_path / f"out {is_link}", tmp_path / "precious"
        precious.mkdir(exist_ok=True)
        if place == "manifest.json":  # of another program
            out.mkdir()
        else:
            preprocess(_config(out))
            open_store(out)  # whose cache belongs to the dataset
            preprocess(_config(out))
        if is_link:
            (out / place).symlink_to(precious)
        else:
            (out / place).write_text('{"manifest_version": 3}')
        before = sorted(out.rglob("*"))
        stages: list[str] = []
        with pytest.raises(DataError, match=f"contains '{place}', which is no part of a dataset; .*--overwrite$"):
            preprocess(_config(out), on_stage=stages.append)
        assert not stages  # found before the work
        assert sorted(out.rglob("*")) == before
        preprocess(dataclasses.replace(_config(out), overwrite=True))
        assert {path.name for path in out.iterdir()} == {"train", "eval", "manifest.json"}
        assert precious.is_dir()


def test_the_current_folder_and_loops_of_links_are_never_replaced(here: Path) -> None:
    (here / "loop").symlink_to(here / "loop")
    for out, message in (
        (".", "is or contains the current folder"),
        ("loop", "^/.*/loop is a loop of links; choose another output folder$"),
        ("loop/out", "^/.*/loop/out could not be written: .*; it is unchanged"),
    ):
        with pytest.raises(DataError, match=message):
            preprocess(dataclasses.replace(_config(Path(out)), overwrite=True))
    with pytest.raises(DataError, match=r"^loop cannot be read: Too many levels of symbolic links; check"):
        preprocess(dataclasses.replace(_config("out"), split="file:loop"))
    assert [path.name for path in here.iterdir()] == ["loop"]


def test_a_dataset_of_another_schema_version_behind_a_link_is_replaced(tmp_path: Path) -> None:
    link, manifest = tmp_path / "link", tmp_path / "real" / "manifest.json"
    link.symlink_to(tmp_path / "real")
    preprocess(_config(link))
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 0'))
    preprocess(_config(link, num_users=20))
    assert sum(split.rows for split in read_manifest(tmp_path / "real").splits.values()) == 20
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_file_that_appears_during_the_work_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old = preprocess(_config(out))
    with pytest.raises(DataError, match=r"out contains 'late', which is no part of a dataset"):
        preprocess(_config(out), on_stage=lambda stage: (out / "late").touch())
    assert read_manifest(out) == old
    assert (out / "late").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("failing", ["", "dataset", "out"])
def test_a_dataset_is_there_after_each_step_of_its_replacement_and_after_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool, failing: str
) -> None:
    out, rename, found = tmp_path / "out", Path.rename, []
    old = preprocess(_config(out))

    def rename_and_look(path: Path, target: Path) -> Path:
        if path.name == failing:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        rename(path, target)
        found.append(read_manifest(out) if out.exists() else None)
        return target

    if not can_exchange:
        monkeypatch.setattr(replace, "ctypes", SimpleNamespace(CDLL=lambda _: None))  # a system without such a call
    monkeypatch.setattr(Path, "rename", rename_and_look)
    if failing == "dataset" or (failing == "out" and not can_exchange):
        with pytest.raises(DataError, match=r"out could not be written: Device or resource busy; it is unchanged"):
            preprocess(_config(out, num_users=20))
        assert read_manifest(out) == old
    else:
        assert read_manifest(out) != preprocess(_config(out, num_users=20)) == read_manifest(out)
        assert (None in found) is not can_exchange  # where the next run puts the old one back
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Replaces a dataset that was made read-only, twice, as a user whom that stops.
_READ_ONLY = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from evenrank.preprocess.replace import replace_dataset
def write(run):
    (run / "dataset" / "train").mkdir(parents=True)
    (run / "dataset" / "train" / "part").write_text("rows")
    (run / "dataset" / "manifest.json").write_text("{}")
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
for _ in range(3):
    replace_dataset(Path("out").absolute(), write, overwrite=True)
    for path in (*Path("out").rglob("*"), Path("out")):
        path.chmod(0o555)
    print(os.listdir())
"""


@pytest.mark.processes
def test_a_read_only_dataset_is_replaced_and_removed() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        command = [sys.executable, "-P", "-c", _READ_ONLY, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("['out']\n" * 3, "")


def test_what_is_in_place_of_the_lock_file_is_not_touched(tmp_path: Path) -> None:
    lock, precious = tmp_path / ".out.lock", tmp_path / "precious"
    precious.write_text("kept")
    for is_link in (True, False):
        lock.symlink_to(precious) if is_link else lock.write_text("kept")
        with pytest.raises(DataError, match=r"\A[^\n]*out could not be written: [^\n]*; it is unchanged[^\n]*\Z"):
            preprocess(_config(tmp_path / "out"))
        assert lock.read_text() == precious.read_text() == "kept"
        lock.unlink()


def test_folders_of_a_dataset_and_those_in_its_place_may_be_nested_deeper_than_functions(tmp_path: Path) -> None:
    with deep_folder(tmp_path) as out:
        preprocess(_config(out))
        with pytest.raises(DataError, match=r"/d contains 'd/d/.*/part-00000\.parquet', which is no part of a dataset"):
            preprocess(_config(tmp_path / "d"))
