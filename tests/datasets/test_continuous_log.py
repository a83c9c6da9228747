import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evenrank.core.errors import DataError, StateError
from evenrank.core.storage import Remote
from evenrank.datasets import FolderLog, LogEnd, LogSource
from evenrank.datasets.continuous_log import rows_of_table
from tests.datasets.logs import MANIFEST, add_file, end_log, items_of, table_of
from tests.s3_server import S3


def _users(log: LogSource, first: int, end: int) -> list[int]:
    users: list[int] = log.read(first, end).columns["user_id"].tolist()
    return users


def _resumed(folder: Path | str, position: int, mark: str) -> FolderLog:
    log = FolderLog(folder, MANIFEST)
    log.resume(position, mark)
    return log


def test_files_that_are_being_written_wait_and_so_do_those_after_them_until_their_writer_is_taken_for_dead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("evenrank.datasets.continuous_log.time", SimpleNamespace(monotonic=lambda: now[0]))
    caplog.set_level("INFO", logger="evenrank")
    log = FolderLog(tmp_path, MANIFEST, incomplete_seconds=100.0)
    add_file(tmp_path, "1.parquet", range(3))
    whole = add_file(tmp_path, "2.parquet", range(3, 6)).read_bytes()
    add_file(tmp_path, "3.parquet", range(6, 9))
    for name in ("2.parquet.tmp", ".2.parquet", "_tmp/2.parquet"):
        add_file(tmp_path, name, range(100, 103))
    end_log(tmp_path)
    fault = f"{tmp_path}/2.parquet is no complete Parquet file, and has had"
    for number, size in enumerate((0, 3, 4, 20, len(whole) - 1)):  # one that grows is waited for anew
        (tmp_path / "2.parquet").write_bytes(whole[:size])
        for passed in (0, 9, 11, 90, 99):
            now[0] = 1000 * number + passed
            assert log.end() == (3, False)
        assert caplog.messages[-1] == f"{fault} {size:,} bytes for 11 s; it and all files after it wait"
    assert caplog.messages[0] == f"waiting until {tmp_path}/2.parquet is complete"
    now[0] += 1000
    with pytest.raises(DataError, match=f"{fault} .* for 1,099 s; write it again, delete it, or raise incomplete_seco"):
        log.end()
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


@pytest.mark.parametrize(
    ("late", "fault"),
    [
        ("00001a", "files before 00049.parquet after"),  # more than a mark names
        ("00050a", "00050a.parquet after"),
        ("00149a", None),  # after all that were read
    ],
)
def test_a_file_that_comes_late_while_no_job_runs_is_refused_and_old_files_may_go(
    tmp_path: Path, late: str, fault: str | None
) -> None:
    whole = add_file(tmp_path, "00000.parquet", range(2)).read_bytes()
    for number in range(1, 150):
        (tmp_path / f"{number:05}.parquet").write_bytes(whole)
    log = FolderLog(tmp_path, MANIFEST)
    log.end()
    mark = log.mark(300)
    assert len(mark) < 3000
    resumed = _resumed(tmp_path, 300, mark)
    assert (resumed.mark(300), resumed.end(), resumed.mark(300)) == (mark, (300, False), mark)
    (tmp_path / f"{late}.parquet").write_bytes(whole)
    if fault is not None:
        with pytest.raises(
            DataError, match=rf"got {late}\.parquet after 00149\.parquet, .* was read; add files in the"
        ):
            resumed.end()
        with pytest.raises(DataError, match=f"got {fault}"):
            _resumed(tmp_path, 300, mark).end()
        (tmp_path / f"{late}.parquet").unlink()
    for number in (*range(60), 70):
        (tmp_path / f"{number:05}.parquet").unlink()
    pruned = _resumed(tmp_path, 300, json.dumps(json.loads(mark)[:4]) if late == "00001a" else mark)
    assert pruned.end() == (300 if fault else 302, False)


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
        assert _resumed(tmp_path, 0, marks[0]).end() == (10 if is_deleted else 20, False)
    with pytest.raises(StateError, match=r"the state is of another log than .*, a folder"):
        resumed.resume(12, "topic[3]")


TABLE = table_of(range(6))


def _with(name: str, values: Any) -> pa.Table:
    return TABLE.set_column(TABLE.column_names.index(name), name, [values])


def _each(value: Any) -> list[list[Any]]:
    return [[value] * len(items_of(record)) for record in range(6)]


TWICE = pa.table([*TABLE.columns, TABLE["user_id"]], names=[*TABLE.column_names, "user_id"])


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        (TABLE.drop_columns("segment"), " has 0 columns 'segment'; write one, as the log's manifest says"),
        (TWICE, " has 2 columns 'user_id'; write one, as the log's manifest says"),
        (
            _with("item_id", _each(50)),
            r": item_id has 50, which vocabulary_sizes\['item_id'\] = 50 of the log does not",
        ),
        (_with("action", [[0]] * 6), r", row 1: 'item_id' has 2 values, 'action' has 1"),
        (_with("segment", [None] * 6), r": column 'segment' .* must have integers"),
        (_with("action", _each(2**40)), r": column 'action' .*type int64: Integer value 1099511627776"),
        (_with("share", list("abcdef")), r": column 'share' .*type string: Failed to parse"),
        (_with("dwell", _each("x")), r": column 'dwell' .*it has 0 nulls and type string"),
        (
            TABLE.append_column("num_targets", pa.array([1, 2, 4, 1, 1, 1])),
            ", row 2: num_targets is 4, of 3 events; it",
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
    copy = Path(shutil.copytree(tmp_path, tmp_path / "copy"))  # copies elsewhere are the same log
    for each in (log, _resumed(s3.url("log"), 4, mark), _resumed(copy, 4, mark)):
        assert each.end() == (9, True)
        assert _users(each, 4, 9) == [4, 5, 6, 7, 8]
    with pytest.raises(DataError, match="is in no bucket that exists; check the URL"):
        FolderLog(s3.url("log", bucket="missing"), MANIFEST)
