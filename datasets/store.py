"""The columns of a split as memory-mapped files: random access by row, shared by every process of a machine.

row         0          1     2
item_id   [ 7 3 9 | (none) | 4 4 ]      events, row after row
offsets   [ 0       3        3     5 ]  row r is offsets[r]..offsets[r+1]-1
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.schema import EVENT_DTYPES, NUM_TARGETS, USER_ID, Manifest, read_manifest
from evenrank.datasets.unpack import OFFSETS, TIME_ORDER, unpacked


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceStore:
    """Rows of a split, open for reading. Arrays are read-only; those of `open_store` are views of mapped files.

    A store that was opened from a folder is pickled as that folder's name, and opened anew where it arrives: processes
    that are given one share its memory.
    """

    manifest: Manifest
    split: str
    offsets: NDArray[np.int64]  # [rows + 1]: where each row's events begin
    events: Mapping[str, NDArray[np.integer]]  # per list column: [interactions]
    rows: Mapping[str, NDArray[np.int64]]  # user_id and each contextual feature: [rows]
    num_targets: NDArray[np.int32] | None = None  # [rows]: how many of the last events are to be predicted
    time_order: NDArray[np.int64] | None = None  # [rows]: the rows, by the time of their last event
    folder: Path | None = None  # None: held in memory alone

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Events per row: int64 [rows]."""
        return np.diff(self.offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.folder is None:
            fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
            return _from_fields, (fields,)
        return _reopened, (self.folder, self.split, self.manifest.content_hash)


def _from_fields(fields: dict[str, Any]) -> SequenceStore:
    return SequenceStore(**fields)


def _reopened(folder: Path, split: str, content_hash: str) -> SequenceStore:
    store = open_store(folder, split)
    if store.manifest.content_hash != content_hash:
        raise DataError(f"{folder} was replaced by other data after it was opened; open it again")
    return store


def open_store(path: Path | str, split: str = "train") -> SequenceStore:
    """Open a split of the dataset in folder `path`; the first to do so on a machine unpacks it.

    Where the folder is preprocessed anew while a store is open, the store keeps what it opened.

    Raises:
        DataError: the folder is no dataset, has no such split, or its Parquet files are not what the manifest says.

    """
    folder = Path(path).absolute()
    manifest = read_manifest(folder)
    if split not in manifest.splits:
        raise DataError(f"{folder} has no split {split!r}; it has {', '.join(sorted(manifest.splits))}")
    info = manifest.splits[split]
    cache = unpacked(folder, manifest, split)
    event_types = {**EVENT_DTYPES, **manifest.extra_events}
    row_names = (USER_ID, *manifest.contextual)
    store = SequenceStore(
        manifest=manifest,
        split=split,
        offsets=_mapped(cache, OFFSETS, "int64", info.rows + 1),
        events={name: _mapped(cache, name, dtype, info.interactions) for name, dtype in event_types.items()},
        rows={name: _mapped(cache, name, "int64", info.rows) for name in row_names},
        num_targets=_mapped(cache, NUM_TARGETS, "int32", info.rows)
        if (cache / f"{NUM_TARGETS}.npy").exists()
        else None,
        time_order=_mapped(cache, TIME_ORDER, "int64", info.rows),
        folder=folder,
    )
    # Compiled loops follow the offsets without looking where they lead.
    if store.offsets[0] != 0 or store.offsets[-1] != info.interactions or (store.lengths < 0).any():
        raise _damaged(cache, OFFSETS)
    return store


def _mapped(cache: Path, name: str, dtype: str, size: int) -> NDArray[Any]:
    try:
        column = np.load(cache / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(cache, name) from error
    if column.shape != (size,) or column.dtype != np.dtype(dtype):
        raise _damaged(cache, name)
    view: NDArray[Any] = column.view(np.ndarray)  # a memmap's own methods cost several times as much as an array's
    return view


def _damaged(cache: Path, name: str) -> DataError:
    return DataError(f"{cache / name}.npy is damaged; delete {cache}, and it is made anew")
