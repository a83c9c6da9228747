"""Counts that describe the effect of a split, for the manifest and the command line."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.datasets.schema import ITEM_ID, NUM_TARGETS, TIMESTAMP_MS
from evenrank.preprocess.build.sequences import Sequences, mark_items
from evenrank.preprocess.build.splits import EVAL, TRAIN

# Smaller item ids are kept as a mask with one byte per id, larger ones as a sorted array.
_DENSE_IDS = 1 << 27
_NO_ITEMS = np.empty(0, dtype=np.int64)


class SeenItems:
    """A set of item ids."""

    def __init__(self) -> None:
        self._dense = np.zeros(1 << 16, dtype=bool)
        self._sparse = _NO_ITEMS

    def add(self, sequences: Sequences) -> None:
        """Add the items of the events of all rows."""
        items = sequences.events[ITEM_ID]
        largest = int(items.max(initial=-1))
        if largest >= _DENSE_IDS:
            self._sparse = np.union1d(self._sparse, sequences.values(ITEM_ID))
            return
        if largest >= len(self._dense):
            grown = np.zeros(max(largest + 1, 2 * len(self._dense)), dtype=bool)
            grown[: len(self._dense)] = self._dense
            self._dense = grown
        mark_items(self._dense, items, sequences.order, sequences.begins, sequences.ends)

    def count_missing_from(self, other: "SeenItems") -> int:
        """Return the number of ids in this set that are not in the other."""
        if len(self._sparse) or len(other._sparse):
            return len(np.setdiff1d(self._ids(), other._ids(), assume_unique=True))
        length = min(len(self._dense), len(other._dense))
        num_common = np.count_nonzero(self._dense[:length] & other._dense[:length])
        return int(np.count_nonzero(self._dense) - num_common)

    def _ids(self) -> NDArray[np.int64]:
        return np.union1d(np.flatnonzero(self._dense), self._sparse)


class Audit:
    """Counts events and items of `eval` with respect to those of `train`."""

    def __init__(self) -> None:
        self._seen = {TRAIN: SeenItems(), EVAL: SeenItems()}
        self._newest_train = -1

    def follow(self, split: str, sequences: Sequences) -> None:
        """Register rows that are about to be written to a split."""
        targets = _targets(sequences) if split == EVAL else sequences
        self._seen[split].add(targets)
        if split == TRAIN:
            rows = sequences.ends[sequences.lengths > 0]
            newest = sequences.events[TIMESTAMP_MS][sequences.order[rows - 1]]  # of the last event of each row
            self._newest_train = max(self._newest_train, int(newest.max(initial=-1)))

    def report(self, folder: Path, splits: Mapping[str, object]) -> dict[str, int]:
        """Return the counts by description, once the splits are written. Of `eval`, only targets are counted."""
        if EVAL not in splits:
            return {}
        num_events = num_early = 0
        for times in _target_times(folder / EVAL):
            num_events += len(times)
            num_early += int(np.count_nonzero(times < self._newest_train))
        return {
            "eval events": num_events,
            "eval events before the newest train event": num_early,
            "eval items that train never saw": self._seen[EVAL].count_missing_from(self._seen[TRAIN]),
        }


def _target_times(folder: Path) -> Iterator[NDArray[np.int64]]:
    """Yield the times of the events that are to be predicted, one row group of a split at a time."""
    for path in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            names = [name for name in (TIMESTAMP_MS, NUM_TARGETS) if name in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=names).combine_chunks()
                if not table.num_rows:
                    continue
                lists = table.column(TIMESTAMP_MS).chunk(0)
                offsets = lists.offsets.to_numpy().astype(np.int64)
                times = lists.flatten().to_numpy()
                if NUM_TARGETS in names:
                    first_targets = offsets[1:] - table.column(NUM_TARGETS).to_numpy()
                    times = times[np.arange(len(times)) >= np.repeat(first_targets, np.diff(offsets))]
                yield times


def _targets(sequences: Sequences) -> Sequences:
    """Restrict each row to the events that are to be predicted."""
    if not sequences.num_targets.any():
        return sequences
    return replace(sequences, begins=sequences.ends - sequences.num_targets)
