import gc
import json
import math
import random
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evenrank.core.errors import ConfigError, DataError, StateError
from evenrank.core.storage import Remote
from evenrank.datasets import FolderLog, LogEnd, LogSource, describe_log
from evenrank.datasets.continuous_log import rows_of_table
from tests.datasets.logs import MANIFEST, SIZES, add_file, end_log, items_of, table_of
from tests.s3_server import S3


def _users(log: LogSource, first: int, end: int) -> list[int]:
    users: list[int] = log.read(first, end).columns["user_id"].tolist()
    return users


def _resumed(folder: Path | str, position: int, mark: str) -> FolderLog:
    log = FolderLog(folder, MANIFEST)
    log.resume(position, mark)
    return log


def test_a_log_has_the_records_of_its_files_in_the_order_of_names(tmp_path: Path) -> None:
    log = FolderLog(tmp_path, MANIFEST)
    assert isinstance(log, LogSource)
    assert log.end() == (0, False)
    assert list(log.read(0, 0).columns)[-4:] == ["item_id", "action", "timestamp_ms", "dwell"]
    add_file(tmp_path, "day=1/10-05.parquet", range(7, 20))
    add_file(tmp_path, "day=1/10-00.parquet", range(7))
    add_file(tmp_path, "day=2/00-00.parquet", [])
    assert log.end() == (20, False)
    add_file(tmp_path, "day=2/00-05.parquet", range(20, 22))
    for first in range(22):
        assert _users(log, first, 20) == list(range(first, 20))  # 22 are there, but nobody looked
    end_log(tmp_path)
    assert log.end() == LogEnd(22, True)
    store = log.read(5, 22)
    for row, record in enumerate(range(5, 22)):
        events = slice(store.offsets[row], store.offsets[row + 1])
        assert store.columns["item_id"][events].tolist() == items_of(record)
        assert {*store.columns["dwell"][events]} == {record}
        assert {*store.columns["action"][events]} == {record % 3}
    assert store.columns["share"].tolist() == [record / 2 for record in range(5, 22)]
    assert store.columns["segment"].dtype == np.int64
    assert not store.columns["timestamp_ms"].any()  # the files have none


def test_files_that_are_being_written_wait_and_so_do_those_after_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="evenrank")
    log = FolderLog(tmp_path, MANIFEST)
    add_file(tmp_path, "1.parquet", range(3))
    whole = add_file(tmp_path, "2.parquet", range(3, 6)).read_bytes()
    add_file(tmp_path, "3.parquet", range(6, 9))
    for name in ("2.parquet.tmp", ".2.parquet", "_tmp/2.parquet"):
        add_file(tmp_path, name, range(100, 103))
    end_log(tmp_path)
    for size in (0, 3, 4, 20, len(whole) - 1):
        (tmp_path / "2.parquet").write_bytes(whole[:size])
        assert log.end() == (3, False)
    assert caplog.messages == [f"waiting until {tmp_path}/2.parquet is complete"]
    (tmp_path / "2.parquet").write_bytes(whole)
    assert log.end() == (9, True)
    assert _users(log, 2, 7) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("seed", range(12))
