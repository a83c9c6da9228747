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
from evenrank.datasets.continuous_log import open_log, rows_of_table
from tests.datasets.logs import MANIFEST, SIZES, add_file, end_log, items_of, table_of
from tests.s3_server import S3


def _users(log: LogSource, first: int, end: int) -> list[int]:
    users: list[int] = log.read(first, end).columns["user_id"].tolist()
    return users


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
        assert set(store.columns["dwell"][events]) == {record}
        assert set(store.columns["action"][events]) == {record % 3}
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


def test_a_file_that_is_added_with_the_end_while_a_log_is_listed_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FolderLog(tmp_path, MANIFEST)
    add_file(tmp_path, "1.parquet", range(3))
    files_below = Remote.files_below

    def list_and_add(self: Remote, *pattern: Any) -> Any:
        listed = files_below(self, *pattern)
        add_file(tmp_path, "2.parquet", range(3, 5))
        end_log(tmp_path)
        return listed

    with monkeypatch.context() as patched:
        patched.setattr(Remote, "files_below", list_and_add)
        assert log.end() == (3, False)
    assert log.end() == (5, True)


@pytest.mark.parametrize("seed", range(20))
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
    marks, *others = ([log.mark(position) for position in range(sum(sizes) + 1)] for log in logs)
    assert all(of_log == marks for of_log in others)


def test_a_late_file_is_refused_with_both_names(tmp_path: Path) -> None:
    log = FolderLog(tmp_path, MANIFEST)
    add_file(tmp_path, "b.parquet", range(3))
    log.end()
    add_file(tmp_path, "a.parquet", range(3))
    with pytest.raises(DataError, match=r"got a\.parquet after b\.parquet, which sorts after it, was read"):
        log.end()


@pytest.mark.parametrize("late", ["00000a", "00149a", "00001a", "00050a"])
def test_a_file_that_comes_late_while_no_job_runs_is_refused_and_old_files_may_go(tmp_path: Path, late: str) -> None:
    whole = add_file(tmp_path, "00000.parquet", range(2)).read_bytes()
    for number in range(1, 150):  # more than a mark names
        (tmp_path / f"{number:05}.parquet").write_bytes(whole)
    log = FolderLog(tmp_path, MANIFEST)
    log.end()
    mark = log.mark(300)
    assert len(mark) < 3000
    resumed = FolderLog(tmp_path, MANIFEST)
    resumed.resume(300, mark)
    assert (resumed.mark(300), resumed.end(), resumed.mark(300)) == (mark, (300, False), mark)
    (tmp_path / f"{late}.parquet").write_bytes(whole)
    if late != "00149a":  # after all that were read
        with pytest.raises(
            DataError,
            match=rf"got {late}\.parquet after 00149\.parquet, .* was read; add files in the order of their names",
        ):
            resumed.end()
        again = FolderLog(tmp_path, MANIFEST)
        again.resume(300, mark)
        name = f"{late}.parquet after" if late > "00049" else "files before 00049.parquet after"  # which names it has
        with pytest.raises(DataError, match=f"got {name}"):
            again.end()
        (tmp_path / f"{late}.parquet").unlink()
    for number in (*range(60), 70):
        (tmp_path / f"{number:05}.parquet").unlink()
    pruned = FolderLog(tmp_path, MANIFEST)
    pruned.resume(300, json.dumps(json.loads(mark)[:4]) if late == "00001a" else mark)  # also one of earlier versions
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
    with pytest.raises(ConfigError, match="FolderLog: incomplete_seconds must be above 0, got 0"):
        FolderLog(tmp_path, MANIFEST, incomplete_seconds=0)


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


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_files_that_change_before_they_are_trained_are_refused_and_later_ones_may_go(
    tmp_path: Path, change: str
) -> None:
    log = FolderLog(tmp_path, MANIFEST)
    for number in range(3):
        add_file(tmp_path, f"{number}.parquet", range(number * 10, number * 10 + 10))
    log.end()
    assert _users(log, 8, 12) == [8, 9, 10, 11]
    marks = {position: log.mark(position) for position in (0, 10, 12)}
    (tmp_path / "0.parquet").unlink()
    assert log.end() == (30, False)
    for position in (10, 12):
        resumed = FolderLog(tmp_path, MANIFEST)
        resumed.resume(position, marks[position])
        assert resumed.mark(position) == marks[position]
        assert resumed.end() == (30, False)
        assert _users(resumed, position, 30) == list(range(position, 30))
        add_file(tmp_path, "15.parquet", [])
        with pytest.raises(DataError, match=r"got 15\.parquet after 2\.parquet"):
            resumed.end()
        (tmp_path / "15.parquet").unlink()
    with pytest.raises(StateError, match=r"position 10 of .* is not known here"):
        resumed.mark(10)
    if change == "delete":
        (tmp_path / "1.parquet").unlink()
    else:
        add_file(tmp_path, "1.parquet", range(40, 50))
    fault = r"1\.parquet was replaced or deleted before all of its records were trained; restore it"
    with pytest.raises(DataError, match=fault):
        _users(log, 14, 15)
    with pytest.raises(DataError, match=fault):
        FolderLog(tmp_path, MANIFEST).resume(12, marks[12])
    fresh = FolderLog(tmp_path, MANIFEST)
    fresh.resume(0, marks[0])
    assert fresh.end() == (20 if change == "replace" else 10, False)
    with pytest.raises(StateError, match=r"the state is of another log than .*, a folder"):
        fresh.resume(12, "topic[3]")


