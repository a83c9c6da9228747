from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets import open_store
from evenrank.datasets.distributions import Uniform
from evenrank.datasets.stream import StreamConfig, cut_shards, open_stream
from tests.datasets.in_parts import write_in_parts


@pytest.fixture(scope="module")
def parts(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_in_parts(small_dataset, tmp_path_factory.mktemp("parts") / "data")


@pytest.mark.parametrize(("first", "end"), [(0, 210), (0, 0), (3, 4), (17, 95), (190, 210), (64, 128)])
def test_any_range_of_rows_equals_that_of_the_store(parts: Path, first: int, end: int) -> None:
    store = open_store(parts)
    rows = range(first, min(end, len(store)))
    read = open_stream(parts, "train").read(rows.start, rows.stop)
    assert len(read) == len(rows)
    assert read.rows["user_id"].tolist() == store.rows["user_id"][rows.start : rows.stop].tolist()
    assert read.rows["segment"].tolist() == store.rows["segment"][rows.start : rows.stop].tolist()
    for name in ("item_id", "action", "timestamp_ms"):
        span = slice(store.offsets[rows.start], store.offsets[rows.stop])
        assert read.events[name].tolist() == store.events[name][span].tolist()
        assert read.events[name].dtype == store.events[name].dtype
    assert read.lengths.tolist() == store.lengths[rows.start : rows.stop].tolist()


def test_shards_cover_all_rows_for_any_number_of_shards() -> None:
    for num_rows, num_shards in ((10, 3), (3, 10), (7, 7), (0, 4)):
        shards = cut_shards(num_rows, StreamConfig(num_shards=num_shards, buffer_rows=2))
        rows = [row for shard in shards for row in range(shard.first, shard.end)]
        assert rows == list(range(num_rows))
        assert len(shards) == max(1, min(num_rows, num_shards))


def test_windows_contain_every_row_of_a_shard_once_per_epoch_in_another_order() -> None:
    shard = cut_shards(50, StreamConfig(num_shards=2, buffer_rows=8))[1]

    def rows(epoch: int) -> list[int]:
        windows = [shard.window(position, seed=3, epoch=epoch) for position in range(shard.num_windows)]
        assert all(len(order) <= 8 for _, order in windows)
        return [first + row for first, order in windows for row in order.tolist()]

    assert sorted(rows(0)) == sorted(rows(1)) == list(range(25, 50))
    assert rows(0) != rows(1)
    assert rows(0) == rows(0) != sorted(rows(0))


def test_a_missing_dataset_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere is not a readable dataset: .*No such file") as raised:
        open_stream(tmp_path / "nowhere", "train")
    assert "\n" not in str(raised.value)
    with pytest.raises(DataError, match="is not a readable dataset"):
        open_stream("nothing://bucket/data", "train")


def test_an_unknown_split_is_named(parts: Path) -> None:
    with pytest.raises(DataError, match="has no split 'test'; known: eval, train"):
        open_stream(parts, "test")


@pytest.mark.parametrize("damage", ["truncated", "missing", "fewer rows"])
def test_damaged_files_are_named(small_dataset: Path, tmp_path: Path, damage: str) -> None:
    data = write_in_parts(small_dataset, tmp_path / "data")
    source = open_stream(data, "train")
    path = sorted((data / "train").glob("*.parquet"))[1]
    match damage:
        case "truncated":
            path.write_bytes(path.read_bytes()[:-50])
        case "missing":
            path.unlink()
        case "fewer rows":
            pq.write_table(pq.read_table(path).slice(0, 5), path)
    message = "has fewer rows than its manifest says" if damage == "fewer rows" else f"{path.name} cannot be read as"
    with pytest.raises(DataError, match=message) as raised:
        source.read(0, source.num_rows)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["num_shards", "buffer_rows", "open_shards"])
def test_invalid_settings_are_refused_with_the_value(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        StreamConfig(**{name: 0})


def test_no_rows_are_an_empty_store(parts: Path) -> None:
    assert np.array_equal(open_stream(parts, "train").read(0, 0).offsets, [0])


def test_rows_have_numbers_of_targets_if_the_split_has_them(parts: Path, tmp_path: Path) -> None:
    assert open_stream(parts, "train").read(0, 5).num_targets is None
    pytest.importorskip("polars", reason="hosts that only train have no Polars to make data with")
    from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

    synthetic = SyntheticConfig(num_users=20, lengths=Uniform(low=1, high=6))
    preprocess(PreprocessConfig(dataset="synthetic", out=tmp_path / "data", split="leave-last:2", synthetic=synthetic))
    expected = open_store(tmp_path / "data", "eval").num_targets
    read = open_stream(tmp_path / "data", "eval").read(3, 9).num_targets
    assert expected is not None
    assert read is not None
    assert (read.tolist(), read.dtype) == (expected[3:9].tolist(), expected.dtype)
