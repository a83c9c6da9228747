"""Replacing the folder of a dataset, in particular by runs that are killed or must not replace it."""

import errno
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from evenrank.core.errors import DataError
from evenrank.datasets.schema import read_manifest, sha256_of
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess
from evenrank.preprocess.output import replace


def _config(out: Path, num_users: int = 10) -> PreprocessConfig:
    return PreprocessConfig(dataset="synthetic", out=out, synthetic=SyntheticConfig(num_users=num_users))


def _preprocess_and_wait_before_replacing(out: Path, written: Connection) -> None:
    def wait(partial: Path, out: Path) -> None:
        written.send("written")
        signal.pause()

    replace._put_in_place = wait
    preprocess(PreprocessConfig(dataset="synthetic", out=out, synthetic=SyntheticConfig(num_users=20)))


def test_a_killed_run_keeps_the_old_dataset_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old = preprocess(PreprocessConfig(dataset="synthetic", out=out, synthetic=SyntheticConfig(num_users=10)))
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_preprocess_and_wait_before_replacing, args=(out, sender))
    process.start()
    sender.close()
    assert receiver.recv() == "written"  # raises EOFError if the process fails
    (out / "new.parquet").touch()  # of a run that replaces the folder while another one looks at it
    with pytest.raises(DataError, match=r"out is being written by another process; wait for it"):
        preprocess(PreprocessConfig(dataset="synthetic", out=out))
    (out / "new.parquet").unlink()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert read_manifest(out) == old
    new = preprocess(PreprocessConfig(dataset="synthetic", out=out, synthetic=SyntheticConfig(num_users=30)))
    assert read_manifest(out) == new
    assert sum(split.rows for split in new.splits.values()) == 30
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _preprocess_when_all_are_ready(out: Path, num_users: int, ready: Barrier, results: "Queue[str]") -> None:
    ready.wait()
    try:
        preprocess(PreprocessConfig(dataset="synthetic", out=out, synthetic=SyntheticConfig(num_users=num_users)))
        results.put(str(num_users))
    except DataError as error:
        results.put(str(error))


def test_of_runs_at_the_same_time_one_writes_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_preprocess_when_all_are_ready, args=(out, num_users, ready, results))
        for num_users in (10, 20, 30)
    ]
    for process in processes:
        process.start()
    ended = [results.get(timeout=200) for _ in processes]
    for process in processes:
        process.join()
    complete = [result for result in ended if result.isdecimal()]
    assert {result for result in ended if result not in complete} <= {
        f"{out} is being written by another process; wait for it, or choose another output folder"
    }
    manifest = read_manifest(out)
    assert str(sum(split.rows for split in manifest.splits.values())) in complete
    files = [file for split in manifest.splits.values() for file in split.files]
    assert [sha256_of(out / file.path) for file in files] == [file.sha256 for file in files]
    assert {path for path in out.rglob("*") if path.is_file()} == {
        out / "manifest.json",
        *(out / f.path for f in files),
    }
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match="contains files but is not a dataset"):
        preprocess(PreprocessConfig(dataset="synthetic", out=tmp_path / "out"))
    assert (tmp_path / "out" / "thesis.tex").read_text() == "precious"


def test_a_folder_of_another_program_with_a_manifest_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "extension"
    out.mkdir()
    (out / "manifest.json").write_text('{"manifest_version": 3, "name": "not ours"}')
    with pytest.raises(DataError, match="extension contains files but is not a dataset"):
        preprocess(PreprocessConfig(dataset="synthetic", out=out))
    config = PreprocessConfig(dataset="synthetic", out=tmp_path / "data", synthetic=SyntheticConfig(num_users=5))
    preprocess(config)
    (tmp_path / "data" / "notes.txt").write_text("precious")
    with pytest.raises(DataError, match=r"data contains 'notes.txt' besides a dataset; move it away"):
        preprocess(config)
    assert (tmp_path / "data" / "notes.txt").read_text() == "precious"


