"""Orders of samples whose targets are single events, or those of a time: `Targets`, `TimeWindows`.

windows          |   0   |   1   |   2   |      max_num_candidates = 2
events of a row    a b c   d e f           g
samples of 1       [ a b c | d e ]
                   [ a b c   d e | f ]          each event of the window is a target once, after all before it

Targets(where="action == 1", min_history=2)     max_num_candidates = 1
events of a row    a b c d e                    their actions are 1 0 1 0 1
samples            [ a b | c ]
                   [ a b c d | e ]
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError, DataError, StateError
from evenrank.core.expressions import Expression
from evenrank.core.rules import AppliesTo, Bounds, NonNegative, Parsed, Valid
from evenrank.core.settings import Settings
from evenrank.datasets.event_statistics import DURATIONS_MS
from evenrank.datasets.order import OpenSplit, Order, RowOrder, Samples, Stores
from evenrank.datasets.schema import TIMESTAMP_MS
from evenrank.datasets.store import SequenceStore, Slices

Ints = NDArray[np.int64]

_log = logging.getLogger("evenrank")
_EVERY = re.compile(r"([1-9][0-9]{0,5})([hdw])")
_FIRST = "first"
_LAST_MS = 253_402_300_799_999  # the last millisecond that is a datetime
_INT64_MAX = np.iinfo(np.int64).max
_EVENTS_AT_ONCE = 1 << 18  # on which a condition is evaluated, so that its columns fit into caches


class _Cut(NamedTuple):
    """Samples as parts of rows, row by row: [samples] each."""

    rows: Ints
    ends: Ints
    """The event after the last target, among all of the split."""
    num_targets: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetOrder(Settings, Order):
    """Base of orders of samples that end with targets: which events are targets, and in what order samples come."""

    where: Annotated[str | None, Parsed(Expression)] = None
    """Condition of the events that are targets, such as `action in (1, 4)`, over the columns of events, `user_id` and
    contextual features of one value. None: all events. Of rows with a number of targets, only these can be."""
    min_history: NonNegative = 0
    """How many earlier events of its row a target has at least."""
    within: Literal["shuffle", "time", "user"] = "shuffle"
    """Order of the samples of an epoch: `time`, by the time of their first target; `user`, those of a row one after the
    other, row by row; `shuffle`, another permutation each time."""
    segment: Annotated[float, Bounds(above=0, at_most=1), AppliesTo(within=("shuffle",))] = 1.0
    """Shuffle the samples, ordered by user, only within consecutive segments of this share of them."""

    @property
    def _is_filtered(self) -> bool:
        return self.where is not None or self.min_history > 0

    def _check_fit(self, store: SequenceStore, max_targets: int) -> None:
        """Raise a ConfigError if the settings do not fit the columns of a store, or the number of candidates."""
        if self._is_filtered and max_targets != 1:
            raise ConfigError(
                f"with where or min_history, samples have one target, got max_num_candidates={max_targets}; pass 1"
            )
        if self.where is not None:
            kinds = {column.name: "number" for column in store.manifest.columns if column.kind != "list"}
            if (kind := Expression(self.where).kind(kinds)) != "condition":
                raise ConfigError(f"where must be a condition, such as 'action == 1', got the {kind} {self.where!r}")

    def _no_targets(self, store: SequenceStore) -> ConfigError:
        return ConfigError(
            f"no event in the split {store.split!r} of {store.folder or 'the dataset'} is a target with "
            f"where={self.where!r} and min_history={self.min_history}; choose others"
        )

    def _cut(self, store: SequenceStore, max_targets: int, window: tuple[int, int] | None = None) -> _Cut:
        """Return the samples whose targets are all that qualify, or those with times in a window [begin, end)."""
        firsts, lasts = store.begins, store.ends
        if window is not None:
            limits = [min(limit, _INT64_MAX) for limit in window]
            firsts, lasts = _search(firsts, lasts, store.columns[TIMESTAMP_MS], *limits)
        firsts = np.maximum(firsts, store.begins + self.min_history)
        if store.num_targets is not None:
            firsts = np.maximum(firsts, store.ends - store.num_targets)
        counts = np.maximum(lasts - firsts, 0)
        if self.where is None:
            return _Cut(*_cut_rows(firsts, counts, max_targets))
        where, parts = Expression(self.where), []
        blocks = np.flatnonzero(np.diff(np.cumsum(counts) // _EVENTS_AT_ONCE, prepend=-1)).tolist() or [0]
        for begin, end in pairwise([*blocks, len(counts)]):
            cut = _Cut(*_cut_rows(firsts[begin:end], counts[begin:end], max_targets))
            rows = cut.rows + begin
            kept = _holds(where, store, store.rows_of(rows), cut.ends - 1)
            parts.append((rows[kept], cut.ends[kept], cut.num_targets[kept]))
        return _Cut(*map(np.concatenate, zip(*parts, strict=True)))

    def _sliced(self, store: SequenceStore, cut: _Cut) -> SequenceStore:
        """Return a store with these samples, which get numbers in the order of `within`."""
        rows, ends, num_targets = cut
        if self.within == "time":
            order = np.argsort(store.columns[TIMESTAMP_MS][ends - num_targets], kind="stable")
            rows, ends, num_targets = rows[order], ends[order], num_targets[order]
        # Within their rows as they were made, so not checked again: there may be many.
        return replace(store, slices=Slices(store.rows_of(rows), store.begins[rows], ends), num_targets=num_targets)

    def arrange(self, stores: Stores, samples: Sequence[Samples]) -> RowOrder:
        """Return the order of the samples of one store, with the settings in its fingerprint."""
        settings = (self.where, self.min_history, self.within, self.segment)
        is_shuffled = self.within == "shuffle"
        return RowOrder(samples=samples[0], shuffle=is_shuffled, segment=self.segment, settings=settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets(TargetOrder):
    """The order of samples in which each event that qualifies is a target once per epoch, after all before it.

    A process keeps 28 bytes per sample; of a log with billions of targets, train on `TimeWindows`.
    """

    targets = "samples of Targets"

    def open(self, data: Any, open_split: OpenSplit, max_targets: int) -> tuple[Order, Stores]:
        """Open a split and find its targets.

        Raises:
            ConfigError: the settings do not fit the split, or no event qualifies.
        """
        store = open_split(data)
        self._check_fit(store, max_targets)
        cut = self._cut(store, max_targets)
        if not len(cut.rows):
            raise self._no_targets(store)
        return self, [self._sliced(store, cut)]


def _start_ms(start: str) -> int:
    try:
        moment = datetime.fromisoformat(start)
    except ValueError:
        raise ConfigError(f"start must be a time in ISO 8601, such as 2015-01-06, or 'first', got {start!r}") from None
    return round(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeWindows(TargetOrder):
    """The order of samples in which each epoch is a window of time: its events are targets, earlier ones histories."""

    every: Annotated[str, Valid(_EVERY.fullmatch, "a number of hours, days or weeks, such as 6h, 1d or 1w")]
    """The length of a window: a number of hours, days or weeks, such as `6h`, `1d` and `1w`."""
    start: Annotated[str | None, Parsed(lambda start: start == _FIRST or _start_ms(start))] = None
    """The begin of the first window, in ISO 8601, UTC by default; earlier events are only in histories. `first`: the
    time of the first target. None: the first event's time, rounded down to a multiple of `every` since 1970."""

    targets = "windows of time"

    def open(self, data: Any, open_split: OpenSplit, max_targets: int) -> "tuple[WindowsOfStore, Stores]":
        """Open a split and find its windows.

        Raises:
            DataError: the split has no events, or no times of events.
            ConfigError: the settings do not fit the split, all events are before the start, or none qualifies.
        """
        store, length_ms = open_split(data), int(self.every[:-1]) * DURATIONS_MS[self.every[-1]]
        self._check_fit(store, max_targets)
        times, has_events = store.columns[TIMESTAMP_MS], store.lengths > 0
        if not has_events.any():
            raise DataError(f"{store.folder or 'the dataset'} has no events in its split {store.split!r}")
        first_ms, last_ms = int(times[store.begins[has_events]].min()), int(times[store.ends[has_events] - 1].max())
        if first_ms == last_ms == 0:  # of a folder of Parquet files that has no times
            raise DataError(f"{store.folder or 'the dataset'} has no times of events; windows of time need them")
        start_ms = first_ms - first_ms % length_ms if self.start in (None, _FIRST) else _start_ms(str(self.start))
        if start_ms > last_ms:
            raise ConfigError(
                f"start {self.start} is after the last event, at {moment(last_ms).isoformat()}; choose an earlier one"
            )
        if self.start == _FIRST or self._is_filtered:
            first_target_ms = self._first_target_ms(store, max(start_ms, first_ms), last_ms, length_ms)
            start_ms = first_target_ms if self.start == _FIRST else start_ms
        own = {**asdict(self), "start_ms": start_ms, "length_ms": length_ms, "max_targets": max_targets}
        return WindowsOfStore(**own, count=(last_ms - start_ms) // length_ms + 1), [store]

    def _first_target_ms(self, store: SequenceStore, begin_ms: int, last_ms: int, length_ms: int) -> int:
        """Return the time of the first target from a time on, found in windows that double in length."""
        while begin_ms <= last_ms:
            _, ends, num_targets = self._cut(store, 1, (begin_ms, begin_ms + length_ms))
            if len(ends):
                return int(store.columns[TIMESTAMP_MS][ends - num_targets].min())
            begin_ms, length_ms = begin_ms + length_ms, 2 * length_ms
        raise self._no_targets(store)


def moment(time_ms: int) -> datetime:
    """Return a time in milliseconds since 1970 as a datetime in UTC."""
    return datetime.fromtimestamp(time_ms / 1000, UTC)


def place_of(begin_ms: int, end_ms: int) -> str:
    """Return the times of a window as states have them, also for other datasets and other windows."""
    return "/".join(moment(min(time_ms, _LAST_MS)).isoformat() for time_ms in (begin_ms, end_ms))


def times_of_place(place: str) -> tuple[int, int]:
    """Return the times, in milliseconds since 1970, that `place_of` was given; a StateError if it was not."""
    try:
        begin, end = (_start_ms(time) for time in place.split("/"))
    except ValueError:
        raise StateError(
            "the loader's state has no window of time: it is of another order, or of an earlier version of "
            "evenrank; call begin_at with the index of the first window that is not trained"
        ) from None
    return begin, end


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowsOfStore(TimeWindows):
    """The windows of a split, each of them an epoch, from the one with index 0 on; those after the last are empty."""

    start_ms: int
    length_ms: int
    count: int
    max_targets: int

    def begin(self, index: int) -> int:
        """Return the begin of a window, in milliseconds since 1970."""
        return self.start_ms + index * self.length_ms

    def times(self, index: int) -> tuple[datetime, datetime]:
        """Return the begin of a window, and its end, which is the next one's begin."""
        return moment(self.begin(index)), moment(self.begin(index + 1))

    def place(self, epoch: int) -> str:
        """Return the times of a window."""
        return place_of(self.begin(epoch), self.begin(epoch + 1))

    def following(self, epoch: int, place: str, *, has_begun: bool) -> int:
        """Return the window that begins where a state's ends, or begins if it has not begun, or a later first one."""
        time_ms = times_of_place(place)[has_begun]
        index, rest_ms = divmod(time_ms - self.start_ms, self.length_ms)
        begin, end = moment(self.begin(index)).isoformat(), moment(time_ms).isoformat()
        if rest_ms:
            raise StateError(
                f"the loader's state ends at {end}, within the window that begins at {begin}; pass "
                f"TimeWindows(start={end!r})"
            )
        if index < 0:
            _log.warning("the first window begins after %s, where the loader's state ends", end)
        return max(index, 0)

    def after_empty(self, epoch: int, stores: Stores) -> int | None:
        """Return the next window that has events, or `count` if there is none."""
        times, begin_ms = stores[0].columns[TIMESTAMP_MS], self.begin(epoch + 1)
        first_ms = int(np.min(times, where=times >= begin_ms, initial=_INT64_MAX))
        return None if epoch >= self.count else min((first_ms - self.start_ms) // self.length_ms, self.count)

    def of_epoch(self, epoch: int, stores: Stores) -> Stores:
        """Return the samples of a window.

        Each event of the window that qualifies is a target of one sample, one of its last `max_targets` events.
        """
        (store,), window = stores, (self.begin(epoch), self.begin(epoch + 1))
        return [self._sliced(store, self._cut(store, self.max_targets, window))]


def _holds(where: Expression, store: SequenceStore, rows: Ints, events: Ints) -> NDArray[np.bool_]:
    """Return whether a condition holds for events [n] of rows [n]. Integers are evaluated as int64."""
    kinds = {column.name: column.kind for column in store.manifest.columns}
    columns: dict[str, NDArray[Any]] = {}
    for name in where.names:
        values = store.columns[name][events if kinds[name] == "event" else rows]
        columns[name] = values if values.dtype.kind == "f" else values.astype(np.int64, copy=False)
    return np.broadcast_to(where(columns), events.shape)


@compiled
def _search(begins: Ints, ends: Ints, times: Ints, begin_ms: int, end_ms: int) -> tuple[Ints, Ints]:
    """Return, of rows [n], the first event from `begin_ms` on, and from `end_ms` on: int64 [n] each."""
    firsts = np.empty(len(begins), dtype=np.int64)
    lasts = np.empty(len(begins), dtype=np.int64)
    for row in range(len(begins)):
        of_row = times[begins[row] : ends[row]]
        firsts[row] = begins[row] + np.searchsorted(of_row, begin_ms)
        lasts[row] = begins[row] + np.searchsorted(of_row, end_ms)
    return firsts, lasts


@compiled
def _cut_rows(firsts: Ints, counts: Ints, max_targets: int) -> tuple[Ints, Ints, NDArray[np.int32]]:
    """Return the samples of rows [n] with these many targets from the first ones on: row, end, number of targets."""
    num_samples = 0
    for row in range(len(firsts)):
        num_samples += (counts[row] + max_targets - 1) // max_targets
    rows = np.empty(num_samples, dtype=np.int64)
    ends = np.empty(num_samples, dtype=np.int64)
    sizes = np.empty(num_samples, dtype=np.int32)
    sample = 0
    for row in range(len(firsts)):
        last = firsts[row] + counts[row]
        for first in range(firsts[row], last, max_targets):
            end = min(first + max_targets, last)
            rows[sample], ends[sample], sizes[sample] = row, end, end - first
            sample += 1
    return rows, ends, sizes
