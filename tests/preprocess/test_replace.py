"""How a dataset takes the place of another, whole or not at all; for what is no dataset, golden/malformed.toml."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenrank.core.errors import DataError
from evenrank.datasets import open_store
from evenrank.datasets.schema import read_manifest, sha256_of
from evenrank.preprocess import Filters, preprocess, replace
from tests.deep_folder import deep_folder
from tests.preprocess.decoded import bytes_in, synthetic
from tests.privileges import unprivileged


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_run_leaves_is_put_back_or_removed(tmp_path: Path) -> None:
    old = preprocess(synthetic(out := tmp_path / "out"))
    out.rename(tmp_path / ".out.old")  # between the two renames
    (tmp_path / ".out.partial").write_text("left behind")
    with pytest.raises(DataError, match="no users are left; 10 users left out by filters; relax"):
        preprocess(synthetic(out, filters=Filters(min_length=10**6)))
    assert read_manifest(out) == old
    assert _names(tmp_path) == ["out"]


def test_one_run_at_a_time_writes_a_folder(tmp_path: Path) -> None:
    out, refused = tmp_path / "new" / "out", list[str]()

    def run_too(stage: str) -> None:
        if not refused:
            with pytest.raises(DataError) as caught:
                preprocess(synthetic(out))
            refused.append(str(caught.value))

    manifest = preprocess(synthetic(out, 30), on_stage=run_too)
    assert refused == [f"{out} is being written by another process; wait for it, or choose another folder"]
    assert read_manifest(out) == manifest
    assert sum(split.rows for split in manifest.splits.values()) == 30
    files = [file for split in manifest.splits.values() for file in split.files]
    assert [sha256_of(out / file.path) for file in files] == [file.sha256 for file in files]
    assert bytes_in(out).keys() == {"manifest.json", *(file.path for file in files)}
    assert _names(out.parent) == ["out"]


def test_what_is_no_part_of_a_dataset_is_only_replaced_on_demand_and_links_never_followed(tmp_path: Path) -> None:
    out, stages = tmp_path / "out", list[str]()
    (tmp_path / "precious").mkdir()
    preprocess(synthetic(out))
    open_store(out)  # whose cache belongs to the dataset
    preprocess(synthetic(out))
    (out / "train" / "link").symlink_to(tmp_path / "precious")
    with pytest.raises(DataError, match=r"contains 'train/link', which is no part of a dataset; .*--overwrite$"):
        preprocess(synthetic(out), on_stage=stages.append)
    assert not stages  # found before the work
    old = preprocess(synthetic(out, overwrite=True))
    assert (_names(out), _names(tmp_path)) == (["eval", "manifest.json", "train"], ["out", "precious"])
    with pytest.raises(DataError, match=r"out contains 'late', which is no part of a dataset"):
        preprocess(synthetic(out, 20), on_stage=lambda stage: (out / "late").touch())  # during the work
    assert read_manifest(out) == old
    assert (out / "late").exists()


def test_a_dataset_of_another_schema_version_behind_a_link_is_replaced(tmp_path: Path) -> None:
    link, manifest = tmp_path / "link", tmp_path / "real" / "manifest.json"
    link.symlink_to(tmp_path / "real")
    preprocess(synthetic(link))
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 0'))
    assert preprocess(synthetic(link, 20)) == read_manifest(tmp_path / "real")
    assert link.is_symlink()
    assert _names(tmp_path) == ["link", "real"]


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("failing", ["", "dataset", "out"])
def test_a_dataset_is_there_after_each_step_of_its_replacement_and_after_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool, failing: str
) -> None:
    out, rename, found = tmp_path / "out", Path.rename, []
    old = preprocess(synthetic(out))

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
            preprocess(synthetic(out, 20))
        assert read_manifest(out) == old
    else:
        assert old != preprocess(synthetic(out, 20)) == read_manifest(out)
        assert (None in found) is not can_exchange  # where the next run puts the old one back
    assert _names(tmp_path) == ["out"]


def test_a_read_only_dataset_is_replaced_and_removed(tmp_path: Path) -> None:
    def write(run: Path) -> None:
        (run / "dataset" / "train").mkdir(parents=True)
        (run / "dataset" / "train" / "part").write_text("rows")
        (run / "dataset" / "manifest.json").write_text("{}")

    (folder := tmp_path / "of everybody").mkdir()
    folder.chmod(0o777)
    with unprivileged(folder):
        for _ in range(3):
            replace.replace_dataset(folder / "out", write, overwrite=True)
            assert os.listdir(folder) == ["out"]
            for path in (*folder.rglob("*"), folder / "out"):
                path.chmod(0o555)


def test_what_is_in_place_of_the_lock_file_is_not_touched(tmp_path: Path) -> None:
    lock, precious = tmp_path / ".out.lock", tmp_path / "precious"
    precious.write_text("kept")
    for is_link in (True, False):
        lock.symlink_to(precious) if is_link else lock.write_text("kept")
        with pytest.raises(DataError, match=r"\A[^\n]*out could not be written: [^\n]*; it is unchanged[^\n]*\Z"):
            preprocess(synthetic(tmp_path / "out"))
        assert lock.read_text() == precious.read_text() == "kept"
        lock.unlink()


def test_folders_of_a_dataset_and_those_in_its_place_may_be_nested_deeper_than_functions(tmp_path: Path) -> None:
    with deep_folder(tmp_path) as out:
        preprocess(synthetic(out))
        with pytest.raises(DataError, match=r"/d contains 'd/d/.*/part-00000\.parquet', which is no part of a dataset"):
            preprocess(synthetic(tmp_path / "d"))
