"""A column as a `.npy` file (version 1.0 of the format): written in parts, then mapped into memory.

Headers are compared rather than parsed: type and length are known from the manifest, so a file with another header is
not the expected one.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.core.files import open_regular

_HEADER_BYTES = 128  # a multiple of 64, as the format demands, with room for any length


class ColumnWriter:
    """Writes a column, as a context manager.

    The file is written to rather than mapped, because a store to a mapped file on a full disk ends the process.

    Args:
        path: of a file that does not exist.
        dtype: of the values.
        length: how many values will be appended.

    """

    def __init__(self, path: Path, dtype: str, length: int) -> None:
        self._file = path.open("xb")
        self._dtype = np.dtype(dtype)
        self._file.write(_header(self._dtype, length))

    def append(self, values: NDArray[np.integer]) -> None:
        """Append values [n] of the column's dtype."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)

    def __enter__(self) -> "ColumnWriter":
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())  # some file systems report only now that the disk is full


def map_column(path: Path, dtype: str, length: int) -> NDArray[Any]:
    """Map a column into memory, read-only: [length].

    Raises:
        DataError: the file is missing, or is no such column.

    """
    expected = np.dtype(dtype)
    header = _header(expected, length)
    with open_regular(path) as file:
        if file.read(len(header)) != header:
            raise DataError(f"{path} is not a column of {length:,} {dtype}; unpack it again")
        if os.fstat(file.fileno()).st_size != len(header) + length * expected.itemsize:
            raise DataError(f"{path} does not have the size that its header says; unpack it again")
    if not length:  # nothing to map
        return np.empty(0, expected)
    column = np.memmap(path, expected, mode="r", offset=len(header), shape=(length,))
    view: NDArray[Any] = column.view(np.ndarray)  # methods of np.memmap cost several times as much
    return view


def _header(dtype: np.dtype[Any], length: int) -> bytes:
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
    prefix = np.lib.format.magic(1, 0)
    num_bytes = _HEADER_BYTES - len(prefix) - 2  # the two bytes say how many follow
    return prefix + num_bytes.to_bytes(2, "little") + text.ljust(num_bytes - 1).encode() + b"\n"
