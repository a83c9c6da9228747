import math
import os
import resource
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evenrank.core.errors import DataError
from evenrank.datasets.schema import read_manifest
from evenrank.datasets.store import SequenceStore, open_store
from evenrank.datasets.stream import open_stream
from evenrank.datasets.unpack import ColumnWriter, map_column
from tests.datasets.crafted import add_targets, change_table, copy_dataset, set_columns, update_manifest, write_in_parts

STRANGER = 54321  # a user id without an entry in the password database
Change = Callable[[pa.Table], pa.Table]
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


def _entry(store: SequenceStore) -> Path:
    base = store.offsets.base
    assert isinstance(base, np.memmap)
    return Path(str(base.filename)).parent


def _home(tmp_path: Path) -> Path:
    return tmp_path / "home" / ".cache" / "evenrank"


def test_a_cache_that_others_can_write_to_is_unused_unless_the_dataset_is_as_open(
    dataset: Path, tmp_path: Path
) -> None:
    cached = _entry(open_store(dataset))
    (dataset / ".cache").chmod(0o777)
    assert _entry(open_store(dataset)) == _home(tmp_path) / cached.name
    _home(tmp_path).chmod(0o770)
    in_temporary = tmp_path / f"evenrank-{os.geteuid()}"
    assert _entry(open_store(dataset)) == in_temporary / cached.name
    in_temporary.chmod(0o707)
    message = r"has no place for its unpacked columns: none of .*\.cache, [^\n]*evenrank[^\n]*$"
    with pytest.raises(DataError, match=message):
        open_store(dataset)
    dataset.chmod(0o777)
    assert _entry(open_store(dataset)) == cached


@only_root
def test_only_the_caches_of_this_user_of_root_and_of_the_owner_are_trusted(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = _entry(open_store(dataset))
    os.chown(cached, STRANGER, -1)
    assert _entry(open_store(dataset)).parent == _home(tmp_path)
    os.chown(dataset, STRANGER, -1)
    assert _entry(open_store(dataset)) == cached
    os.chown(dataset / ".cache", STRANGER + 1, -1)
    assert _entry(open_store(dataset)).parent == _home(tmp_path)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))  # of an unknown user without HOME
    folder = _entry(open_store(dataset)).parent
    assert folder == tmp_path / f"evenrank-{os.geteuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_is_one_line_and_leaves_nothing(dataset: Path) -> None:
    # A limit on the size of files stands in for a full disk: writing fails in the same place.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(DataError, match=r"^[^\n]*could not be written: File too large; free space, or clear that "):
            open_store(dataset)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((dataset / ".cache").iterdir())


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
@pytest.mark.parametrize("parts", [[], [0], [5], [2, 0, 3]])
def test_a_column_written_in_parts_is_that_of_numpy(tmp_path: Path, dtype: str, parts: list[int]) -> None:
    values = [np.arange(n, dtype=dtype) - 1 for n in parts]
    expected = np.concatenate([np.empty(0, dtype), *values])
    with ColumnWriter(tmp_path / "column.npy", dtype) as column:
        for part in values:
            column.append(part)
    np.save(tmp_path / "theirs.npy", expected)
    assert (tmp_path / "column.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()
    mapped = map_column(tmp_path / "column.npy", dtype, len(expected))
    assert mapped.dtype == dtype
    assert mapped.tolist() == expected.tolist()
    assert not len(mapped) or not mapped.flags.writeable


def test_a_column_that_is_cut_or_of_another_type_or_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "column.npy"
    np.save(path, np.arange(3))
    for dtype, length in (("int32", 3), ("int64", 2), ("int64", 4), ("int64", 2**48)):
        with pytest.raises(DataError, match="is not a column of"):
            map_column(path, dtype, length)
    content = path.read_bytes()
    for end in (0, 60, 128, len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(DataError):
            map_column(path, "int64", 3)


def _replace_first(name: str, row: list[int | None] | None, kind: pa.DataType) -> Change:
    """Return a change of the first list of a column; the others get one element."""
    return lambda table: set_columns({name: pa.array([row] + [[1]] * (len(table) - 1), pa.list_(kind))})(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_replace_first("item_id", [1], pa.int32()), ": column 'item_id' must be int64 .*type int32"),
        (_replace_first("item_id", None, pa.int64()), ": column 'item_id' must be list<int64> .*, it has 1 null lists"),
        (_replace_first("item_id", [1, None], pa.int64()), ": column 'item_id' must be int64 .*, it has 1 nulls"),
        (_replace_first("action", [1], pa.int32()), ": a list of column 'action' has another length than its row's"),
        (lambda table: table.append_column("segment", table["segment"]), " has 2 columns 'segment'"),
        (
            lambda table: add_targets(table, table["length"].to_numpy() * 0 - 1),
            ": column 'num_targets' has values from",
        ),
        (lambda table: add_targets(table, table["length"].to_numpy() + 1), ": a row has more 'num_targets' than"),
    ],
)
def test_a_malformed_column_is_named(dataset: Path, change: Change, message: str) -> None:
    change_table(dataset, change)
    with pytest.raises(DataError, match=f"part-00000.parquet{message}"):
        open_store(dataset)
    assert not [path for path in (dataset / ".cache").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("share", math.nan, "'share' has infinite values or NaN; preprocess"),
        ("share", None, "'share' must be float32 without nulls, it has 1 nulls"),
        ("tags", [1, 9], r"'tags' has values from 1 to 9, which must be in 0\.\.8"),
        ("tags", [1, None], "'tags' must be int64 without nulls, it has 1 nulls"),
        ("tags", None, "'tags' must be list<int64> without nulls, it has 1 null lists"),
        ("price", [math.inf], "'price' has infinite values or NaN; preprocess"),
        ("price", [0.5, 0.5], "a list of column 'price' has another length than its row's 'length'"),
    ],
)
def test_a_wrong_value_of_a_float_or_of_several_ids_is_refused(
    rich_dataset: Path, tmp_path: Path, name: str, row: object, message: str
) -> None:
    dataset = copy_dataset(rich_dataset, tmp_path / "data")
    first = pq.read_table(dataset / "train")["length"].to_pylist().index(1)

    def change(table: pa.Table) -> pa.Table:
        column = table[name].to_pylist()
        column[first] = row
        return set_columns({name: pa.array(column, table.schema.field(name).type)})(table)

    change_table(dataset, change)
    for read in (open_store, lambda path: open_stream(path, "train").read(0, len(pq.read_table(path / "train")))):
        with pytest.raises(DataError, match=message):
            read(dataset)


