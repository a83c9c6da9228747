from pathlib import Path

import numpy as np
import pytest

from evenrank.core.errors import DataError
from evenrank.datasets.unpack import ColumnWriter, map_column


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("parts", [[], [0], [5], [2, 0, 3]])
def test_what_is_appended_is_mapped_and_can_be_loaded_with_numpy(tmp_path: Path, dtype: str, parts: list[int]) -> None:
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
