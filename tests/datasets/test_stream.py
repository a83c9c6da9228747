import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets import open_store
from evenrank.datasets.lanes import Span
from evenrank.datasets.stream import Rest, StreamConfig, open_stream, version_of, versions_of
from evenrank.datasets.unpack import read_row_group
from tests.datasets.crafted import add_targets, change_table, set_columns, write_in_parts


@pytest.fixture(scope="module")
def parts(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_in_parts(small_dataset, tmp_path_factory.mktemp("parts") / "data")


@pytest.mark.parametrize(("first", "end"), [(0, 210), (0, 0), (3, 4), (17, 95), (190, 210), (64, 128)])
def test_any_range_of_rows_equals_that_of_the_store(parts: Path, first: int, end: int) -> None:
    store = open_store(parts)
    end = min(end, len(store))
    read = open_stream(parts, "train").read(first, end)
    assert len(read) == end - first
    assert read.offsets.tolist() == (store.offsets[first : end + 1] - store.offsets[first]).tolist()
    for name in ("user_id", "segment"):
        assert read.columns[name].tolist() == store.columns[name][first:end].tolist()
    for name in ("item_id", "action", "timestamp_ms"):
        assert read.columns[name].tolist() == store.columns[name][store.offsets[first] : store.offsets[end]].tolist()
        assert read.columns[name].dtype == store.columns[name].dtype


def test_spans_that_follow_each_other_read_each_row_group_once(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []

    def count_and_read(*arguments: Any) -> Any:
        groups.append(1)
        return read_row_group(*arguments)

    monkeypatch.setattr("evenrank.datasets.stream.read_row_group", count_and_read)
    source = open_stream(parts, "train")
    users = open_store(parts).columns["user_id"].tolist()
    source.read(0, len(users))
    num_groups = len(groups)
    groups.clear()
    rests: dict[int, Rest] = {}
    found: list[int] = []
    for first in range(0, len(users), 7):
        found += source.read_spans([Span(first, min(first + 7, len(users)), 5)], rests).columns["user_id"].tolist()
        assert len(rests) <= 1
    assert found == users
    assert len(groups) == num_groups
    assert not rests
    # Each lane goes on on its own, and from where it has ended alone.
    for spans in ([Span(0, 3, 0), Span(9, 11, 1)], [Span(3, 5, 0), Span(12, 14, 1)]):
        read = source.read_spans(spans, rests).columns["user_id"].tolist()
        assert read == [user for span in spans for user in users[span.first : span.end]]
    assert len(groups) == num_groups + 4  # of 10 rows: rows 3 and 4 are there, row 12 is not the next one


def test_missing_data_and_invalid_settings_are_reported_in_one_line(small_dataset: Path, tmp_path: Path) -> None:
    for path, split, message in (
        (tmp_path / "nowhere", "train", "nowhere is not a dataset: no such folder"),
        (
            "nothing://bucket/data",
            "train",
            r"^nothing://bucket/data cannot be opened: Unrecognized filesystem type[^\n]*$",
        ),
        (small_dataset, "test", "has no split 'test'; known: eval, train"),
    ):
        with pytest.raises(DataError, match=message):
            open_stream(path, split)
    for name in ("lanes", "window_rows"):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
            StreamConfig(**{name: 0})


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
    small_dataset: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    data = write_in_parts(small_dataset, tmp_path / "data")
    before = open_stream(data, "train")
    before.read(0, before.num_rows)
    path = sorted((data / "train").glob("*.parquet"))[1]
    damage(path)
    replaced = "was changed, replaced or deleted after the dataset was opened; its SHA-256 is not the one"
    for source, expected in ((before, replaced), (open_stream(data, "train"), message)):
        if expected:
            with pytest.raises(DataError, match=f"{path.name} {expected}") as raised:
                source.read(0, source.num_rows)
            assert "\n" not in str(raised.value)


def test_files_that_are_written_again_with_the_same_contents_are_read_on(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_in_parts(small_dataset, tmp_path / "data")
    source = open_stream(data, "train")
    expected = source.read(0, source.num_rows)
    shutil.copytree(data, tmp_path / "again")
    data.rename(tmp_path / "old")
    (tmp_path / "again").rename(data)
    assert source.read(0, source.num_rows).columns["user_id"].tolist() == expected.columns["user_id"].tolist()
    monkeypatch.setattr("evenrank.datasets.stream.has_sha256", None)  # each new file is verified once
    source.read(0, source.num_rows)


def test_the_footers_of_the_files_read_last_are_kept(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenrank.datasets.stream._FOOTERS", 2)
    source = open_stream(parts, "train")
    source.read(0, source.num_rows)
    assert len(source.read(0, 5)) == 5
    assert [Path(path).name for path in source.footers] == ["part-00003.parquet", "part-00000.parquet"]


def test_dataset_that_is_replaced_while_it_is_opened_is_the_new_one(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write_in_parts(small_dataset, tmp_path / "data")
    new = shutil.copytree(small_dataset, tmp_path / "new")

    def replace_and_list(files: fs.FileSystem, paths: Iterable[str]) -> Any:
        if new.exists():
            old.rename(tmp_path / "old")
            new.rename(old)
        return versions_of(files, paths)

    monkeypatch.setattr("evenrank.datasets.stream.versions_of", replace_and_list)
    source = open_stream(old, "train")
    assert source.manifest == open_store(old).manifest
    assert len(source.read(0, source.num_rows)) == len(open_store(old))


def test_rows_have_numbers_of_targets_if_the_split_has_them(parts: Path, dataset: Path) -> None:
    assert open_stream(parts, "train").read(0, 5).num_targets is None
    change_table(dataset, lambda table: add_targets(table, table["length"].to_numpy() // 2))
    expected = open_store(dataset).num_targets
    read = open_stream(dataset, "train").read(3, 9).num_targets
    assert expected is not None
    assert read is not None
    assert (read.tolist(), read.dtype) == (expected[3:9].tolist(), expected.dtype)


class _Bucket:
    """The part of an object store that `versions_of` uses: requests for files, and listings."""

    def __init__(self, *, may_list: bool) -> None:
        self._files = fs.LocalFileSystem()
        self._may_list = may_list

    def get_file_info(self, wanted: Any) -> Any:
        if isinstance(wanted, fs.FileSelector) and not self._may_list:
            raise PermissionError("ACCESS_DENIED during ListObjectsV2 operation")
        return self._files.get_file_info(wanted)


def test_versions_are_the_same_listed_and_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("22")
    paths = [str(tmp_path / name) for name in ("a", "b", "missing")]
    bucket: Any = _Bucket(may_list=True)
    versions = versions_of(bucket, paths)
    assert [version and version[0] for version in versions.values()] == [1, 2, None]
    assert versions == {path: version_of(bucket, path) for path in paths}
    forbidden: Any = _Bucket(may_list=False)
    assert versions_of(forbidden, paths) == versions
