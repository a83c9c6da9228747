"""Rules that divide rows and their events between `train` and `eval`, and counts that describe their effect.

user:0.3         30 % of the users are in `eval`; which ones depends on their ids and the seed alone
leave-last:2     the last 2 events of each user are predicted from the earlier ones
time:2015-01-01  events from this time on are predicted from the earlier ones
none             everything is in `train`
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import ITEM_ID, NUM_TARGETS, TIMESTAMP_MS, user_hash
from evenrank.preprocess.build.sequences import Sequences, first_at_or_after
from evenrank.preprocess.sources.interactions import MAX_TIMESTAMP_MS

TRAIN, EVAL = "train", "eval"
_MAX_TARGETS = int(np.iinfo(np.int32).max)
# Smaller item ids are kept as a mask with one byte per id, larger ones as a sorted array.
_DENSE_IDS = 1 << 27


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRule:
    """A rule that divides sequences into splits."""

    divide: Callable[[Sequences, int], dict[str, Sequences]]  # called with a seed
    has_targets: bool = False  # whether a number of last events of the rows in `eval` are to be predicted


def parse_split(text: str) -> SplitRule:
    """Parse `user:FRACTION`, `leave-last:N`, `time:TIMESTAMP` (milliseconds, or ISO 8601 in UTC) or `none`."""
    kind, _, value = text.partition(":")
    try:
        if kind == "user" and 0 <= (fraction := float(value)) <= 1:
            return SplitRule(divide=lambda sequences, seed: _by_user(sequences, fraction, seed))
        if kind == "leave-last" and 1 <= (count := int(value)) <= _MAX_TARGETS:
            return SplitRule(divide=lambda sequences, seed: _leave_last(sequences, count), has_targets=True)
        if kind == "time" and 0 <= (boundary_ms := _milliseconds(value)) <= MAX_TIMESTAMP_MS:
            return SplitRule(divide=lambda sequences, seed: _by_time(sequences, boundary_ms), has_targets=True)
        if text == "none":
            return SplitRule(divide=lambda sequences, seed: {TRAIN: sequences})
    except (ValueError, OverflowError):  # the latter from dates next to the ends of the calendar
        pass
    raise ConfigError(
        f"invalid split {text!r}; expected user:FRACTION (0 to 1), leave-last:N (N from 1 to 2^31-1), "
        "time:TIMESTAMP (milliseconds or ISO 8601, 1970 to 9999) or none"
    )


def _milliseconds(text: str) -> int:
    if text.isdecimal():
        return int(text)
    moment = datetime.fromisoformat(text)
    return round(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)


def _by_user(sequences: Sequences, fraction: float, seed: int) -> dict[str, Sequences]:
    # The salt must not be 0, because the hash with salt 0 orders the rows.
    hashes = user_hash(sequences.user_keys, salt=(seed << 1) | 1)
    # The top 53 bits convert to float64 exactly, and scale to fractions below 1.
    in_eval = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction
    return {TRAIN: sequences.take(~in_eval), EVAL: sequences.take(in_eval)}


def _leave_last(sequences: Sequences, count: int) -> dict[str, Sequences]:
    """Keep all events of users in `train` whose history would become empty, and leave these users out of `eval`."""
    has_history = sequences.lengths > count
    train = replace(sequences, ends=np.where(has_history, sequences.ends - count, sequences.ends))
    evaluated = sequences.take(has_history)
    num_targets = np.full(len(evaluated), count, dtype=np.int32)
    return {TRAIN: train, EVAL: replace(evaluated, num_targets=num_targets)}


def _by_time(sequences: Sequences, boundary_ms: int) -> dict[str, Sequences]:
    times = sequences.events[TIMESTAMP_MS]
    boundaries = first_at_or_after(sequences.begins, sequences.ends, sequences.order, times, boundary_ms)
    train = replace(sequences, ends=boundaries).take(boundaries > sequences.begins)
    evaluated = replace(sequences, num_targets=(sequences.ends - boundaries).astype(np.int32))
    return {TRAIN: train, EVAL: evaluated.take(boundaries < sequences.ends)}


class SeenItems:
    """A set of item ids."""

    def __init__(self) -> None:
        self._dense = np.zeros(1 << 16, dtype=bool)
        self._sparse = np.empty(0, dtype=np.int64)

    def add(self, sequences: Sequences) -> None:
        """Add the items of all rows."""
        items = sequences.values(ITEM_ID)
        if items.max(initial=-1) >= _DENSE_IDS:
            is_large = items >= _DENSE_IDS
            self._sparse = np.union1d(self._sparse, items[is_large])
            items = items[~is_large]
        num_missing = int(items.max(initial=-1)) + 1 - len(self._dense)
        if num_missing > 0:
            self._dense = np.pad(self._dense, (0, max(num_missing, len(self._dense))))
        self._dense[items] = True

    def count_missing_from(self, other: "SeenItems") -> int:
        """Return the number of ids in this set that are not in the other."""
        length = min(len(self._dense), len(other._dense))
        num_common = np.count_nonzero(self._dense[:length] & other._dense[:length])
        num_dense = np.count_nonzero(self._dense) - num_common
        return int(num_dense) + len(np.setdiff1d(self._sparse, other._sparse, assume_unique=True))


class Audit:
    """Counts events and items of `eval` with respect to those of `train`."""

    def __init__(self) -> None:
        self._seen = {TRAIN: SeenItems(), EVAL: SeenItems()}
        self._newest_train = -1

    def follow(self, split: str, sequences: Sequences) -> None:
        """Register rows of a split."""
        if sequences.num_targets.any():  # only the events to predict count
            sequences = replace(sequences, begins=sequences.ends - sequences.num_targets)
        self._seen[split].add(sequences)
        if split == TRAIN:
            newest = sequences.events[TIMESTAMP_MS][sequences.order[sequences.ends - 1]]  # of each row
            self._newest_train = max(self._newest_train, int(newest.max(initial=-1)))

    def report(self, folder: Path) -> dict[str, int]:
        """Return the counts by description, once `eval` is written."""
        paths = sorted((folder / EVAL).glob("*.parquet"))
        rows, times = pl.scan_parquet(paths, glob=False), pl.col(TIMESTAMP_MS)
        if NUM_TARGETS in rows.collect_schema():
            times = times.list.tail(pl.col(NUM_TARGETS))
        times_of_targets = rows.select(times).explode(TIMESTAMP_MS).drop_nulls()  # null: of a row without targets
        is_early = pl.col(TIMESTAMP_MS) < self._newest_train
        num_events, num_early = times_of_targets.select(pl.len(), is_early.sum()).collect(engine="streaming").row(0)
        return {
            "eval events": num_events,
            "eval events before the newest train event": num_early,
            "eval items that train never saw": self._seen[EVAL].count_missing_from(self._seen[TRAIN]),
        }
