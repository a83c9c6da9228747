"""Lists of items from Parquet files: hard negatives of items, and `CandidateSets` of users."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.files import check_regular
from evenrank.dataloader.collate.gather import Ints, KeyValues, StoreRows
from evenrank.datasets.continuous_log import LogSource
from evenrank.datasets.schema import ITEM_ID, USER_ID
from evenrank.datasets.store import ColumnMap, SequenceStore
from evenrank.datasets.stream import StreamSource
from evenrank.datasets.unpack import offsets_of

Sources = Sequence[SequenceStore | StreamSource | LogSource]
CANDIDATE_SETS = "candidate_sets"


def read_item_lists(path: Path | str, what: str, key: str, name: str, size: int) -> tuple[Ints, Ints, Ints]:
    """Return the keys [n], the length of the list of each, and the items of all lists, below `size`: int64.

    Raises:
        DataError: the file lacks one of the two columns, or has a key twice, or other items.
    """
    check_regular(Path(path))
    try:
        table = pq.read_table(path, columns=[key, name])
        lists = table[name].cast(pa.list_(pa.int64())).combine_chunks()
        keys, items = table[key].cast(pa.int64()).combine_chunks().to_numpy(), lists.flatten().to_numpy()
        lengths = lists.value_lengths().to_numpy().astype(np.int64)
    except (OSError, KeyError, pa.ArrowException) as error:
        reason = f"({first_line(error)}); write {key} int64 and {name} list<int64>, without nulls"
        raise DataError(f"{path} is no Parquet file of {what} {reason}") from error
    for ids in (items, keys[: len(keys) * (key == ITEM_ID)]):
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            raise DataError(f"{path} has items {ids.min()} to {ids.max()}, the dataset 0 to {size - 1}; use its ids")
    distinct, counts = np.unique(keys, return_counts=True)
    for twice in distinct[counts > 1][:1]:
        raise DataError(f"{path} has {key} {twice} in more than one row; join their lists")
    return keys, lengths, items


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CandidateSets:
    """The items that the targets of each user are ranked among. Any thread may use it."""

    users: Ints
    """[n], ascending."""
    begins: Ints
    """[n]: where the items of each begin."""
    sizes: Ints
    """[n]"""
    items: Ints
    """As in batches: rows of a table with a KeyMap."""

    @classmethod
    def read(cls, path: Path | str, sources: Sources, key_maps: Mapping[str, ColumnMap]) -> "CandidateSets":
        """Read the sets of opened datasets; for errors see `read_item_lists`."""
        if not sources:
            raise ConfigError("random batches have no users with candidate sets; leave candidate_sets out")
        size = max(source.manifest.vocabulary_sizes[ITEM_ID] for source in sources)
        users, lengths, items = read_item_lists(path, "candidate sets", USER_ID, "candidates", size)
        if not len(users):
            raise DataError(f"{path} has no candidate sets; write a row for each user")
        key_map = {**getattr(sources[0], "column_maps", {}), **key_maps}.get(ITEM_ID)
        order, begins = np.argsort(users), offsets_of(lengths)
        items = items if key_map is None else key_map(items)
        return cls(users=users[order], begins=begins[order], sizes=lengths[order], items=items)

    def describe(self) -> str:
        """Return the number of sets and a hash of them."""
        digest = hashlib.sha256(
            b"".join(array.tobytes() for array in (self.users, self.sizes, self.begins, self.items))
        )
        return f"{len(self.users)} sets {digest.hexdigest()[:16]}"

    def find(self, store: SequenceStore, indices: Ints) -> Ints:
        """Return the set of the user of each row or slice [n]; -1: there is none."""
        users = store.columns[USER_ID][store.rows_of(indices)]
        users = store.column_maps[USER_ID].inverse(users) if USER_ID in store.column_maps else users
        places = np.searchsorted(self.users, users, side="right") - 1  # -1: below all
        return np.where(self.users[places] == users, places, -1)

    def values(self, groups: Sequence[StoreRows], num_samples: int) -> KeyValues:
        """Return the items of each of n samples."""
        places = np.empty(num_samples, dtype=np.int64)
        for store, indices, samples in groups:
            places[samples] = self.find(store, indices)
        if (places < 0).any():
            raise IndexError("a row is of a user without a candidate set; it is not a sample")
        most = int(self.sizes.max(initial=0))
        return KeyValues(ITEM_ID, self.begins[places], self.sizes[places], most, array=self.items)
