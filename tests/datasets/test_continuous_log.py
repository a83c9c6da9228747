import shutil
from pathlib import Path
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
    users: list[int] = log.read(first, end).rows["user_id"].tolist()
    return users


def test_a_log_has_the_records_of_its_files_in_the_order_of_names(tmp_path: Path) -> None:
    log = FolderLog(tmp_path, MANIFEST)
    assert isinstance(log, LogSource)
    assert log.end() == (0, False)
    assert list(log.read(0, 0).events) == ["item_id", "action", "timestamp_ms", "dwell"]
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
        assert store.events["item_id"][events].tolist() == items_of(record)
        assert set(store.events["dwell"][events]) == {record}
        assert set(store.events["action"][events]) == {record % 3}
    assert store.rows["share"].tolist() == [record / 2 for record in range(5, 22)]
    assert store.rows["segment"].dtype == np.int64
    assert not store.events["timestamp_ms"].any()  # the files have none


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
    assert [message.partition(" is ")[0] for message in caplog.messages] == [f"waiting until {tmp_path}/2.parquet"]
    (tmp_path / "2.parquet").write_bytes(whole)
    assert log.end() == (9, True)
    assert _users(log, 2, 7) == [2, 3, 4, 5, 6]


def test_a_file_that_is_added_with_the_end_while_a_log_is_listed_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FolderLog(tmp_path, MANIFEST)
    add_file(tmp_path, "1.parquet", range(3))
    files_below = Remote.files_below

    def list_and_add(self: Remote) -> Any:
        listed = files_below(self)
        add_file(tmp_path, "2.parquet", range(3, 5))
        end_log(tmp_path)
        return listed

    with monkeypatch.context() as patched:
        patched.setattr(Remote, "files_below", list_and_add)
        assert log.end() == (3, False)
    assert log.end() == (5, True)


def test_a_late_file_is_refused_with_both_names(tmp_path: Path) -> None:
    log = FolderLog(tmp_path, MANIFEST)
    add_file(tmp_path, "b.parquet", range(3))
    log.end()
    add_file(tmp_path, "a.parquet", range(3))
    with pytest.raises(DataError, match=r"got a\.parquet after b\.parquet, which sorts after it, was read"):
        log.end()


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
        (table.drop_columns("segment"), r"1\.parquet lacks the column 'segment' of the log"),
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
    with pytest.raises(DataError, match="topic, offset 7: item_id has 49, which"):
        rows_of_table(table_of([47, 3, 7, 49]), describe_log({**SIZES, "item_id": 49}), "topic, offset 7")


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
        ({"item_id": 0}, {}, r"vocabulary_sizes\['item_id'\] must be an integer of at least 1, got 0"),
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
