"""Columns in files, where they are kept, who is trusted with them, and what happens when they cannot be written."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evenrank.core.errors import DataError
from evenrank.datasets.store import SequenceStore, open_store
from evenrank.datasets.stream import open_stream
from evenrank.datasets.unpack import ColumnWriter, map_column
from tests.datasets.crafted import add_targets, change_table, copy_dataset, set_columns, update_manifest
from tests.datasets.in_parts import write_in_parts

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


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("parts", [[], [0], [5], [2, 0, 3]])
def test_a_column_written_in_parts_is_mapped_and_loaded_by_numpy(tmp_path: Path, dtype: str, parts: list[int]) -> None:
    values = [np.arange(n, dtype=dtype) - 1 for n in parts]
    expected = np.concatenate([np.empty(0, dtype), *values])
    with ColumnWriter(tmp_path / "column.npy", dtype, len(expected)) as column:
        for part in values:
            column.append(part)
    mapped = map_column(tmp_path / "column.npy", dtype, len(expected))
    for array in (mapped, np.load(tmp_path / "column.npy")):
        assert array.dtype == dtype
        assert array.tolist() == expected.tolist()
    assert not len(mapped) or not mapped.flags.writeable


def test_a_header_is_that_of_numpy(tmp_path: Path) -> None:
    with ColumnWriter(tmp_path / "ours.npy", "int64", 3) as column:
        column.append(np.arange(3))
    np.save(tmp_path / "theirs.npy", np.arange(3))
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()


@pytest.mark.parametrize(("dtype", "length"), [("int32", 3), ("int64", 2), ("int64", 4), ("int64", 2**48)])
def test_a_column_of_another_type_or_length_is_refused(tmp_path: Path, dtype: str, length: int) -> None:
    np.save(tmp_path / "column.npy", np.arange(3))
    with pytest.raises(DataError, match="is not a column of"):
        map_column(tmp_path / "column.npy", dtype, length)


def test_a_column_that_is_cut_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "column.npy", np.arange(3))
    content = (tmp_path / "column.npy").read_bytes()
    for end in (0, 60, 128, len(content) - 1):
        (tmp_path / "column.npy").write_bytes(content[:end])
        with pytest.raises(DataError):
            map_column(tmp_path / "column.npy", "int64", 3)


def _with_type(table: pa.Table) -> pa.Table:
    return set_columns({"item_id": table["item_id"].cast(pa.list_(pa.int32()))})(table)


def _with_null_list(table: pa.Table) -> pa.Table:
    return set_columns({"item_id": pa.array([None] + [[1]] * (len(table) - 1), pa.list_(pa.int64()))})(table)


def _with_null_item(table: pa.Table) -> pa.Table:
    return set_columns({"item_id": pa.array([[1, None]] + [[1]] * (len(table) - 1), pa.list_(pa.int64()))})(table)


def _with_short_list(table: pa.Table) -> pa.Table:
    rows = table["action"].to_pylist()
    longest = max(range(len(rows)), key=lambda row: len(rows[row]))
    rows[longest] = rows[longest][:-1]
    return set_columns({"action": pa.array(rows, pa.list_(pa.int32()))})(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_type, "column 'item_id' must be int64 .*type int32"),
        (_with_null_list, "column 'item_id' must be list<int64> without nulls, it has 1 null lists"),
        (_with_null_item, "column 'item_id' must be int64 without nulls, it has 1 nulls"),
        (_with_short_list, "a list of column 'action' has another length than its row's 'length'"),
    ],
)
def test_a_malformed_column_is_named(
    small_dataset: Path, tmp_path: Path, change: Callable[[pa.Table], pa.Table], message: str
) -> None:
    dataset = copy_dataset(small_dataset, tmp_path / "copy")
    change_table(dataset, change)
    with pytest.raises(DataError, match=f"part-00000.parquet: {message}"):
        open_store(dataset)
    assert not [path for path in (dataset / ".cache").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncated", "part-00000.parquet cannot be read as Parquet"),
        ("fewer rows", "contains 10 rows and"),
        ("other bytes", "part-00000.parquet does not have the SHA-256 in its manifest"),
    ],
)
def test_a_damaged_parquet_file_is_named(small_dataset: Path, tmp_path: Path, damage: str, message: str) -> None:
    dataset = copy_dataset(small_dataset, tmp_path / "copy")
    (path,) = (dataset / "train").glob("*.parquet")
    data = bytearray(path.read_bytes())
    match damage:
        case "truncated":
            path.write_bytes(data[:-100])
            update_manifest(dataset)
        case "fewer rows":
            pq.write_table(pq.read_table(path).slice(0, 10), path)
            update_manifest(dataset)
        case "other bytes":
            data[2000] ^= 1
            path.write_bytes(data)
    with pytest.raises(DataError, match=message) as raised:
        open_store(dataset)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("item_id", -1, "'item_id' has values from -1 to"),
        ("item_id", 1 << 40, r"to 1099511627776, which must be in 0\.\.\d+; preprocess"),
        ("action", -3, "'action' has values from -3 to"),
        ("action", 5, r"to 5, which must be in 0\.\.4"),
        ("segment", -1, "'segment' has values from -1 to"),
        ("segment", 9, r"to 9, which must be in 0\.\.8"),
        ("user_id", 301, "to 301, which must be below 301"),
    ],
)
def test_ids_outside_their_vocabulary_are_refused(
    small_dataset: Path, tmp_path: Path, name: str, value: int, message: str
) -> None:
    def change(table: pa.Table) -> pa.Table:
        column = table[name].to_pylist()
        row = int(np.argmax(table["length"].to_numpy()))
        column[row] = [value, *column[row][1:]] if isinstance(column[row], list) else value
        return set_columns({name: pa.array(column, table.schema.field(name).type)})(table)

    dataset = copy_dataset(small_dataset, tmp_path / "copy")
    change_table(dataset, change)
    with pytest.raises(DataError, match=message):
        open_store(dataset)
    rows = len(open_store(small_dataset))
    with pytest.raises(DataError, match=message):
        open_stream(dataset, "train").read(0, rows)


@pytest.mark.parametrize(
    ("value", "message"), [(-1, "'num_targets' has values from -1"), (1, "has more 'num_targets'")]
)
def test_numbers_of_targets_out_of_range_are_refused(
    small_dataset: Path, tmp_path: Path, value: int, message: str
) -> None:
    dataset = copy_dataset(small_dataset, tmp_path / "copy")
    change_table(dataset, lambda table: add_targets(table, table["length"].to_numpy() * (value > 0) + value))
    with pytest.raises(DataError, match=message):
        open_store(dataset)


def test_files_with_and_without_numbers_of_targets_are_refused(small_dataset: Path, tmp_path: Path) -> None:
    dataset = write_in_parts(small_dataset, tmp_path / "parts")
    path = dataset / "train" / "part-00001.parquet"
    table = pq.read_table(path)
    pq.write_table(add_targets(table, table["length"].to_numpy() * 0), path)
    update_manifest(dataset)
    with pytest.raises(DataError, match=r"part-00001.parquet: some files have a column 'num_targets' and some not"):
        open_store(dataset)
    with pytest.raises(DataError, match="parts: some files have a column 'num_targets' and some not"):
        open_stream(dataset, "train").read(0, 100)


def test_a_column_that_appears_twice_is_refused(small_dataset: Path, tmp_path: Path) -> None:
    dataset = copy_dataset(small_dataset, tmp_path / "copy")
    change_table(dataset, lambda table: table.append_column("segment", table["segment"]))
    with pytest.raises(DataError, match="has more than one column 'segment'"):
        open_store(dataset)
