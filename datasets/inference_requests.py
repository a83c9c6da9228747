"""`Requests`: the order of recorded requests, to replay inference traffic.

events of a user     a b c d | e | f g        requests at a, e and f, max_num_candidates = 2
samples              a b                      candidates a b, no history
                     a b c d   e              history a b c d, candidate e
                     a b c d   e   f g
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError, DataError
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

_AGAIN = "preprocess the dataset again, with `evenrank preprocess --requests SECONDS`"


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
            f"{ordered[is_again[is_divided][0]]}; preprocess it without --window, hashed ids, `--unknown oov`, "
            "--min-count for users and a second log that overlaps the first"
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
