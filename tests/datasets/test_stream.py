import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from evenrank.core.errors import DataError
from evenrank.datasets import open_store
from evenrank.datasets.lanes import Span
from evenrank.datasets.stream import Rest, open_stream
from evenrank.datasets.unpack import read_row_group
from tests.datasets.crafted import write_in_parts


@pytest.fixture(scope="module")
def parts(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_in_parts(small_dataset, tmp_path_factory.mktemp("parts") / "data")


def test_spans_that_follow_each_other_read_each_row_group_once(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []

    def count_and_read(*arguments: Any) -> Any:
        groups.append(1)
        return read_row_group(*arguments)

    monkeypatch.setattr("evenrank.datasets.stream.read_row_group", count_and_read)
    source, users = open_stream(parts, "train"), open_store(parts).columns["user_id"].tolist()
    source.read(0, len(users))
    num_groups, rests, found = len(groups), dict[int, Rest](), list[int]()
    groups.clear()
    for first in range(0, len(users), 7):
        found += source.read_spans([Span(first, min(first + 7, len(users)), 5)], rests).columns["user_id"].tolist()
        assert len(rests) <= 1
    assert (found, len(groups), rests) == (users, num_groups, {})
    # Each lane goes on on its own, and from where it has ended alone.
    for spans in ([Span(0, 3, 0), Span(9, 11, 1)], [Span(3, 5, 0), Span(12, 14, 1)]):
        read = source.read_spans(spans, rests).columns["user_id"].tolist()
        assert read == [user for span in spans for user in users[span.first : span.end]]
    assert len(groups) == num_groups + 4  # of 10 rows: rows 3 and 4 are there, row 12 is not the next one


def _write_another_file_of_equal_size_and_time(path: Path) -> None:
    status = path.stat()
    path.unlink()
    path.write_bytes(b"PAR1" + bytes(status.st_size - 4))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


DAMAGES: dict[Callable[[Path], object], str] = {
    lambda path: path.write_bytes(path.read_bytes()[:-50]): "cannot be read as Parquet",
    Path.unlink: "cannot be read as Parquet",
    lambda path: pq.write_table(pq.read_table(path).slice(0, 5), path): "has 5 rows, its manifest says 64; prep",
    lambda path: pq.write_table(pq.read_table(path).take([*range(63), 0]), path): "",  # other values
    _write_another_file_of_equal_size_and_time: "cannot be read as Parquet",
}


def test_damaged_and_replaced_files_are_named(parts: Path, tmp_path: Path) -> None:
    replaced = "was changed, replaced or deleted after the dataset was opened; its SHA-256 is not the one"
    for number, (damage, message) in enumerate(DAMAGES.items()):
        data = shutil.copytree(parts, tmp_path / str(number))
        before = open_stream(data, "train")
        before.read(0, before.num_rows)
        damage(data / "train" / "part-00001.parquet")
        for source, fault in ((before, replaced), (open_stream(data, "train"), message)):
            if fault:
                with pytest.raises(DataError, match=rf"^[^\n]*part-00001\.parquet {fault}"):
                    source.read(0, source.num_rows)