@pytest.mark.parametrize(("value", "fault"), [(math.nan, None), (math.inf, "'price' has infinite values; preprocess")])
def test_a_value_that_may_be_missing_is_nan(
    rich_dataset: Path, tmp_path: Path, value: float, fault: str | None
) -> None:
    dataset = copy_dataset(rich_dataset, tmp_path / "data")
    first = pq.read_table(dataset / "train")["length"].to_pylist().index(1)

    def change(table: pa.Table) -> pa.Table:
        prices = table["price"].to_pylist()
        prices[first] = [value]
        return set_columns({"price": pa.array(prices, table.schema.field("price").type)})(table)

    change_table(dataset, change, extra_events={**read_manifest(dataset).extra_events, "price": "float32?"})
    if fault is not None:
        with pytest.raises(DataError, match=fault):
            open_store(dataset)
    else:
        store = open_store(dataset)
        assert np.flatnonzero(np.isnan(store.columns["price"])).tolist() == [store.offsets[first]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "part-00000.parquet cannot be read as Parquet"),
        (lambda path: pq.write_table(pq.read_table(path).slice(0, 10), path), "contains 10 rows and"),
    ],
)
def test_a_damaged_parquet_file_is_named(dataset: Path, damage: Callable[[Path], object], message: str) -> None:
    (path,) = (dataset / "train").glob("*.parquet")
    damage(path)
    for expected in ("part-00000.parquet does not have the SHA-256 in its manifest", message):
        with pytest.raises(DataError, match=expected) as raised:
            open_store(dataset)
        assert "\n" not in str(raised.value)
        update_manifest(dataset)


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
def test_ids_outside_their_vocabulary_are_refused(dataset: Path, name: str, value: int, message: str) -> None:
    def change(table: pa.Table) -> pa.Table:
        column = table[name].to_pylist()
        row = int(np.argmax(table["length"].to_numpy()))
        column[row] = [value, *column[row][1:]] if isinstance(column[row], list) else value
        return set_columns({name: pa.array(column, table.schema.field(name).type)})(table)

    change_table(dataset, change)
    for read in (open_store, lambda path: open_stream(path, "train").read(0, len(pq.read_table(path / "train")))):
        with pytest.raises(DataError, match=message):
            read(dataset)


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
