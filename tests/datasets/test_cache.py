"""Where unpacked columns are kept, who is trusted with them, and what happens when they cannot be written."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evenrank.core.errors import DataError
from evenrank.datasets.store import SequenceStore, open_store
from tests.datasets.crafted import copy_dataset

STRANGER = 54321  # a user id without an entry in the password database
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def dataset(small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return copy_dataset(small_dataset, tmp_path / "data")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that every user can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def _entry(store: SequenceStore) -> Path:
    base = store.offsets.base
    assert isinstance(base, np.memmap)
    return Path(str(base.filename)).parent


def _home(tmp_path: Path) -> Path:
    return tmp_path / "home" / ".cache" / "evenrank"


def test_a_cache_that_others_can_write_to_is_not_used(dataset: Path, tmp_path: Path) -> None:
    cached = _entry(open_store(dataset))
    (dataset / ".cache").chmod(0o777)
    assert _entry(open_store(dataset)) == _home(tmp_path) / cached.name
    _home(tmp_path).chmod(0o770)
    assert _entry(open_store(dataset)) == tmp_path / f"evenrank-{os.geteuid()}" / cached.name
    (tmp_path / f"evenrank-{os.geteuid()}").chmod(0o707)
    with pytest.raises(
        DataError, match=r"has no place for its unpacked columns: none of .*\.cache, .*evenrank"
    ) as error:
        open_store(dataset)
    assert "\n" not in str(error.value)


def test_a_cache_is_as_open_as_its_dataset(dataset: Path) -> None:
    dataset.chmod(0o777)
    (dataset / ".cache").mkdir()
    (dataset / ".cache").chmod(0o777)
    assert _entry(open_store(dataset)).parent == dataset / ".cache"


@only_root
def test_only_the_caches_of_this_user_of_root_and_of_the_owner_are_trusted(dataset: Path, tmp_path: Path) -> None:
    cached = _entry(open_store(dataset))
    os.chown(cached, STRANGER, -1)
    assert _entry(open_store(dataset)).parent == _home(tmp_path)
    os.chown(dataset, STRANGER, -1)
    assert _entry(open_store(dataset)) == cached
    os.chown(dataset / ".cache", STRANGER + 1, -1)
    assert _entry(open_store(dataset)).parent == _home(tmp_path)


def test_a_link_in_place_of_a_lock_file_is_not_followed(dataset: Path, tmp_path: Path) -> None:
    name = _entry(open_store(dataset)).name
    shutil.rmtree(dataset / ".cache")
    (tmp_path / "precious").write_text("kept")
    (dataset / ".cache").mkdir()
    (dataset / ".cache" / f"{name}.lock").symlink_to(tmp_path / "precious")
    assert _entry(open_store(dataset)).parent == _home(tmp_path)
    assert (tmp_path / "precious").read_text() == "kept"


_AS_A_STRANGER = """
import os, sys, tempfile
from pathlib import Path
from evenrank.datasets.store import open_store

first, dataset, tempfile.tempdir, uid = *sys.argv[1:4], int(sys.argv[4])
open_store(first)  # imports everything, which the stranger might not be able to read
if os.geteuid() == 0:
    os.setgid(uid)
    os.setuid(uid)
os.environ.pop("HOME", None)
store = open_store(dataset)
print(Path(store.offsets.base.filename).parent.parent)
"""


@only_root
def test_an_unknown_user_without_a_home_folder_opens_a_dataset_of_another(
    small_dataset: Path, open_folder: Path
) -> None:
    dataset = copy_dataset(small_dataset, open_folder / "data")
    temporary = open_folder / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    unpacked_first = copy_dataset(small_dataset, open_folder / "first")  # by root, which imports everything
    command = [sys.executable, "-c", _AS_A_STRANGER, str(unpacked_first), str(dataset), str(temporary), str(STRANGER)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == str(temporary / f"evenrank-{STRANGER}"), result.stderr
    assert (temporary / f"evenrank-{STRANGER}").stat().st_mode & 0o777 == 0o700
    assert not (dataset / ".cache").exists()


# The first open imports everything; the second one is on a full disk.
_OPEN_TWICE = """
import sys
from pathlib import Path
from evenrank.core.errors import DataError
from evenrank.datasets.store import open_store

open_store(sys.argv[1])
try:
    open_store(sys.argv[2])
except DataError as error:
    print(error)
print(sorted(path.name.split("-")[-1] for path in Path(sys.argv[2], ".cache").iterdir()))
"""


def _check_full(result: subprocess.CompletedProcess[str], reason: str) -> None:
    assert result.returncode == 0, (result.returncode, result.stderr)  # a signal ends it with a negative one
    error, left = result.stdout.splitlines()
    assert error.endswith(f"could not be written: {reason}; free space, or clear that path")
    assert left == "['v3.lock']"


def test_a_full_disk_is_one_line_and_leaves_nothing(small_dataset: Path, tmp_path: Path) -> None:
    dataset = copy_dataset(small_dataset, tmp_path / "data")
    size = sum(path.stat().st_size for path in dataset.rglob("*")) // 1024 + 24  # in KB; the cache needs more
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    # A mount namespace of its own, so that nothing has to be unmounted.
    mount = f"mount -t tmpfs -o size={size}k tmpfs {mounted} && cp -r {dataset} {mounted}/data"
    unshare = ["unshare", "--mount", "--user", "--map-root-user", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("a file system of its own needs user and mount namespaces")
    command = [*unshare, f'{mount} && exec "$@"', "sh", sys.executable, "-c", _OPEN_TWICE]
    result = subprocess.run(
        [*command, str(small_dataset), str(mounted / "data")], capture_output=True, text=True, check=False
    )
    _check_full(result, "No space left on device")


def test_a_limit_to_the_size_of_files_is_one_line_and_leaves_nothing(small_dataset: Path, tmp_path: Path) -> None:
    dataset = copy_dataset(small_dataset, tmp_path / "data")
    open_store(small_dataset)
    result = subprocess.run(
        [sys.executable, "-c", _OPEN_TWICE, str(small_dataset), str(dataset)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    _check_full(result, "File too large")