def test_a_dataset_of_another_schema_version_is_replaced(tmp_path: Path) -> None:
    config = PreprocessConfig(dataset="synthetic", out=tmp_path / "data", synthetic=SyntheticConfig(num_users=5))
    preprocess(config)
    path = tmp_path / "data" / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 0'))
    preprocess(config)
    assert read_manifest(tmp_path / "data").schema_version == 1


def test_a_symbolic_link_is_kept_and_its_target_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for num_users in (10, 20):
        out = tmp_path / "link"
        preprocess(PreprocessConfig(dataset="synthetic", out=out, synthetic=SyntheticConfig(num_users=num_users)))
    assert sum(split.rows for split in read_manifest(tmp_path / "real").splits.values()) == 20
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="is or contains the current folder"):
        preprocess(PreprocessConfig(dataset="synthetic", out=Path(".")))


def test_a_leftover_partial_output_is_removed_even_if_it_is_a_file(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").write_text("left behind")
    preprocess(PreprocessConfig(dataset="synthetic", out=tmp_path / "out", synthetic=SyntheticConfig(num_users=5)))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_renames_replace_a_dataset_where_the_system_has_no_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replace, "_exchange_folders", lambda first, second: False)
    for num_users in (10, 20):
        preprocess(
            PreprocessConfig(dataset="synthetic", out=tmp_path / "out", synthetic=SyntheticConfig(num_users=num_users))
        )
    assert sum(split.rows for split in read_manifest(tmp_path / "out").splits.values()) == 20
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_appears_during_the_exchange_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    old = preprocess(_config(out))
    exchange = replace._exchange_folders
    late = iter(["late.txt"])  # written once, after the last check before the exchange

    def exchange_late(first: Path, second: Path) -> bool:
        for name in late:
            (out / "train" / name).write_text("precious")
        return exchange(first, second)

    monkeypatch.setattr(replace, "_exchange_folders", exchange_late)
    with pytest.raises(DataError, match=r"out contains 'train/late.txt' besides a dataset; move it away"):
        preprocess(_config(out, num_users=9))
    assert read_manifest(out) == old
    assert (out / "train" / "late.txt").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_old_dataset_that_turns_unreadable_during_the_exchange_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    old = preprocess(_config(out))

    def fail(folder: Path) -> str | None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(replace, "find_foreign", fail)  # called after the exchange
    with pytest.raises(DataError, match=r"out could not be written: Permission denied; it is unchanged"):
        preprocess(_config(out, num_users=9))
    assert read_manifest(out) == old
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_appears_during_the_work_is_found_before_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    old = preprocess(_config(out))
    monkeypatch.setattr(replace, "_exchange_folders", None)  # calling it would fail

    def write(stage: str) -> None:
        (out / "late").mkdir(exist_ok=True)

    with pytest.raises(DataError, match=r"out contains 'late' besides a dataset"):
        preprocess(_config(out), on_stage=write)
    assert read_manifest(out) == old
    assert (out / "late").is_dir()


def test_an_exchange_that_fails_leaves_the_old_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    old = preprocess(_config(out))

    def fail(first: Path, second: Path) -> bool:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(replace, "_exchange_folders", fail)
    with pytest.raises(DataError, match=r"out could not be written: Device or resource busy; it is unchanged"):
        preprocess(_config(out))
    assert read_manifest(out) == old
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("content", [None, "kept"])
def test_what_is_in_place_of_the_lock_file_is_not_touched(tmp_path: Path, content: str | None) -> None:
    lock, precious = tmp_path / ".out.lock", tmp_path / "precious"
    precious.write_text("kept")
    if content is None:
        lock.symlink_to(precious)
    else:
        lock.write_text(content)
    with pytest.raises(DataError, match=r"out could not be written: .*; it is unchanged") as raised:
        preprocess(_config(tmp_path / "out"))
    assert "\n" not in str(raised.value)
    assert lock.read_text() == precious.read_text() == "kept"
