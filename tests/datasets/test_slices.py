"""Samples that are slices of rows: windows of time, and requests."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import Requests
from evenrank.datasets import open_store
from evenrank.datasets.event_statistics import DAY_MS
from evenrank.preprocess import Filters, PreprocessConfig, RequestRule, TabularConfig
from tests.datasets.crafted import store_of, windows_of
from tests.s3_server import S3

TIMES = st.integers(0, 9).map(lambda half_days: half_days * DAY_MS // 2)


@given(st.lists(st.lists(TIMES, max_size=7).map(sorted), max_size=6), st.integers(1, 4), st.booleans(), st.data())
def test_each_event_is_a_target_once_in_its_window_after_all_before_it(
    rows: list[list[int]], max_targets: int, late: bool, data: st.DataObject
) -> None:
    rows = [*rows, [5 * DAY_MS]]
    targets = [data.draw(st.integers(0, len(row))) for row in rows] if data.draw(st.booleans()) else None
    store = store_of(rows, targets)
    windows = windows_of(store, max_targets, every="1d", start="1970-01-03" if late else None, within="time")
    start, seen, all_times = 2 * DAY_MS if late else windows.start_ms, list[int](), store.columns["timestamp_ms"]
    for index in range(windows.count + 1):
        (cut,) = windows.of_epoch(index, [store])
        assert cut.begins.tolist() == store.offsets[cut.rows_of(np.arange(len(cut)))].tolist()
        of_samples = [[*range(end - count, end)] for end, count in zip(cut.ends, cut.num_targets, strict=True)]  # type: ignore[arg-type]
        assert all(1 <= len(events) <= max_targets for events in of_samples)
        assert {(all_times[event] - start) // DAY_MS for events in of_samples for event in events} <= {index}
        firsts = [all_times[events[0]] for events in of_samples]
        assert firsts == sorted(firsts)
        seen += [event for events in of_samples for event in events]
    assert sorted(seen) == [
        event
        for row, times in enumerate(rows)
        for event, time in enumerate(times, int(store.offsets[row]))
        if time >= start and (targets is None or event >= store.offsets[row + 1] - targets[row])
    ]


def test_windows_begin_at_multiples_of_their_length_or_at_the_start() -> None:
    store = store_of([[DAY_MS + 5], [], [3 * DAY_MS, 15 * DAY_MS]])
    days, weeks = windows_of(store, every="1d"), windows_of(store, every="1w")
    assert (days.count, days.times(1)) == (15, (datetime(1970, 1, 3, tzinfo=UTC), datetime(1970, 1, 4, tzinfo=UTC)))
    late = windows_of(store, every="12h", start="1970-01-15T06:00+06:00")
    assert [(each.start_ms, each.count) for each in (weeks, late)] == [(0, 3), (14 * DAY_MS, 3)]


LOG = "".join(f"{user},{10 * user + index},{1_600_000_000 + 100 * index}\n" for user in (3, 5) for index in range(6))
COLUMNS: Any = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}


def _write(folder: Path, log: str = LOG, **options: Any) -> Path:
    pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
    from evenrank.preprocess import preprocess

    (path := folder / "log.csv").write_text(f"user,item,time\n{log}")
    given: Any = {"ids": "keep", "split": "leave-last:1", "requests": RequestRule(seconds=200), **options}
    preprocess(
        PreprocessConfig(
            dataset="custom", out=folder / "data", custom=TabularConfig(events=(path,), **COLUMNS), **given
        )
    )
    return folder / "data"


def _items(data: Path | str, max_num_candidates: int = 2) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Return history and candidates of the requests of each split."""
    found = {}
    for store in Requests().open(data, open_store, max_num_candidates)[1]:
        assert store.num_targets is not None
        rows = zip(store.begins, store.ends - store.num_targets, store.ends, strict=True)
        items = store.columns["item_id"].tolist()
        found[store.split] = [(items[a:b], items[b:c]) for a, b, c in rows]
    return found


def test_requests_are_slices_of_the_rows_with_all_events_by_time(tmp_path: Path, s3: S3) -> None:
    expected = [
        *(([], [30, 31]), ([], [50, 51]), ([30, 31], [32, 33]), ([50, 51], [52, 53])),
        *(([30, 31, 32, 33], [34, 35]), ([50, 51, 52, 53], [54, 55])),
    ]
    assert _items(_write(tmp_path)) == {"train": [], "eval": expected}
    for limit, candidates in ((9, 2), (1, 1)):  # up to the user's next request
        assert _items(tmp_path / "data", limit)["eval"] == [(past, row[:candidates]) for past, row in expected]
    s3.put(tmp_path / "data", "requests")
    assert _items(s3.url("requests"))["eval"] == expected
    filtered = f"{LOG}5,30,1600000050\n7,30,1600000000\n"
    data = _write(tmp_path, filtered, split="none", filters=Filters(min_item_events=2))
    assert _items(data, 9) == {"train": [([], [30])] * 3}  # of the users 3, 7 and 5
    with pytest.raises(ConfigError, match=f"^requests need all events of a user in one row, but {data} divides those"):
        _items(_write(tmp_path, split="none", filters=Filters(window=4)))


def test_requests_of_no_event_or_twice_of_one_and_files_that_are_malformed_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path) / "requests.parquet"
    table = pq.read_table(path)

    def second(name: str, value: float) -> pa.Table:
        values = [*table[name].to_pylist()[:1], value, *table[name].to_pylist()[2:]]
        return table.set_column(table.schema.names.index(name), name, pa.array(values))

    wrong = {"history_end": (1, -1, 1 << 62), "user_id": (2, 4, 1 << 62), "request_ts_ms": (0,)}
    of_no_event = [second(name, value) for name, values in wrong.items() for value in values]
    of_no_event.append(pa.concat_tables([table, table.slice(2, 1)]))
    faults = [(each, "has a request of user .* ms, of which the dataset has no event; preproc") for each in of_no_event]
    faults += [(table.drop_columns("history_end"), "has 0 columns 'history_end'; preprocess the dataset again")]
    faults += [(second("history_end", 0.5), "column 'history_end' must be int64 without nulls, it has type double")]
    for each, fault in faults:
        pq.write_table(each, path)
        with pytest.raises(DataError, match=f"^{path}:? {fault}"):
            _items(tmp_path / "data")
    path.unlink()
    with pytest.raises(DataError, match=f"^{path} is missing; preprocess the dataset again, with `evenrank preproc"):
        _items(tmp_path / "data")
