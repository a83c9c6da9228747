import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from evenrank.core.errors import DataError, StateError
from evenrank.core.storage import Remote
from evenrank.datasets import FolderLog, LogEnd, LogSource
from tests.datasets.logs import MANIFEST, add_file, end_log, table_of
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
    for number in range(3):
        add_file(tmp_path, f"{number}.parquet", range(3 * number, 3 * number + 3))
    for name in ("1.parquet.tmp", ".1.parquet", "_tmp/1.parquet"):
        add_file(tmp_path, name, range(100, 103))
    end_log(tmp_path)
    whole, fault = (
        (tmp_path / "1.parquet").read_bytes(),
        f"{tmp_path}/1.parquet is no complete Parquet file, and has had",
    )
    for number, size in enumerate((0, 4, len(whole) - 1)):  # one that grows is waited for anew
        (tmp_path / "1.parquet").write_bytes(whole[:size])
        for passed in (0, 9, 11, 90, 99):
            now[0] = 1000 * number + passed
            assert log.end() == (3, False)
        assert caplog.messages[-1] == f"{fault} {size:,} bytes for 11 s; it and all files after it wait"
    assert caplog.messages[0] == f"waiting until {tmp_path}/1.parquet is complete"
    now[0] += 1000
    with pytest.raises(DataError, match=f"{fault} .* for 1,099 s; write it again, delete it, or raise incomplete_seco"):
        log.end()
    (tmp_path / "1.parquet").write_bytes(whole)
    assert (log.end(), _users(log, 2, 7)) == ((9, True), [2, 3, 4, 5, 6])


@pytest.mark.parametrize("seed", range(8))
def test_ranks_number_records_alike_however_a_growing_folder_is_listed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing has all files that were there when it began, and any of those that were added, in order, meanwhile."""
    draw = random.Random(seed)
    sizes, files_below, added = [draw.randint(0, 4) for _ in range(8)], Remote.files_below, [0]

    def list_slowly(self: Remote, *pattern: Any) -> Any:
        before = {f"{number}.parquet" for number in range(added[0])}
        for number in range(added[0], draw.randint(added[0], len(sizes))):
            add_file(tmp_path, f"{number}.parquet", range(sum(sizes[:number]), sum(sizes[: number + 1])))
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


def test_old_files_may_go_and_none_may_come_late_or_change_before_it_is_trained(tmp_path: Path) -> None:
    files = [add_file(tmp_path, f"{number:03}.parquet", (2 * number, 2 * number + 1)) for number in range(150)]
    log = FolderLog(tmp_path, MANIFEST)
    log.end()
    marks = {position: log.mark(position) for position in (299, 300)}
    assert len(marks[300]) < 3000
    for position, mark in marks.items():
        resumed = _resumed(tmp_path, position, mark)
        assert (resumed.mark(position), resumed.end(), resumed.mark(position)) == (mark, (300, False), mark)
        assert _users(resumed, position, 300) == [*range(position, 300)]
    with pytest.raises(StateError, match=r"position 10 of .* is not known here"):
        resumed.mark(10)
    for late, place in (("001a", "files before 049.parquet"), ("050a", "050a.parquet")):  # a mark names 100
        path = add_file(tmp_path, f"{late}.parquet", (0, 1))
        for one, came in ((resumed, rf"{late}\.parquet"), (_resumed(tmp_path, 300, marks[300]), place)):
            with pytest.raises(DataError, match=f"got {came} after .* was read; add files in the"):
                one.end()
        path.unlink()
    for file in (*files[:60], files[70]):
        file.unlink()
    old = json.dumps(json.loads(marks[300])[:4])  # as of an earlier version
    assert log.end() == _resumed(tmp_path, 300, marks[300]).end() == _resumed(tmp_path, 300, old).end() == (300, False)
    add_file(tmp_path, "149a.parquet", (300, 301))
    assert _resumed(tmp_path, 300, marks[300]).end() == (302, False)
    for change in (lambda: add_file(tmp_path, "149.parquet", (0, 1)), files[149].unlink):
        change()
        for read in (lambda: _users(log, 298, 300), lambda: _resumed(tmp_path, 299, marks[299])):
            with pytest.raises(
                DataError, match=r"149\.parquet was replaced or deleted before all of its records were tr"
            ):
                read()
    with pytest.raises(StateError, match=r"the state is of another log than .*, a folder"):
        resumed.resume(12, "topic[3]")


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
        assert (each.end(), _users(each, 4, 9)) == ((9, True), [4, 5, 6, 7, 8])
    pq.write_table(table_of((9,)).drop_columns("segment"), tmp_path / "a" / "3.parquet")
    local = FolderLog(tmp_path / "a", MANIFEST)
    assert (local.end(), _users(local, 0, 9)) == ((10, False), [*range(9)])
    with pytest.raises(DataError, match=r"/a/3\.parquet has 0 columns 'segment'; write one"):
        _users(local, 8, 10)
    with pytest.raises(DataError, match="is in no bucket that exists; check the URL"):
        FolderLog(s3.url("log", bucket="missing"), MANIFEST)
