"""Windows of time: what is trained in each, and the histories until then.

windows          |   0   |   1   |   2   |      max_num_candidates = 2
events of a row    a b c   d e f           g
samples of 1       [ a b c | d e ]
                   [ a b c   d e | f ]          each event of the window is a target once, after all before it
"""

import logging
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError, StateError
from evenrank.core.numba_cache import compiled
from evenrank.core.settings import Parsed, Settings, Valid
from evenrank.datasets.event_statistics import DURATIONS_MS
from evenrank.datasets.schema import TIMESTAMP_MS
from evenrank.datasets.store import SequenceStore, Slices

_log = logging.getLogger("evenrank")
_EVERY = re.compile(r"([1-9][0-9]{0,5})([hdw])")
_INT64_MAX = np.iinfo(np.int64).max
_NO_TARGETS = np.empty(0, dtype=np.int32)


def _start_ms(start: str) -> int:
    try:
        moment = datetime.fromisoformat(start)
    except ValueError:
        raise ConfigError(f"start must be a time in ISO 8601, such as 2015-01-06, got {start!r}") from None
    return round(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeWindows(Settings):
    """The order of samples in which each epoch is a window of time: its events are targets, earlier ones histories."""

    every: Annotated[str, Valid(_EVERY.fullmatch, "a number of hours, days or weeks, such as 6h, 1d or 1w")]
    """The length of a window: a number of hours, days or weeks, such as `6h`, `1d` and `1w`."""
    start: Annotated[str | None, Parsed(_start_ms)] = None
    """The begin of the first window, in ISO 8601, UTC by default; earlier events are only in histories. None: the first
    event's time, rounded down to a multiple of `every` since 1970."""
    shuffle: bool = True
    """Take the samples of a window in another order each time, else by the time of their first target."""

    @property
    def length_ms(self) -> int:
        """The length of a window in milliseconds."""
        return int(self.every[:-1]) * DURATIONS_MS[self.every[-1]]

    def of(self, store: SequenceStore) -> "WindowsOfStore":
        """Return the windows of a split.

        Raises:
            DataError: the split has no events, or no times of events.
            ConfigError: all events are before the start.
        """
        times, has_events = store.events[TIMESTAMP_MS], store.lengths > 0
        if not has_events.any():
            raise DataError(f"{store.folder or 'the dataset'} has no events in its split {store.split!r}")
        first_ms, last_ms = int(times[store.begins[has_events]].min()), int(times[store.ends[has_events] - 1].max())
        if first_ms == last_ms == 0:  # of a folder of Parquet files that has no times
            raise DataError(f"{store.folder or 'the dataset'} has no times of events; windows of time need them")
        start_ms = first_ms - first_ms % self.length_ms if self.start is None else _start_ms(self.start)
        if start_ms > last_ms:
            raise ConfigError(
                f"start {self.start} is after the last event, at {moment(last_ms).isoformat()}; choose an earlier one"
            )
        return WindowsOfStore(store, start_ms, self.length_ms, (last_ms - start_ms) // self.length_ms + 1)


def moment(time_ms: int) -> datetime:
    """Return a time in milliseconds since 1970 as a datetime in UTC."""
    return datetime.fromtimestamp(time_ms / 1000, UTC)


@dataclass(frozen=True, slots=True)
class WindowsOfStore:
    """The windows of a split, from the one with index 0 on."""

    store: SequenceStore
    start_ms: int
    length_ms: int
    count: int

    def begin(self, index: int) -> int:
        """Return the begin of a window, in milliseconds since 1970."""
        return self.start_ms + index * self.length_ms

    def times(self, index: int) -> tuple[datetime, datetime]:
        """Return the begin of a window, and its end, which is the next one's begin."""
        return moment(self.begin(index)), moment(self.begin(index + 1))

    def index_of(self, begin_ms: int | None) -> int:
        """Return the window that begins where a state ends (None: of no windows), or the first one if all are later."""
        if begin_ms is None:
            raise StateError(
                "the loader's state has no window of time: it is of another order, or of an earlier version of "
                "evenrank; call begin_at with the index of the first window that is not trained"
            )
        index, rest_ms = divmod(begin_ms - self.start_ms, self.length_ms)
        begin, end = moment(self.begin(index)).isoformat(), moment(begin_ms).isoformat()
        if rest_ms:
            raise StateError(
                f"the loader's state ends at {end}, within the window that begins at {begin}; pass "
                f"TimeWindows(start={end!r})"
            )
        if index < 0:
            _log.warning("the first window begins after %s, where the loader's state ends", end)
        return max(index, 0)

    def next_with_events(self, index: int) -> int:
        """Return the first window from this one on that has events; `count` if there is none."""
        times, begin_ms = self.store.events[TIMESTAMP_MS], self.begin(index)
        first_ms = int(np.min(times, where=times >= begin_ms, initial=_INT64_MAX))
        return min((first_ms - self.start_ms) // self.length_ms, self.count)

    def cut(self, index: int, max_targets: int) -> SequenceStore:
        """Return the samples of a window, by the time of their first target; a window after the last has none.

        Each event of the window is a target of one sample, one of the sample's `max_targets` last events. Of rows with
        a number of targets, only these are.
        """
        store, begin_ms = self.store, self.begin(index)
        targets = _NO_TARGETS if store.num_targets is None else store.num_targets
        times = store.events[TIMESTAMP_MS]
        window = min(begin_ms, _INT64_MAX), min(begin_ms + self.length_ms, _INT64_MAX)
        rows, ends, num_targets = _cut(store.begins, store.ends, targets, times, window, max_targets)
        order = np.argsort(times[ends - num_targets], kind="stable")
        rows, ends, num_targets = rows[order], ends[order], num_targets[order]
        return store.sliced(Slices(store.rows_of(rows), store.begins[rows], ends), num_targets)


@compiled
def _cut(
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    num_targets: NDArray[np.int32],
    times: NDArray[np.int64],
    window: tuple[int, int],
    max_targets: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
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
