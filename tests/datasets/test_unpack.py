import math
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from evenrank.core.errors import DataError
from evenrank.datasets.schema import read_manifest
from evenrank.datasets.store import SequenceStore, open_store
from evenrank.datasets.stream import open_stream
from evenrank.datasets.unpack import ColumnWriter, map_column
from tests.datasets.crafted import add_targets, change_table, copy_dataset, set_columns

STRANGER = 54321  # a user id without an entry in the password database


def _entry(store: SequenceStore) -> Path:
    base = store.offsets.base
    assert isinstance(base, np.memmap)
    return Path(str(base.filename)).parent


def test_only_caches_that_nobody_else_can_write_are_used(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached, home = _entry(open_store(dataset)), tmp_path / "home" / ".cache" / "evenrank"
    if os.geteuid() == 0:  # this user, root and the owner of the dataset are trusted
        for path, place in ((cached, home), (dataset, cached.parent), (dataset / ".cache", home)):
            os.chown(path, STRANGER + (path.name == ".cache"), -1)
            assert _entry(open_store(dataset)).parent == place
        for path in (cached, dataset, dataset / ".cache"):
            os.chown(path, 0, -1)
    (dataset / ".cache").chmod(0o777)
    assert _entry(open_store(dataset)) == home / cached.name
    home.chmod(0o770)
    in_temporary = tmp_path / f"evenrank-{os.geteuid()}"
    assert _entry(open_store(dataset)) == in_temporary / cached.name
    assert in_temporary.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))  # of an unknown user without HOME
    assert _entry(open_store(dataset)) == in_temporary / cached.name
    in_temporary.chmod(0o707)
    with pytest.raises(DataError, match=r"has no place for its unpacked columns: none of .*\.cache, [^\n]*evenrank"):
        open_store(dataset)
    dataset.chmod(0o777)  # who can write the dataset can change all of it anyway
    assert _entry(open_store(dataset)) == cached


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
@pytest.mark.parametrize("parts", [[], [0], [5], [2, 0, 3]])
def test_a_column_written_in_parts_is_that_of_numpy(tmp_path: Path, dtype: str, parts: list[int]) -> None:
    path, values = tmp_path / "column.npy", [np.arange(n, dtype=dtype) - 1 for n in parts]
    expected = np.concatenate([np.empty(0, dtype), *values])
    with ColumnWriter(path, dtype) as column:
        for part in values:
            column.append(part)
    np.save(tmp_path / "theirs.npy", expected)
    content = path.read_bytes()
    assert content == (tmp_path / "theirs.npy").read_bytes()
    mapped = map_column(path, dtype, len(expected))
    assert (str(mapped.dtype), mapped.tolist()) == (dtype, expected.tolist())
    assert not len(mapped) or not mapped.flags.writeable
    for wrong, length in (("int16", len(expected)), (dtype, len(expected) + 1), (dtype, 2**48)):
        with pytest.raises(DataError, match="is not a column of"):
            map_column(path, wrong, length)
    for end in (0, 60, len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(DataError):
            map_column(path, dtype, len(expected))


Change = Callable[[pa.Table], pa.Table]


def _first(name: str, value: object, type_: pa.DataType | None = None) -> Change:
    """Change what the first row with one event has in a column."""

    def change(table: pa.Table) -> pa.Table:
        column = table[name].to_pylist()
        column[table["length"].to_pylist().index(1)] = value
        return set_columns({name: pa.array(column, type_ or table.schema.field(name).type)})(table)

    return change


def _targets(more_than_length: int) -> Change:
    return lambda table: add_targets(table, table["length"].to_numpy() + more_than_length)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_first("item_id", [1], pa.list_(pa.int32())), "column 'item_id' must be int64 .*type int32"),
        (_first("item_id", None), "'item_id' must be list<int64> .*, it has 1 null lists"),
        (_first("item_id", [None]), "'item_id' must be int64 .*, it has 1 nulls"),
        (_first("item_id", [-1]), "'item_id' has values from -1 to"),
        (_first("item_id", [1 << 40]), r"to 1099511627776, which must be in 0\.\.\d+; preprocess"),
        (_first("action", [1, 1]), "a list of column 'action' has another length than its row's"),
        (_first("segment", 9), r"to 9, which must be in 0\.\.8"),
        (_first("user_id", 301), "to 301, which must be below 301"),
        (_first("share", math.nan), "'share' has infinite values or NaN; preprocess"),
        (_first("tags", [1, 9]), r"'tags' has values from 1 to 9, which must be in 0\.\.8"),
        (_first("tags", None), "'tags' must be list<int64> without nulls, it has 1 null lists"),
        (_first("price", [math.inf]), "'price' has infinite values or NaN; preprocess"),
        (lambda table: table.append_column("segment", table["segment"]), " has 2 columns 'segment'"),
        (_targets(-10_000), "column 'num_targets' has values from"),
        (_targets(1), "a row has more 'num_targets' than"),
    ],
)
def test_a_value_that_does_not_fit_the_manifest_is_named_by_stores_and_streams(
    rich_dataset: Path, tmp_path: Path, change: Change, fault: str
) -> None:
    dataset = copy_dataset(rich_dataset, tmp_path / "data")
    change_table(dataset, change)
    num_rows = read_manifest(dataset).splits["train"].rows
    for read in (open_store, lambda path: open_stream(path, "train").read(0, num_rows)):
        with pytest.raises(DataError, match=rf"^[^\n]*part-00000\.parquet[^\n]*{fault}"):
            read(dataset)
    assert not [path for path in (dataset / ".cache").iterdir() if path.is_dir()]