def test_rows_that_do_not_fit_the_log_are_refused_with_place_and_value(tmp_path: Path) -> None:
    table = table_of(range(6))
    cases: list[tuple[pa.Table, str]] = [
        (table.drop_columns("segment"), r"1\.parquet has 0 columns 'segment'; write one, as the log's manifest says"),
        (
            table.set_column(1, "item_id", [[[*items_of(record)[:-1], 50] for record in range(6)]]),
            r"1\.parquet: item_id has 50, which vocabulary_sizes\['item_id'\] = 50 of the log does not allow",
        ),
        (
            table.set_column(2, "action", [[[0]] * 6]),
            r"1\.parquet, row 5: 'item_id' has 2 values, 'action' has 1",
        ),
        (table.set_column(3, "segment", [[None] * 6]), r"1\.parquet: column 'segment' .* must have integers"),
    ]
    for number, (wrong, fault) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        pq.write_table(wrong, folder / "1.parquet", row_group_size=4)
        log = FolderLog(folder, MANIFEST)
        assert log.end() == (6, False)
        with pytest.raises(DataError, match=fault):
            log.read(5, 6)
    for name, wrong, fault in (
        ("action", [[2**40] * len(items_of(record)) for record in range(6)], "type int64: Integer value 1099511627776"),
        ("share", [["x"]] * 6, "type list<element: string>: "),
        ("share", list("abcdef"), "type string: Failed to parse"),
        ("dwell", [["x"] * len(items_of(record)) for record in range(6)], "it has 0 nulls and type string"),
        ("user_id", pa.array([2**63] * 6, pa.uint64()), "type uint64: Integer value 9223372036854775808 not in range"),
    ):
        add_file(tmp_path, "changed/1.parquet", range(4))  # in the middle of a log
        pq.write_table(table.set_column(table.column_names.index(name), name, [wrong]), tmp_path / "changed/2.parquet")
        log = FolderLog(tmp_path / "changed", MANIFEST)
        assert log.end() == (10, False)
        assert _users(log, 0, 4) == [0, 1, 2, 3]
        with pytest.raises(DataError, match=rf"2\.parquet: column '{name}' .*{fault}"):
            log.read(4, 10)
    twice = pa.table([*table.columns, table["user_id"]], names=[*table.column_names, "user_id"])
    with pytest.raises(DataError, match="topic has 2 columns 'user_id'; write one, as the log's manifest says"):
        rows_of_table(twice, MANIFEST, "topic")
    with pytest.raises(DataError, match="topic, offset 7: item_id has 49, which"):
        rows_of_table(table_of([47, 3, 7, 49]), describe_log({**SIZES, "item_id": 49}), "topic, offset 7")


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
    with pytest.raises(
        DataError, match=r": some files have a column 'num_targets' and some not; write it to all or to none"
    ):
        log.read(7, 9)
    wrong = table.append_column("num_targets", pa.array([1, 2, 4, 1]))
    with pytest.raises(DataError, match="topic, row 2: num_targets is 4, of 3 events; it is the number of last events"):
        rows_of_table(wrong, MANIFEST, "topic")


