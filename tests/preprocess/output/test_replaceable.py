"""What may be replaced: nothing but what evenrank wrote."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evenrank.core.errors import DataError
from evenrank.datasets.store import open_store
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess
from evenrank.preprocess.output import replace
from evenrank.preprocess.output.replace import check_replaceable, find_foreign


def _write(path: Path) -> None:
    path.write_text("precious")


def _link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def _bind(path: Path) -> None:
    # The path of a socket has at most 107 bytes, those of pytest can be longer.
    with socket.socket(socket.AF_UNIX) as bound:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            bound.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Return a dataset with requests that was also opened, so that it has a cache."""
    out = tmp_path / "data"
    preprocess(PreprocessConfig(dataset="synthetic", out=out, synthetic=SyntheticConfig(num_users=20)))
    open_store(out)
    return out


@pytest.mark.parametrize("make", [_write, _link, os.mkfifo, os.mkdir, _bind], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "place", ["x", ".hidden", "train/notes.csv", "train/.hidden", "eval/part-00009.parquet", ".cache/x", ".cache/E/x"]
)
def test_anything_of_the_users_stops_the_run_before_the_work(
    dataset: Path, place: str, make: Callable[[Path], None]
) -> None:
    entry = next(path for path in (dataset / ".cache").iterdir() if path.is_dir()).name
    place = place.replace("E", entry)
    make(dataset / place)
    before = sorted(dataset.rglob("*"))
    stages: list[str] = []
    with pytest.raises(
        DataError, match=f"data contains '{place}' besides a dataset; move it away, or choose"
    ) as raised:
        preprocess(PreprocessConfig(dataset="synthetic", out=dataset), on_stage=stages.append)
    assert "\n" not in str(raised.value)
    assert not stages
    assert sorted(dataset.rglob("*")) == before


@pytest.mark.parametrize("name", ["train", "train/part-00000.parquet", ".cache", "manifest.json"])
def test_a_link_to_a_part_of_a_dataset_is_not_replaced(dataset: Path, tmp_path: Path, name: str) -> None:
    (dataset / name).rename(tmp_path / "elsewhere")
    (dataset / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=f"data contains '{name}' besides a dataset"):
        check_replaceable(dataset)


def test_a_dataset_with_the_caches_of_this_and_the_last_version_is_replaceable(dataset: Path) -> None:
    entry = next(path for path in (dataset / ".cache").iterdir() if path.is_dir())
    partial = entry.with_name(f"{entry.name}.partial")
    shutil.copytree(entry, partial)  # left by a process that was killed
    old = entry.with_name(entry.name.replace("-v3", "-v2"))
    old.mkdir()
    (old / "item_id.npy").touch()
    check_replaceable(dataset)
    assert find_foreign(dataset) is None


def test_files_that_a_manifest_lists_elsewhere_do_not_count(dataset: Path, tmp_path: Path) -> None:
    manifest = dataset / "manifest.json"
    manifest.write_text(manifest.read_text().replace("train/part-00000.parquet", "train/../../precious"))
    (tmp_path / "precious").touch()
    with pytest.raises(DataError, match=r"data contains 'train' besides a dataset|'train/part-00000.parquet' besides"):
        check_replaceable(dataset)


_REPLACE = """
import sys
from pathlib import Path
from evenrank.core.errors import DataError
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

config = PreprocessConfig(dataset="synthetic", out=Path(sys.argv[1]), synthetic=SyntheticConfig(num_users=20))
try:
    preprocess(config, on_stage=print)
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize("mount", ["mount -t tmpfs tmpfs {}", "mount --bind {} {}"])
@pytest.mark.parametrize(("place", "fault"), [(".", "is a mount point"), ("train", "contains the mount point train")])
def test_a_mount_point_is_found_before_the_work(dataset: Path, mount: str, place: str, fault: str) -> None:
    # A mount namespace of its own, so that nothing has to be unmounted.
    unshare = ["unshare", "--mount", "--user", "--map-root-user", "sh", "-c"]
    mount = mount.replace("{}", str(dataset / place))
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting needs user and mount namespaces")
    code = [sys.executable, "-c", _REPLACE]
    result = subprocess.run(
        [*unshare, f'{mount} && exec "$@"', "sh", *code, str(dataset)], capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines() == [
        f"{dataset} {fault}, which cannot be replaced; choose a folder that is not mounted"
    ], result.stderr


def test_where_mounts_are_not_listed_the_folder_itself_is_checked(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: path == dataset)
    monkeypatch.setattr(replace, "_MOUNTS", dataset / "missing")
    assert replace._first_mount(dataset) == dataset
    assert replace._first_mount(dataset / "train") is None
