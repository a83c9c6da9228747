"""Recorded requests of users, to replay inference traffic: histories by then, and the events that followed.

events of a user     a b c d | e | f g        requests at a, e and f, max_num_candidates = 2
samples              a b                      candidates a b, no history
                     a b c d   e              history a b c d, candidate e
                     a b c d   e   f g
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.numba_cache import compiled
from evenrank.core.storage import locate
from evenrank.datasets.event_statistics import DURATIONS_MS
from evenrank.datasets.order import Samples
from evenrank.datasets.remote import latest_version
from evenrank.datasets.schema import REQUEST_COLUMNS, REQUESTS_NAME, TIMESTAMP_MS, USER_ID, read_manifest
from evenrank.datasets.store import SequenceStore, Slices, open_store
from evenrank.datasets.unpack import flat_values, open_file, wrap_parquet_errors

Ints = NDArray[np.int64]

_AGAIN = "preprocess the dataset again, with `evenrank preprocess --requests SECONDS`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """The order of samples that are the requests of `requests.parquet`, of the users of all splits: by time, then user.

    The history is what the user had done by then, of the same UTC day if requests were made with `--by-date`. The first
    `max_num_candidates` events from the request on, before the user's next one, are the candidates: with a limit that
    is large enough, each event is a candidate once. `sample_ids` number the requests of a split by time, then those of
    the next split.
    """

    def of(self, dataset: Path | str, max_num_candidates: int) -> list[SequenceStore]:
        """Open the splits of a dataset, with their requests in place of rows.

        Raises:
            DataError: the dataset has no requests, or they do not match its events.
            ConfigError: a user's history is in several rows.
        """
        stores = [open_store(dataset, split) for split in read_manifest(dataset).splits]
        rule = stores[0].manifest.options.get("requests")
        day_ms = DURATIONS_MS["d"] if isinstance(rule, dict) and rule.get("by_date") else 0
        path, (users, times, history_ends) = _read(dataset)
        by_time = np.lexsort((history_ends, users, times))
        users, times, history_ends = users[by_time], times[by_time], history_ends[by_time]
        rows, first, opened = _whole_rows(stores, users, dataset), 0, []
        is_valid = rows >= 0
        for store in stores:
            mine = np.flatnonzero((rows >= first) & (rows < first + len(store)))
            begins, events, ends = _locate(
                store.offsets, store.events[TIMESTAMP_MS], rows[mine] - first, times[mine], history_ends[mine], day_ms
            )
            by_event = np.argsort(events, kind="stable")
            next_events = np.append(events[by_event][1:], len(store.events[TIMESTAMP_MS]))
            ends[by_event] = np.minimum(ends[by_event], next_events)
            is_valid[mine] = ends > events  # also not if two requests are at the same event
            if is_valid.all():
                ends = np.minimum(ends, events + max_num_candidates)
                slices = Slices(rows[mine] - first, begins, ends)
                opened.append(store.sliced(slices, (ends - events).astype(np.int32)))
            first += len(store)
        if len(wrong := np.flatnonzero(~is_valid)):
            user, time = int(users[wrong[0]]), int(times[wrong[0]])
            raise DataError(f"{path}: the dataset has no event of the request of user {user} at {time} ms; {_AGAIN}")
        return opened


class RequestOrder:
    """The requests of several stores, numbered consecutively, by time and then by user, in every epoch."""

    def __init__(self, stores: Sequence[SequenceStore], samples: Sequence[Samples]) -> None:
        first, parts = 0, []
        for store, of_store in zip(stores, samples, strict=True):
            rows = of_store.rows(np.arange(len(of_store)))
            assert store.num_targets is not None
            times = store.events[TIMESTAMP_MS][store.ends[rows] - store.num_targets[rows]]
            parts.append((first + rows, store.rows[USER_ID][store.rows_of(rows)], times))
            first += len(store)
        sample_ids, users, times = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        self._rows = sample_ids[np.lexsort((users, times))]
        self.num_samples = len(self._rows)

    def rows(self, positions: Ints, *, seed: int, epoch: int) -> Ints:
        """Return the rows at positions."""
        return self._rows[positions]

    def fingerprint(self) -> tuple[object, ...]:
        """Return the kind of order and its length; the rest follows from the slices of the stores."""
        return ("requests", self.num_samples)


def _read(dataset: Path | str) -> tuple[str, list[Ints]]:
    path = latest_version(locate(dataset))[1] / REQUESTS_NAME
    if not path.is_file():
        raise DataError(f"{path} is missing; {_AGAIN}")
    with open_file(path) as opened, wrap_parquet_errors(str(path)), pq.ParquetFile(opened) as parquet:
        if wrong := [name for name in REQUEST_COLUMNS if parquet.schema_arrow.names.count(name) != 1]:
            raise DataError(f"{path} must have one column {wrong[0]!r}; {_AGAIN}")
        table = parquet.read(list(REQUEST_COLUMNS)).combine_chunks()
        columns = {name: table.column(name).combine_chunks() for name in REQUEST_COLUMNS}
    return str(path), [flat_values(column, "int64", name, str(path)) for name, column in columns.items()]


def _whole_rows(stores: Sequence[SequenceStore], users: Ints, dataset: Path | str) -> Ints:
    """Return the row with all events of each user [n], numbered through all stores; -1: the user is unknown.

    Splits have different users, or the later one's rows also have the events of the same user's earlier rows.
    """
    ids = np.concatenate([store.rows[USER_ID] for store in stores])
    lengths = np.concatenate([store.lengths for store in stores])
    before = [store.lengths - (store.lengths + 1 if (n := store.num_targets) is None else n) for store in stores]
    of_store = np.repeat(np.arange(len(stores)), [len(store) for store in stores])
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    is_again = np.flatnonzero(ordered[1:] == ordered[:-1])
    earlier, later = order[is_again], order[is_again + 1]
    is_whole = (lengths[earlier] == np.concatenate(before)[later]) & (of_store[earlier] < of_store[later])
    if not is_whole.all():
        user = int(ordered[is_again[~is_whole][0]])
        raise ConfigError(
            f"requests need the history of a user in one row, but {dataset} divides that of user {user}; preprocess it "
            "without --window, hashed ids, `--unknown oov` and a second log that overlaps the first"
        )
    places = np.searchsorted(ordered, users, side="right") - 1
    is_known = (places >= 0) & (len(ordered) > 0)
    is_known[is_known] = ordered[places[is_known]] == users[is_known]
    rows = np.full(len(users), -1)
    rows[is_known] = order[places[is_known]]
    return rows


@compiled
def _locate(
    offsets: Ints, event_times: Ints, rows: Ints, times: Ints, history_ends: Ints, day: int
) -> tuple[Ints, Ints, Ints]:
    """Return each request's first event of the history, own event, and end of the row: [n]; -1: no event is at it."""
    begins, events, ends = offsets[rows], np.full(len(rows), -1), offsets[rows + 1]
    for index in range(len(rows)):
        if day > 0:
            of_row = event_times[begins[index] : ends[index]]
            begins[index] += np.searchsorted(of_row, times[index] - times[index] % day)
        if 0 <= history_ends[index] < ends[index] - begins[index]:
            event = begins[index] + history_ends[index]
            if event_times[event] == times[index]:
                events[index] = event
                continue
        ends[index] = -1  # so that it has no events
    return begins, events, ends
