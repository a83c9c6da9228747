import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evenrank.core.errors import DataError
from evenrank.datasets import open_store
from evenrank.datasets.lanes import Span
from evenrank.datasets.stream import Rest, open_stream
from evenrank.datasets.unpack import read_row_group
from tests.datasets.crafted import add_targets, change_table, set_columns, update_manifest, write_in_parts


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


def _write_other_values(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(set_columns({"user_id": pa.array(range(len(table)))})(table), path)


def _write_another_file_of_equal_size_and_time(path: Path) -> None:
    status = path.stat()
    path.unlink()
    path.write_bytes(b"PAR1" + bytes(status.st_size - 4))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-50]), "cannot be read as Parquet"),
        (Path.unlink, "cannot be read as Parquet"),
        (lambda path: pq.write_table(pq.read_table(path).slice(0, 5), path), "has 5 rows, its manifest says 64; prep"),
        (_write_other_values, ""),
        (_write_another_file_of_equal_size_and_time, "cannot be read as Parquet"),
    ],
)
def test_damaged_and_replaced_files_are_named(
    parts: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    data = shutil.copytree(parts, tmp_path / "data")
    before = open_stream(data, "train")
    before.read(0, before.num_rows)
    damage(data / "train" / "part-00001.parquet")
    replaced = "was changed, replaced or deleted after the dataset was opened; its SHA-256 is not the one"
    for source, expected in ((before, replaced), (open_stream(data, "train"), message)):
        if expected:
            with pytest.raises(DataError, match=rf"^[^\n]*part-00001\.parquet {expected}"):
                source.read(0, source.num_rows)


def test_rows_have_numbers_of_targets_if_all_files_have_them(parts: Path, dataset: Path, tmp_path: Path) -> None:
    assert open_stream(parts, "train").read(0, 5).num_targets is None
    change_table(dataset, lambda table: add_targets(table, table["length"].to_numpy() // 2))
    expected, read = open_store(dataset).num_targets, open_stream(dataset, "train").read(3, 9).num_targets
    assert expected is not None
    assert read is not None
    assert (read.tolist(), read.dtype) == (expected[3:9].tolist(), expected.dtype)
    mixed = shutil.copytree(parts, tmp_path / "mixed")
    path = mixed / "train" / "part-00001.parquet"
    table = pq.read_table(path)
    pq.write_table(add_targets(table, table["length"].to_numpy() * 0), path)
    update_manifest(mixed)
    with pytest.raises(DataError, match=r"part-00001.parquet: some files have a column 'num_targets' and some not"):
        open_store(mixed)
    with pytest.raises(DataError, match="mixed: some files have a column 'num_targets' and some not"):
        open_stream(mixed, "train").read(0, 100)
