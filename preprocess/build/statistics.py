"""Counts the events of a dataset, each once, while its rows are divided into splits."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.value_counts import ValueCounts, find
from evenrank.datasets.schema import ITEM_ID, NUM_TARGETS, TIMESTAMP_MS
from evenrank.datasets.statistics import Statistics
from evenrank.preprocess.build.sequences import Sequences
from evenrank.preprocess.build.splits import EVAL, TRAIN

_HOUR_MS = 3_600_000
_MAX_BINS = 120  # of the timeline: as many bars as can be told apart on a phone
_BIN_HOURS = {"hour": 1, "day": 24, "week": 168, "4 weeks": 672, "13 weeks": 2184, "52 weeks": 8736}
_CURVE_RANKS = 100
_LARGEST = np.iinfo(np.int64).max


class StatisticsCounter:
    """Follows the rows of a dataset, divided by the rule `split`, before windows are cut."""

    def __init__(self, split: str) -> None:
        self._split = split
        self._hours = ValueCounts()  # since 1970
        self._items: dict[str, ValueCounts] = {}
        self._events: dict[str, int] = {}
        self._users = self._eval_users = self._cold_users = 0
        self._first_ms, self._last_ms, self._newest_train = _LARGEST, -_LARGEST, -_LARGEST

    def follow(self, sequences: Sequences, divided: Mapping[str, Sequences]) -> None:
        """Count the events of all rows of some users, and of the same rows by split."""
        times = sequences.events[TIMESTAMP_MS]
        if len(times) > sequences.lengths.sum():  # filters left out users
            times = sequences.values(TIMESTAMP_MS)
        self._hours.add(times // _HOUR_MS)
        self._first_ms = min(self._first_ms, int(times.min(initial=_LARGEST)))
        self._last_ms = max(self._last_ms, int(times.max(initial=-_LARGEST)))
        self._users += len(sequences)
        for name, rows in divided.items():
            if rows.num_targets.any():  # the events before those to predict are in train too
                rows = replace(rows, begins=rows.ends - rows.num_targets)
            self._items.setdefault(name, ValueCounts()).add(rows.values(ITEM_ID))
            self._events[name] = self._events.get(name, 0) + int(rows.lengths.sum())
        train = divided[TRAIN]
        newest = train.events[TIMESTAMP_MS][train.order[train.ends - 1]]  # of each row
        self._newest_train = max(self._newest_train, int(newest.max(initial=-_LARGEST)))
        if EVAL in divided:
            users = divided[EVAL].user_ids
            self._eval_users += len(users)
            self._cold_users += int(np.isin(users, train.user_ids, invert=True).sum())

    def report(self, folder: Path) -> Statistics:
        """Return the statistics, once all splits are written to a folder."""
        hours, counts = self._hours.result()
        days, first_of_day = np.unique(hours // 24, return_index=True)
        per_day = np.add.reduceat(counts, first_of_day)
        unit, width = next(
            ((unit, width) for unit, width in _BIN_HOURS.items() if hours[-1] // width - hours[0] // width < _MAX_BINS),
            _fitting_width(int(hours[-1] - hours[0] + 1)),
        )
        items, item_events = self._items[TRAIN].result()
        eval_items, eval_events = self._items.get(EVAL, ValueCounts()).result()
        places, is_known = find(eval_items, items)
        item_events[places[is_known]] += eval_events[is_known]
        popularity = np.sort(np.concatenate([item_events, eval_events[~is_known]]))[::-1]
        num_items = len(popularity)
        ranks = np.unique(np.geomspace(1, num_items, _CURVE_RANKS).astype(np.int64))
        weighted = int((popularity * np.arange(num_items, 0, -1)).sum())  # the rarest item has weight 1
        return Statistics(
            split=self._split,
            events=self._events,
            users=self._users,
            items=num_items,
            first_ms=self._first_ms,
            last_ms=self._last_ms,
            days=int(days[-1] - days[0]) + 1,
            largest_day_ms=int(days[per_day.argmax()]) * 24 * _HOUR_MS,
            largest_day_events=int(per_day.max()),
            hours_of_day=_sums(hours % 24, counts, 24),
            bin_start_ms=int(hours[0] // width * width) * _HOUR_MS,
            bin_width_ms=width * _HOUR_MS,
            bin_unit=unit,
            bins=_sums(hours // width - hours[0] // width, counts, 0),
            ranks=ranks.tolist(),
            ranks_events=popularity[ranks - 1].tolist(),
            top_events=int(popularity[: -(-num_items // 100)].sum()),
            gini=round((2 * weighted / int(popularity.sum()) - num_items - 1) / num_items, 6),
            early_eval_events=_count_early(folder / EVAL, self._newest_train) if EVAL in self._events else 0,
            eval_items=len(eval_items),
            cold_items=int((~is_known).sum()),
            cold_item_events=int(eval_events[~is_known].sum()),
            eval_users=self._eval_users,
            cold_users=self._cold_users,
        )


def _fitting_width(num_hours: int) -> tuple[str, int]:
    """Return the width of bins of which fewer than the most allowed cover the hours, and its name."""
    width = -(-num_hours // (_MAX_BINS - 1))
    return f"{width / 24 / 365.25:,.1f} years", width


def _sums(keys: NDArray[np.int64], counts: NDArray[np.int64], num_keys: int) -> list[int]:
    return list(map(int, np.bincount(keys, weights=counts, minlength=num_keys)))


def _count_early(folder: Path, newest: int) -> int:
    """Count the events of eval that are older than a time."""
    rows, times = pl.scan_parquet(sorted(folder.glob("*.parquet")), glob=False), pl.col(TIMESTAMP_MS)
    if NUM_TARGETS in rows.collect_schema():
        times = times.list.tail(pl.col(NUM_TARGETS))
    is_early = rows.select(times).explode(TIMESTAMP_MS).select((pl.col(TIMESTAMP_MS) < newest).sum())
    return int(is_early.collect(engine="streaming").item())
