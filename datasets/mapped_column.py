"""A column whose values are replaced, once per machine, in a file of its own next to the dataset's."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.cache import find_or_build
from evenrank.datasets.column_file import ColumnWriter, map_column

_FILE = "values.npy"
_LAYOUT = "v1"  # version of the cache's contents, part of the entry's name
_VALUES_AT_ONCE = 1 << 20


class ColumnMap(Protocol):
    """Replaces the values of a column, such as `dataloader.routing.KeyMap`."""

    @property
    def num_embeddings(self) -> int:
        """Values before and after are below this."""
        ...

    @property
    def is_identity(self) -> bool:
        """Whether all values stay as they are."""
        ...

    def __call__(self, keys: NDArray[Any], /) -> NDArray[Any]:
        """Return what replaces these values: integers of the same shape and dtype."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return everything that the result depends on: what JSON can hold, equal for equal maps."""
        ...


def map_values(
    values: NDArray[np.integer[Any]], column_map: ColumnMap, *, name: str, folder: Path | None, cache: str
) -> NDArray[np.int64]:
    """Return a column with its values replaced, as a mapped file unless the column exists only in memory.

    Args:
        values: the column: integers [n].
        column_map: what replaces them.
        name: of the column.
        folder: of its dataset; None: the column exists only in memory.
        cache: identifies the dataset and the split; part of the name of the cache's entry.

    Raises:
        DataError: a value cannot be mapped, or the cache cannot be written.

    """
    if folder is None:
        return column_map(values.astype(np.int64))
    identity = json.dumps([name, column_map.describe()], sort_keys=True)
    entry = f"{cache}-mapped-{hashlib.sha256(identity.encode()).hexdigest()[:32]}-{_LAYOUT}"

    def build(path: Path) -> None:
        with ColumnWriter(path / _FILE, "int64", len(values)) as writer:
            for first in range(0, len(values), _VALUES_AT_ONCE):
                writer.append(column_map(values[first : first + _VALUES_AT_ONCE].astype(np.int64)))

    path = find_or_build(folder, entry, build) / _FILE
    try:
        return map_column(path, "int64", len(values))
    except (DataError, OSError) as error:
        raise DataError(f"{path} is damaged; delete {path.parent} to have it rebuilt") from error
