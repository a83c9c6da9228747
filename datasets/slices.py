"""Orders of samples that are slices of rows: `TimeWindows`, and `Requests`, recorded ones to replay inference traffic.

windows          |   0   |   1   |   2   |      max_num_candidates = 2
events of a row    a b c   d e f           g
samples of 1       [ a b c | d e ]
                   [ a b c   d e | f ]          each event of the window is a target once, after all before it

events of a user     a b c d | e | f g        requests at a, e and f, max_num_candidates = 2
samples              a b                      candidates a b, no history
                     a b c d   e              history a b c d, candidate e
                     a b c d   e   f g
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError, DataError, StateError
from evenrank.core.rules import Parsed, Valid
from evenrank.core.settings import Settings
from evenrank.core.storage import locate
from evenrank.datasets.event_statistics import DURATIONS_MS
from evenrank.datasets.order import OpenSplit, Order, RowOrder, Samples, Stores
from evenrank.datasets.schema import (
    REQUEST_COLUMNS,
    REQUESTS_NAME,
    TIMESTAMP_MS,
    USER_ID,
    latest_version,
    read_manifest,
)
from evenrank.datasets.store import SequenceStore, Slices, open_store
from evenrank.datasets.unpack import check_columns, flat_values, open_file, wrap_parquet_errors

Ints = NDArray[np.int64]

_log = logging.getLogger("evenrank")
_EVERY = re.compile(r"([1-9][0-9]{0,5})([hdw])")
_LAST_MS = 253_402_300_799_999  # the last millisecond that is a datetime
_INT64_MAX = np.iinfo(np.int64).max
_NO_TARGETS = np.empty(0, dtype=np.int32)
_AGAIN = "preprocess the dataset again, with `evenrank preprocess --requests SECONDS`"


def _start_ms(start: str) -> int:
    try:
        moment = datetime.fromisoformat(start)
    except ValueError:
        raise ConfigError(f"start must be a time in ISO 8601, such as 2015-01-06, got {start!r}") from None
    return round(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeWindows(Settings, Order):
    """The order of samples in which each epoch is a window of time: its events are targets, earlier ones histories."""

    every: Annotated[str, Valid(_EVERY.fullmatch, "a number of hours, days or weeks, such as 6h, 1d or 1w")]
    """The length of a window: a number of hours, days or weeks, such as `6h`, `1d` and `1w`."""
    start: Annotated[str | None, Parsed(_start_ms)] = None
    """The begin of the first window, in ISO 8601, UTC by default; earlier events are only in histories. None: the first
    event's time, rounded down to a multiple of `every` since 1970."""
    shuffle: bool = True
    """Take the samples of a window in another order each time, else by the time of their first target."""

    targets = "windows of time"

    def open(self, data: Any, open_split: OpenSplit, max_targets: int) -> "tuple[WindowsOfStore, Stores]":
        """Open a split and find its windows.

        Raises:
            DataError: the split has no events, or no times of events.
            ConfigError: all events are before the start.
        """
        store, length_ms = open_split(data), int(self.every[:-1]) * DURATIONS_MS[self.every[-1]]
        times, has_events = store.columns[TIMESTAMP_MS], store.lengths > 0
        if not has_events.any():
            raise DataError(f"{store.folder or 'the dataset'} has no events in its split {store.split!r}")
        first_ms, last_ms = int(times[store.begins[has_events]].min()), int(times[store.ends[has_events] - 1].max())
        if first_ms == last_ms == 0:  # of a folder of Parquet files that has no times
            raise DataError(f"{store.folder or 'the dataset'} has no times of events; windows of time need them")
        start_ms = first_ms - first_ms % length_ms if self.start is None else _start_ms(self.start)
        if start_ms > last_ms:
            raise ConfigError(
                f"start {self.start} is after the last event, at {moment(last_ms).isoformat()}; choose an earlier one"
            )
        own = {**asdict(self), "start_ms": start_ms, "length_ms": length_ms, "max_targets": max_targets}
        return WindowsOfStore(**own, count=(last_ms - start_ms) // length_ms + 1), [store]


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
        """Return the samples of a window, by the time of their first target.

        Each event of the window is a target of one sample, one of the sample's `max_targets` last events. Of rows with
        a number of targets, only these are.
        """
        (store,), begin_ms = stores, self.begin(epoch)
        targets = _NO_TARGETS if store.num_targets is None else store.num_targets
        times = store.columns[TIMESTAMP_MS]
        window = min(begin_ms, _INT64_MAX), min(begin_ms + self.length_ms, _INT64_MAX)
        rows, ends, num_targets = _cut_window(store.begins, store.ends, targets, times, window, self.max_targets)
        order = np.argsort(times[ends - num_targets], kind="stable")
        rows, ends, num_targets = rows[order], ends[order], num_targets[order]
        return [store.sliced(Slices(store.rows_of(rows), store.begins[rows], ends), num_targets)]


@compiled
def _cut_window(
    begins: Ints,
    ends: Ints,
    num_targets: NDArray[np.int32],
    times: Ints,
    window: tuple[int, int],
    max_targets: int,
) -> tuple[Ints, Ints, NDArray[np.int32]]:
    """Return the row, the end and the number of targets of each sample: [samples] each."""
    firsts = np.empty(len(begins), dtype=np.int64)  # of the events of each row in the window
    lasts = np.empty(len(begins), dtype=np.int64)
    count = 0
    for row in range(len(begins)):
        begin, end = begins[row], ends[row]
        first = begin + np.searchsorted(times[begin:end], window[0])
        if len(num_targets):
            first = max(first, end - num_targets[row])
        firsts[row], lasts[row] = first, max(first, begin + np.searchsorted(times[begin:end], window[1]))
        count += (lasts[row] - firsts[row] + max_targets - 1) // max_targets
    rows = np.empty(count, dtype=np.int64)
    sample_ends = np.empty(count, dtype=np.int64)
    sizes = np.empty(count, dtype=np.int32)
    sample = 0
    for row in range(len(begins)):
        for first in range(firsts[row], lasts[row], max_targets):
            end = min(first + max_targets, lasts[row])
            rows[sample], sample_ends[sample], sizes[sample] = row, end, end - first
            sample += 1
    return rows, sample_ends, sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests(Order):
    """The order of samples that are the requests of `requests.parquet`, of the users of all splits: by time, then user.

    The history is what the user had done by then, of the same UTC day if requests were made with `--by-date`. The first
    `max_num_candidates` events from the request on, before the user's next one, are the candidates: with a limit that
    is large enough, each event is a candidate once. `sample_ids` number the requests of a split by time, then those of
    the next split.
    """

    targets, has_requests = "requests", True

    def open(self, data: Any, open_split: OpenSplit, max_targets: int) -> tuple[Order, Stores]:
        """Open the splits of a dataset, with their requests in place of rows.

        Raises:
            DataError: the dataset has no requests, or they do not match its events.
            ConfigError: a user's history is in several rows.
        """
        if not isinstance(data, Path | str):
            raise ConfigError(f"requests are of all splits of a dataset, not of {data!r}; pass its folder or URL")
        stores = [open_store(data, split) for split in read_manifest(data).splits]
        rule = stores[0].manifest.options.get("requests")
        day_ms = DURATIONS_MS["d"] if isinstance(rule, dict) and rule.get("by_date") else 0
        path, (users, times, history_ends) = _read_requests(data)
        by_time = np.lexsort((history_ends, users, times))
        users, times, history_ends = users[by_time], times[by_time], history_ends[by_time]
        rows, first, sliced = _whole_rows(stores, users, data), 0, []
        _check_found(rows, users, times, path)
        for store in stores:
            own = (rows >= first) & (rows < first + len(store))
            event_times, requests = store.columns[TIMESTAMP_MS], (rows[own] - first, times[own], history_ends[own])
            slices, events = _cut_requests(store.offsets, event_times, requests, day_ms, max_targets)
            _check_found(events, users[own], times[own], path)
            sliced.append(store.sliced(Slices(*slices), (slices[2] - events).astype(np.int32)))
            first += len(store)
        return self, sliced

    def arrange(self, stores: Stores, samples: Sequence[Samples]) -> "RequestOrder":
        """Return the order of the requests of all stores."""
        return RequestOrder(stores, samples)


class RequestOrder(RowOrder):
    """The requests of several stores, numbered consecutively, by time and then by user, in every epoch."""

    def __init__(self, stores: Stores, samples: Sequence[Samples]) -> None:
        first, parts = 0, []
        for store, of_store in zip(stores, samples, strict=True):
            assert store.num_targets is not None  # because it is sliced
            rows = of_store.rows(np.arange(len(of_store)))
            times = store.columns[TIMESTAMP_MS][store.ends[rows] - store.num_targets[rows]]
            parts.append((first + rows, store.columns[USER_ID][store.rows_of(rows)], times))
            first += len(store)
        sample_ids, users, times = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        self._rows = sample_ids[np.lexsort((users, times))]
        self.num_samples = len(self._rows)

    def rows(self, positions: Ints, *, seed: int, epoch: int) -> Ints:
        """Return the rows at positions."""
        return self._rows[positions]

    def fingerprint(self) -> tuple[object, ...]:
        """Return the kind of order and its length."""
        return ("requests", self.num_samples)


def _read_requests(dataset: Path | str) -> tuple[str, list[Ints]]:
    path = latest_version(locate(dataset))[1] / REQUESTS_NAME
    if not path.is_file():
        raise DataError(f"{path} is missing; {_AGAIN}")
    with open_file(path) as opened, wrap_parquet_errors(str(path)), pq.ParquetFile(opened) as parquet:
        check_columns(REQUEST_COLUMNS, parquet.schema_arrow.names, path, _AGAIN)
        table = parquet.read(list(REQUEST_COLUMNS))
        columns = {name: table.column(name).combine_chunks() for name in REQUEST_COLUMNS}
    return str(path), [flat_values(column, "int64", name, str(path)) for name, column in columns.items()]


def _whole_rows(stores: Sequence[SequenceStore], users: Ints, dataset: Path | str) -> Ints:
    """Return the row with all events of each user [n], numbered through all stores; -1: the user is unknown.

    Splits have different users, or the later one's rows also have the events of the same user's earlier rows.
    """
    ids = np.concatenate([store.columns[USER_ID] for store in stores])
    lengths = np.concatenate([store.lengths for store in stores])
    targets = [store.lengths + 1 if store.num_targets is None else store.num_targets for store in stores]
    splits = np.repeat(np.arange(len(stores)), [len(store) for store in stores])
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    is_again = np.flatnonzero(ordered[1:] == ordered[:-1])
    earlier, later = order[is_again], order[is_again + 1]
    num_before = (lengths - np.concatenate(targets))[later]
    is_divided = (lengths[earlier] != num_before) | (splits[earlier] == splits[later])
    if is_divided.any():
        raise ConfigError(
            f"requests need all events of a user in one row, but {dataset} divides those of user "
            f"{ordered[is_again[is_divided][0]]}; preprocess it without --window, hashed ids, `--unknown oov` and a "
            "second log that overlaps the first"
        )
    places = np.searchsorted(ordered, users, side="right") - 1  # -1: below all
    return np.where(np.append(ordered, 0)[places] == users, np.append(order, -1)[places], -1)


def _check_found(found: Ints, users: Ints, times: Ints, path: str) -> None:
    if len(wrong := np.flatnonzero(found < 0)):
        user, time = users[wrong[0]], times[wrong[0]]
        raise DataError(
            f"{path} has a request of user {user} at {time} ms, of which the dataset has no event; {_AGAIN}"
        )


@compiled
def _cut_requests(
    offsets: Ints, event_times: Ints, requests: tuple[Ints, Ints, Ints], day: int, max_num_candidates: int
) -> tuple[tuple[Ints, Ints, Ints], Ints]:
    """Return the slices of requests (rows, times, history_ends), which are in time order, and the event of each.

    All are int64 [n]. The event is -1 if the row has none at this time and place, or it is that of the next request.
    """
    rows, times, history_ends = requests
    begins, events, ends = offsets[rows], np.full(len(rows), -1), offsets[rows]
    next_events = offsets[1:].copy()  # of each row's next request
    for index in range(len(rows) - 1, -1, -1):
        end = next_events[rows[index]]
        if day > 0:
            begins[index] += np.searchsorted(event_times[begins[index] : end], times[index] - times[index] % day)
        event = begins[index] + min(max(history_ends[index], 0), end - begins[index])
        if event < end and event_times[event] == times[index] and history_ends[index] >= 0:
            events[index], ends[index] = event, min(end, event + max_num_candidates)
            next_events[rows[index]] = event
    return (rows, begins, ends), events