def test_a_dataset_with_a_table_of_items_is_a_log_without_its_columns() -> None:
    manifest = replace(MANIFEST, vocabulary_sizes={**MANIFEST.vocabulary_sizes, "genre": 9})
    assert len(rows_of_table(table_of(range(3)), manifest, "here")) == 3


def test_ids_of_events_besides_those_of_items_are_not_negative_either() -> None:
    manifest = replace(MANIFEST, vocabulary_sizes={**MANIFEST.vocabulary_sizes, "dwell": 9})
    table = table_of(range(3))
    assert len(rows_of_table(table, manifest, "here")) == 3
    wrong = table.set_column(5, "dwell", [[[-record] * len(items_of(record)) for record in range(3)]])
    assert len(rows_of_table(wrong, MANIFEST, "here")) == 3
    with pytest.raises(DataError, match=r"here: column 'dwell' \(dwell\) must have integers, from 0 if they are ids"):
        rows_of_table(wrong, manifest, "here")


def test_values_that_may_be_missing_are_null_or_nan() -> None:
    sizes = {"item_id": 9}
    table = pa.table({"item_id": [[1, 2, 3]], "price": [[0.5, None, math.nan]]})
    stored = rows_of_table(table, describe_log(sizes, extra_events={"price": "float32?"}), "here")
    np.testing.assert_array_equal(stored.columns["price"], np.array([0.5, math.nan, math.nan], np.float32))
    with pytest.raises(DataError, match=r"here: column 'price' \(price\) has nan, not finite"):
        rows_of_table(table, describe_log(sizes, extra_events={"price": "float32"}), "here")
    table = table.set_column(1, "price", [[[0.5, math.inf, math.nan]]])
    with pytest.raises(DataError, match=r"here: column 'price' \(price\) has inf, not finite"):
        rows_of_table(table, describe_log(sizes, extra_events={"price": "float32?"}), "here")


def test_logs_that_cannot_be_opened_are_refused(tmp_path: Path, s3: S3, rich_dataset: Path) -> None:
    with pytest.raises(DataError, match="missing is no folder; make that of the log"):
        FolderLog(tmp_path / "missing", MANIFEST)
    with pytest.raises(DataError, match="is in no bucket that exists; check the URL"):
        FolderLog(s3.url("log", bucket="missing"), MANIFEST)
    with pytest.raises(ConfigError, match="cannot have several values of a feature, as 'tags'"):
        open_log(rich_dataset, "train")
    wrong: list[tuple[dict[str, int], dict[str, Any], str]] = [
        ({"action": 3}, {}, "vocabulary_sizes must have item_id, they have action"),
        ({"item_id": 3, "label": 2}, {}, "label"),
        ({"item_id": 0}, {}, r"vocabulary_sizes\['item_id'\] must be at least 1, got 0"),
        ({"item_id": 3}, {"extra_events": {"dwell": "text"}}, r"extra_events\['dwell'\] must be one of .*, got 'text'"),
    ]
    for sizes, types, fault in wrong:
        with pytest.raises(ConfigError, match=fault):
            describe_log(sizes, **types)


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
    resumed = FolderLog(s3.url("log"), MANIFEST)
    resumed.resume(4, mark)
    for each in (log, resumed):
        assert each.end() == (9, True)
        assert _users(each, 4, 9) == [4, 5, 6, 7, 8]
    shutil.copytree(tmp_path / "a", tmp_path / "copy" / "a")  # copies elsewhere are the same log
    copied = FolderLog(tmp_path / "copy", MANIFEST)
    copied.resume(4, mark)
    assert copied.end() == (9, False)
    assert _users(copied, 4, 9) == [4, 5, 6, 7, 8]