def test_ranks_number_records_alike_however_a_growing_folder_is_listed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing has all files that were there when it began, and any of those that were added, in order, meanwhile."""
    draw = random.Random(seed)
    sizes = [draw.randint(0, 4) for _ in range(8)]
    files_below, added = Remote.files_below, [0]

    def list_slowly(self: Remote, *pattern: Any) -> Any:
        before = {f"{number}.parquet" for number in range(added[0])}
        for _ in range(draw.randint(0, len(sizes) - added[0])):
            first = sum(sizes[: added[0]])
            add_file(tmp_path, f"{added[0]}.parquet", range(first, first + sizes[added[0]]))
            added[0] += 1
        if added[0] == len(sizes):
            end_log(tmp_path)
        found = files_below(self, *pattern)
        return {name: found[name] for name in sorted(found) if name in before or draw.random() < 0.5}

    monkeypatch.setattr(Remote, "files_below", list_slowly)
    logs = [FolderLog(tmp_path, MANIFEST) for _ in range(2)]
    ends = [LogEnd(0, False)] * len(logs)
    while not all(end.is_final for end in ends):
        ends = [log.end() for log in logs]
        for log, end in zip(logs, ends, strict=True):
            assert _users(log, 0, end.position) == list(range(end.position))
    assert ends == [LogEnd(sum(sizes), True)] * len(logs)
    marks, others = ([log.mark(position) for position in range(sum(sizes) + 1)] for log in logs)
    assert others == marks


@pytest.mark.parametrize("late", ["00000a", "00149a", "00001a", "00050a"])
def test_a_file_that_comes_late_while_no_job_runs_is_refused_and_old_files_may_go(tmp_path: Path, late: str) -> None:
    whole = add_file(tmp_path, "00000.parquet", range(2)).read_bytes()
    for number in range(1, 150):  # more than a mark names
        (tmp_path / f"{number:05}.parquet").write_bytes(whole)
    log = FolderLog(tmp_path, MANIFEST)
    log.end()
    mark = log.mark(300)
    assert len(mark) < 3000
    resumed = _resumed(tmp_path, 300, mark)
    assert (resumed.mark(300), resumed.end(), resumed.mark(300)) == (mark, (300, False), mark)
    (tmp_path / f"{late}.parquet").write_bytes(whole)
    if late != "00149a":  # after all that were read
        where = rf"got {late}\.parquet after 00149\.parquet, .* was read; add files in the order of their names"
        with pytest.raises(DataError, match=where):
            resumed.end()
        name = f"{late}.parquet after" if late > "00049" else "files before 00049.parquet after"  # which names it has
        with pytest.raises(DataError, match=f"got {name}"):
            _resumed(tmp_path, 300, mark).end()
        (tmp_path / f"{late}.parquet").unlink()
    for number in (*range(60), 70):
        (tmp_path / f"{number:05}.parquet").unlink()
    pruned = _resumed(
        tmp_path, 300, json.dumps(json.loads(mark)[:4]) if late == "00001a" else mark
    )  # of an earlier version
    assert pruned.end() == (302 if late == "00149a" else 300, False)


def test_a_file_whose_writer_died_is_a_warning_and_then_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("evenrank.datasets.continuous_log.time", SimpleNamespace(monotonic=lambda: now[0]))
    whole = add_file(tmp_path, "1.parquet", range(3)).read_bytes()
    log = FolderLog(tmp_path, MANIFEST, incomplete_seconds=100.0)
    for size in (0, len(whole) // 2):  # one that grows is waited for anew
        (tmp_path / "1.parquet").write_bytes(whole[:size])
        caplog.clear()
        for passed in (0, 9, 11, 90, 99):
            now[0] += passed - now[0] % 1000
            assert log.end() == (0, False)
        fault = f"{tmp_path}/1.parquet is no complete Parquet file, and has had {size:,} bytes for"
        assert caplog.messages == [f"{fault} 11 s; it and all files after it wait"]
        now[0] += 1000
    with pytest.raises(DataError, match=f"{fault} 1,099 s; write it again, delete it, or raise incomplete_seconds"):
        log.end()
    (tmp_path / "1.parquet").write_bytes(whole)
    assert log.end() == (3, False)


def test_a_log_keeps_little_of_each_file(tmp_path: Path) -> None:
    whole = add_file(tmp_path, "2026-11-25T10-05-00000.parquet", range(4), group_rows=1).read_bytes()
    log = FolderLog(tmp_path, MANIFEST)
    log.end()
    for number in range(1, 400):
        (tmp_path / f"2026-11-25T10-05-{number:05}.parquet").write_bytes(whole)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        log.end()
        gc.collect()
        assert (tracemalloc.get_traced_memory()[0] - before) / 400 < 200  # bytes, of which the name has 80
    finally:
        tracemalloc.stop()


def test_files_that_change_before_they_are_trained_are_refused_and_earlier_ones_may_go(tmp_path: Path) -> None:
    log = FolderLog(tmp_path, MANIFEST)
    for number in range(3):
        add_file(tmp_path, f"{number}.parquet", range(number * 10, number * 10 + 10))
    log.end()
    assert _users(log, 8, 12) == [8, 9, 10, 11]
    marks = {position: log.mark(position) for position in (0, 10, 12)}
    (tmp_path / "0.parquet").unlink()
    assert log.end() == (30, False)
    for position in (10, 12):
        resumed = _resumed(tmp_path, position, marks[position])
        assert (resumed.mark(position), resumed.end()) == (marks[position], (30, False))
        assert _users(resumed, position, 30) == list(range(position, 30))
        add_file(tmp_path, "15.parquet", [])
        with pytest.raises(DataError, match=r"got 15\.parquet after 2\.parquet, which sorts after it, was read"):
            resumed.end()
        (tmp_path / "15.parquet").unlink()
    with pytest.raises(StateError, match=r"position 10 of .* is not known here"):
        resumed.mark(10)
    fault = r"1\.parquet was replaced or deleted before all of its records were trained; restore it"
    for is_deleted in (False, True):
        if is_deleted:
            (tmp_path / "1.parquet").unlink()
        else:
            add_file(tmp_path, "1.parquet", range(40, 50))
        with pytest.raises(DataError, match=fault):
            _users(log, 14, 15)
        with pytest.raises(DataError, match=fault):
            _resumed(tmp_path, 12, marks[12])
        fresh = _resumed(tmp_path, 0, marks[0])
        assert fresh.end() == (10 if is_deleted else 20, False)
    with pytest.raises(StateError, match=r"the state is of another log than .*, a folder"):
        fresh.resume(12, "topic[3]")


TABLE = table_of(range(6))


def _with(name: str, values: Any) -> pa.Table:
    return TABLE.set_column(TABLE.column_names.index(name), name, [values])


def _each(value: Any) -> list[list[Any]]:
    return [[value] * len(items_of(record)) for record in range(6)]


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        (TABLE.drop_columns("segment"), " has 0 columns 'segment'; write one, as the log's manifest says"),
        (
            _with("item_id", _each(50)),
            r": item_id has 50, which vocabulary_sizes\['item_id'\] = 50 of the log does not allow",
        ),
        (_with("action", [[0]] * 6), r", row 1: 'item_id' has 2 values, 'action' has 1"),
        (_with("segment", [None] * 6), r": column 'segment' .* must have integers"),
        (_with("action", _each(2**40)), r": column 'action' .*type int64: Integer value 1099511627776"),
        (_with("share", [["x"]] * 6), r": column 'share' .*type list<element: string>: "),
        (_with("share", list("abcdef")), r": column 'share' .*type string: Failed to parse"),
        (_with("dwell", _each("x")), r": column 'dwell' .*it has 0 nulls and type string"),
        (
            _with("user_id", pa.array([2**63] * 6, pa.uint64())),
            r": column 'user_id' .*type uint64: Integer value 92233",
        ),
        (
            pa.table([*TABLE.columns, TABLE["user_id"]], names=[*TABLE.column_names, "user_id"]),
            " has 2 columns 'user_id'; write one, as the log's manifest says",
        ),
        (
            TABLE.append_column("num_targets", pa.array([1, 2, 4, 1, 1, 1])),
            ", row 2: num_targets is 4, of 3 events; it is the number of last events",
        ),
    ],
)
def test_rows_that_do_not_fit_the_log_are_refused_with_place_and_value(
    tmp_path: Path, table: pa.Table, fault: str
) -> None:
    add_file(tmp_path, "1.parquet", range(4))
    pq.write_table(table, tmp_path / "2.parquet")  # in the middle of a log
    log = FolderLog(tmp_path, MANIFEST)
    assert log.end() == (10, False)
    assert _users(log, 0, 4) == [0, 1, 2, 3]
    with pytest.raises(DataError, match=rf"2\.parquet{fault}"):
        log.read(4, 10)
    with pytest.raises(DataError, match=f"^topic{fault}"):
        rows_of_table(table, MANIFEST, "topic")


def test_rows_have_numbers_of_targets_if_all_files_have_them(tmp_path: Path) -> None:
    for number, name in enumerate(("1", "2", "3")):
        table = table_of(range(4 * number, 4 * number + 4))
        targets = table.append_column("num_targets", pa.array([0, 1, 2, 3], pa.int16()))
        pq.write_table(targets if name != "3" else table, tmp_path / f"{name}.parquet")
    log = FolderLog(tmp_path, MANIFEST)
    log.end()
    stored = log.read(1, 7).num_targets
    assert stored is not None
    assert (stored.tolist(), str(stored.dtype)) == ([1, 2, 3, 0, 1, 2], "int32")
    assert log.read(8, 9).num_targets is None
    fault = r": some files have a column 'num_targets' and some not; write it to all or to none"
    with pytest.raises(DataError, match=fault):
        log.read(7, 9)


def test_columns_of_ids_are_not_negative_and_those_of_a_table_of_items_are_not_needed() -> None:
    sizes = {**MANIFEST.vocabulary_sizes, "dwell": 9, "genre": 9}
    manifest, negative = replace(MANIFEST, vocabulary_sizes=sizes), _with("dwell", _each(-1))
    for table, of_log in ((TABLE, manifest), (negative, MANIFEST)):
        assert len(rows_of_table(table, of_log, "here")) == 6
    with pytest.raises(DataError, match=r"here: column 'dwell' \(dwell\) must have integers, from 0 if they are ids"):
        rows_of_table(negative, manifest, "here")
    with pytest.raises(DataError, match="topic, offset 7: item_id has 49, which"):
        rows_of_table(table_of([47, 3, 7, 49]), describe_log({**SIZES, "item_id": 49}), "topic, offset 7")


def test_values_that_may_be_missing_are_null_or_nan() -> None:
    plain, missing = (describe_log({"item_id": 9}, extra_events={"price": kind}) for kind in ("float32", "float32?"))
    table = pa.table({"item_id": [[1, 2, 3]], "price": [[0.5, None, math.nan]]})
    stored = rows_of_table(table, missing, "here")
    np.testing.assert_array_equal(stored.columns["price"], np.array([0.5, math.nan, math.nan], np.float32))
    infinite = table.set_column(1, "price", [[[0.5, math.inf, math.nan]]])
    for wrong, manifest, value in ((table, plain, "nan"), (infinite, missing, "inf")):
        with pytest.raises(DataError, match=rf"here: column 'price' \(price\) has {value}, not finite"):
            rows_of_table(wrong, manifest, "here")


def test_a_prefix_of_an_object_store_is_a_log_too(tmp_path: Path, s3: S3) -> None:
    log = FolderLog(s3.url("log"), MANIFEST)
    assert log.end() == (0, False)
    add_file(tmp_path, "a/1.parquet", range(6))
    s3.put(tmp_path, "log")
    assert log.end() == (6, False)
    mark = log.mark(4)
    add_file(tmp_path, "a/2.parquet", range(6, 9))
    end_log(tmp_path)
    s3.put(tmp_path, "log")
    shutil.copytree(tmp_path / "a", tmp_path / "copy" / "a")  # copies elsewhere are the same log
    for each in (log, _resumed(s3.url("log"), 4, mark), _resumed(tmp_path / "copy", 4, mark)):
        assert each.end() == (9, "copy" not in repr(vars(each)))
        assert _users(each, 4, 9) == [4, 5, 6, 7, 8]
    with pytest.raises(ConfigError, match="is in no bucket that exists; check the URL"):
        FolderLog(s3.url("log", bucket="missing"), MANIFEST)
