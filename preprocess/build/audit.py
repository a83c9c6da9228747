"""What happened to the data on the way, in numbers that the manifest keeps and people should see."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.datasets.schema import ITEM_ID, TIMESTAMP_MS
from evenrank.preprocess.build.grouping import mark_items
from evenrank.preprocess.build.sequences import Sequences
from evenrank.preprocess.build.splits import EVAL, TRAIN

# Below this id, which items were seen is a byte an id; where larger ones occur, a sorted array.
_DENSE_IDS = 1 << 27
_NO_ITEMS = np.empty(0, dtype=np.int64)


class SeenItems:
    """A set of item ids that grows by arrays."""

    def __init__(self) -> None:
        self._dense = np.zeros(1 << 16, dtype=bool)
        self._sparse = _NO_ITEMS

    def add(self, sequences: Sequences) -> None:
        """Add the items of all rows."""
        items = sequences.events[ITEM_ID]
        highest = int(items.max(initial=-1))
        if highest >= _DENSE_IDS:
            self._sparse = np.union1d(self._sparse, sequences.values(ITEM_ID))
            return
        if highest >= len(self._dense):
            grown = np.zeros(max(highest + 1, 2 * len(self._dense)), dtype=bool)
            grown[: len(self._dense)] = self._dense
            self._dense = grown
        mark_items(self._dense, items, sequences.order, sequences.begins, sequences.ends)

    def without(self, others: "SeenItems") -> int:
        """Return how many ids are in this set and not in the other."""
        if len(self._sparse) or len(others._sparse):
            return len(np.setdiff1d(self._ids(), others._ids(), assume_unique=True))
        size = min(len(self._dense), len(others._dense))
        both = np.count_nonzero(self._dense[:size] & others._dense[:size])
        return int(np.count_nonzero(self._dense) - both)

    def _ids(self) -> NDArray[np.int64]:
        return np.union1d(np.flatnonzero(self._dense), self._sparse)


class Audit:
    """Follows what is written to each split."""

    def __init__(self) -> None:
        self._seen = {TRAIN: SeenItems(), EVAL: SeenItems()}
        self._newest_train = -1

    def follow(self, split: str, sequences: Sequences) -> None:
        """Take note of rows that are about to be written."""
        targets = _targets(sequences) if split == EVAL else sequences
        self._seen[split].add(targets)
        if split == TRAIN:
            rows = sequences.ends[sequences.lengths > 0]
            newest = sequences.events[TIMESTAMP_MS][sequences.order[rows - 1]]  # each row's last event
            self._newest_train = max(self._newest_train, int(newest.max(initial=-1)))

    def report(self, folder: Path, splits: Mapping[str, object]) -> dict[str, int]:
        """Compare the splits, now that they are written; what `eval` has to predict is all that counts of it."""
        if EVAL not in splits:
            return {}
        earlier = total = 0
        for path in sorted((folder / EVAL).glob("*.parquet")):
            with pq.ParquetFile(path) as file:
                names = [name for name in (TIMESTAMP_MS, "num_targets") if name in file.schema_arrow.names]
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, columns=names).combine_chunks()
                    times = table.column(TIMESTAMP_MS).chunk(0) if table.num_rows else None
                    if times is None:
                        continue
                    offsets = times.offsets.to_numpy().astype(np.int64)
                    values = times.flatten().to_numpy()
                    if "num_targets" in names:
                        counts = table.column("num_targets").to_numpy()
                        place = np.arange(len(values))
                        ends = np.repeat(offsets[1:], np.diff(offsets))
                        values = values[place >= ends - np.repeat(counts, np.diff(offsets))]
                    total += len(values)
                    earlier += int(np.count_nonzero(values < self._newest_train))
        return {
            "eval events": total,
            "eval events before the newest train event": earlier,
            "eval items that train never saw": self._seen[EVAL].without(self._seen[TRAIN]),
        }


def _targets(sequences: Sequences) -> Sequences:
    """Return only what is to be predicted of each row."""
    if not sequences.num_targets.any():
        return sequences
    return replace(sequences, begins=sequences.ends - sequences.num_targets)
