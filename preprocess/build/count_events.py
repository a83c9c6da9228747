"""Counts the events of a dataset, each once, while its rows are divided into splits."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.value_counts import ValueCounts, count_values
from evenrank.datasets.event_statistics import DAY_MS, Statistics
from evenrank.datasets.schema import ACTION, ITEM_ID, NUM_TARGETS, TIMESTAMP_MS, USER_ID, WINDOW
from evenrank.preprocess.build.sequences import Sequences
from evenrank.preprocess.build.splits import EVAL, TRAIN
from evenrank.preprocess.engine import Engine

_HOUR_MS = DAY_MS // 24
_MAX_BINS = 120  # of the timeline: as many bars as can be told apart on a phone
_BIN_HOURS = (1, 24, *(168 * weeks for weeks in (1, 4, 13, 52, 520, 5200)))
_LARGEST = np.iinfo(np.int64).max
_NEWEST_TRAIN = "newest of train"
Counted = tuple[NDArray[np.int64], NDArray[np.int64]]  # distinct values and how often each occurs: [n] both


class EventCounts(NamedTuple):
    """What the rows of some users have, divided into splits, before windows are cut."""

    hours: Counted  # of events, since 1970
    items: Mapping[str, Counted]  # by split
    sums: Mapping[str, int]  # numbers of users by their names in Statistics
    first_ms: int
    largest: Mapping[str, int]  # ids, action and time, -1 if there is none; and the newest time of train


def count_events(sequences: Sequences, divided: Mapping[str, Sequences]) -> EventCounts:
    """Count the events of all rows of some users, and of the same rows by split."""
    columns, items = {USER_ID: sequences.user_ids, **sequences.events}, {}
    for name, rows in divided.items():
        if rows.num_targets.any():  # the events before those to predict are in train too
            rows = replace(rows, begins=rows.ends - rows.num_targets)
        items[name] = count_values(rows.values(ITEM_ID))
    train = divided[TRAIN]
    newest = train.events[TIMESTAMP_MS][train.order[train.ends - 1]]  # of each row
    eval_users = divided[EVAL].user_keys if EVAL in divided else train.user_keys[:0]
    cold_users = int(np.isin(eval_users, train.user_keys, invert=True).sum())
    largest = {name: columns[name] for name in (USER_ID, ITEM_ID, ACTION, TIMESTAMP_MS)} | {_NEWEST_TRAIN: newest}
    return EventCounts(
        hours=count_values(columns[TIMESTAMP_MS] // _HOUR_MS),
        items=items,
        sums={"users": len(sequences), "eval_users": len(eval_users), "cold_users": cold_users},
        first_ms=int(columns[TIMESTAMP_MS].min(initial=_LARGEST)),
        largest={name: int(values.max(initial=-1)) for name, values in largest.items()},
    )


class EventCounter:
    """Adds up the events of a dataset, whose largest item id is `num_items` - 1, if nearly all ids up to it occur."""

    def __init__(self, num_items: int | None) -> None:
        self._hours = ValueCounts()  # since 1970
        self._items, self._train_items = ValueCounts(num_items), ValueCounts(num_items)  # the latter if there is eval
        self._events, self._sums, self._first_ms = Counter[str](), Counter[str](), _LARGEST
        self.largest: Mapping[str, int] = {}

    def add(self, counts: EventCounts) -> None:
        """Add the events of further users."""
        self._hours.add(*counts.hours)
        for name, items in counts.items.items():
            self._items.add(*items)
            if name == TRAIN and EVAL in counts.items:
                self._train_items.add(*items)
            self._events[name] += int(items[1].sum())
        self._sums.update(counts.sums)
        self._first_ms = min(self._first_ms, counts.first_ms)
        self.largest = {name: max(value, self.largest.get(name, -1)) for name, value in counts.largest.items()}

    def report(self, folder: Path, engine: Engine, overlap: int, **others: Any) -> Statistics:
        """Return the statistics, with the others, once all splits are written to a folder.

        `overlap` is the number of events that a window shares with the one before.
        """
        hours, counts = self._hours.result()
        days, first_of_day = np.unique(hours // 24, return_index=True)
        per_day = np.add.reduceat(counts, first_of_day)
        width = next(width for width in _BIN_HOURS if hours[-1] // width - hours[0] // width < _MAX_BINS)
        bins = hours // width - hours[0] // width
        popularity, eval_items, cold_items, cold_item_events = ValueCounts(), 0, 0, 0
        count_early = partial(_count_early, self.largest[_NEWEST_TRAIN], overlap)
        files = sorted((folder / EVAL).glob("*.parquet"))
        early = engine.map(count_early, files, stage="counting early events", keep=False)
        for items, num_events in self._items.pieces():
            popularity.add(num_events.astype(np.int64))
            if EVAL in self._events:
                in_train = self._train_items.count(items)
                eval_items += int(np.count_nonzero(num_events > in_train))
                cold_items += int(np.count_nonzero(in_train == 0))
                cold_item_events += int(num_events[in_train == 0].sum())
        popular, num_popular = (column[::-1] for column in popularity.result())  # events, items that have as many
        last_ranks = np.cumsum(num_popular)
        num_items = int(last_ranks[-1])
        ranks = np.unique(np.geomspace(1, num_items, 100).astype(np.int64))
        in_top = np.diff(np.minimum(last_ranks, -(-num_items // 100)), prepend=0)
        return Statistics(
            events=dict(self._events),
            items=num_items,
            first_ms=self._first_ms,
            last_ms=self.largest[TIMESTAMP_MS],
            largest_day_ms=int(days[per_day.argmax()]) * DAY_MS,
            largest_day_events=int(per_day.max()),
            hours_of_day=np.bincount(hours % 24, counts, 24).astype(int).tolist(),
            bin_start_ms=int(hours[0] // width * width) * _HOUR_MS,
            bin_width_ms=width * _HOUR_MS,
            bins=np.bincount(bins, counts).astype(int).tolist(),
            ranks=ranks.tolist(),
            ranks_events=popular[np.searchsorted(last_ranks, ranks)].tolist(),
            top_events=int((popular * in_top).sum()),
            early_eval_events=sum(count for _, count in early),
            eval_items=eval_items,
            cold_items=cold_items,
            cold_item_events=cold_item_events,
            **{**self._sums, **others},
        )


def _count_early(newest: int, overlap: int, path: Path) -> int:
    """Count the events in a file of eval that are older than a time, those in two windows once."""
    rows, times = pl.scan_parquet(path, glob=False), pl.col(TIMESTAMP_MS)
    if NUM_TARGETS in rows.collect_schema():
        times = times.list.tail(pl.col(NUM_TARGETS))
    elif WINDOW in rows.collect_schema():
        times = times.list.slice(pl.when(pl.col(WINDOW) > 0).then(overlap).otherwise(0))
    is_early = rows.select(times).explode(TIMESTAMP_MS).select((pl.col(TIMESTAMP_MS) < newest).sum())
    return int(is_early.collect(engine="streaming").item())
