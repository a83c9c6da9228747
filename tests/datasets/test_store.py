import multiprocessing
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.distributions import Uniform
from evenrank.datasets.schema import read_manifest
from evenrank.datasets.store import SequenceStore, open_store
from evenrank.datasets.stream import open_stream
from tests.datasets.crafted import change_table, copy_dataset, set_columns, update_manifest
from tests.datasets.in_parts import write_in_parts


def _fresh_copy(dataset: Path, tmp_path: Path) -> Path:
    return copy_dataset(dataset, tmp_path / "copy")


def test_rows_equal_those_of_the_parquet_files(small_dataset: Path) -> None:
    store = open_store(small_dataset, "train")
    table = pq.read_table(small_dataset / "train")
    assert len(store) == table.num_rows
    assert store.rows["user_id"].tolist() == table["user_id"].to_pylist()
    assert store.rows["segment"].tolist() == table["segment"].to_pylist()
    assert store.lengths.tolist() == table["length"].to_pylist()
    for name in ("item_id", "action", "timestamp_ms"):
        rows = [store.events[name][a:b].tolist() for a, b in zip(store.offsets, store.offsets[1:], strict=False)]
        assert rows == table[name].to_pylist()
        assert isinstance(store.events[name].base, np.memmap)
        assert not store.events[name].flags.writeable
    assert store.events["action"].dtype == np.int32


def _open_and_sum(path: Path, results: "multiprocessing.Queue[int]") -> None:
    results.put(int(open_store(path).events["item_id"].sum()))


def test_processes_that_start_together_unpack_once(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[int] = context.Queue()
    processes = [context.Process(target=_open_and_sum, args=(dataset, results)) for _ in range(4)]
    for process in processes:
        process.start()
    sums = {results.get(timeout=240) for _ in processes}
    for process in processes:
        process.join()
    assert sums == {int(open_store(small_dataset).events["item_id"].sum())}
    built = [path for path in (dataset / ".cache").iterdir() if path.is_dir()]
    assert [path.name for path in built] == [f"{read_manifest(dataset).content_hash}-train-v3"]


def test_opening_again_reads_no_parquet(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    first = open_store(dataset)
    shutil.rmtree(dataset / "train")
    assert np.array_equal(open_store(dataset).events["item_id"], first.events["item_id"])


def test_an_empty_split_opens(tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="hosts that only train have no Polars to make data with")
    from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

    config = PreprocessConfig(
        dataset="synthetic", out=tmp_path / "data", split="user:0", synthetic=SyntheticConfig(num_users=3)
    )
    preprocess(config)
    store = open_store(tmp_path / "data", "eval")
    assert len(store) == 0
    assert len(store.events["item_id"]) == 0


def _open_with_column(dataset: Path, name: str, column: pa.Array) -> SequenceStore:
    change_table(dataset, set_columns({name: column}))
    return open_store(dataset)


def test_a_wrong_dtype_is_named(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    column = pq.read_table(dataset / "train")["item_id"].cast(pa.list_(pa.int32()))
    with pytest.raises(DataError, match=r"part-00000.parquet: column 'item_id' must be int64 .*type int32"):
        _open_with_column(dataset, "item_id", column)
    assert not [path for path in (dataset / ".cache").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([None, [1]], "column 'item_id' must be list<int64> without nulls, it has 1 null lists"),
        ([[1, None], [1]], "column 'item_id' must be int64 without nulls, it has 1 nulls"),
    ],
)
def test_nulls_are_named(small_dataset: Path, tmp_path: Path, rows: list[list[int | None]], message: str) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    padding: list[list[int | None]] = [[1]] * (len(open_store(small_dataset)) - len(rows))
    with pytest.raises(DataError, match=f"part-00000.parquet: {message}"):
        _open_with_column(dataset, "item_id", pa.array(rows + padding, pa.list_(pa.int64())))


def test_lists_of_unequal_length_are_named(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    rows = pq.read_table(dataset / "train")["action"].to_pylist()
    longest = max(range(len(rows)), key=lambda row: len(rows[row]))
    rows[longest] = rows[longest][:-1]
    with pytest.raises(DataError, match="a list of column 'action' has another length than its row's 'length'"):
        _open_with_column(dataset, "action", pa.array(rows, pa.list_(pa.int32())))


def test_a_truncated_parquet_file_is_named(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    path = next((dataset / "train").glob("*.parquet"))
    path.write_bytes(path.read_bytes()[:-100])
    update_manifest(dataset)
    with pytest.raises(DataError, match=r"part-00000.parquet cannot be read as Parquet") as raised:
        open_store(dataset)
    assert "\n" not in str(raised.value)


def test_missing_rows_are_detected(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    path = next((dataset / "train").glob("*.parquet"))
    pq.write_table(pq.read_table(path).slice(0, 10), path)
    update_manifest(dataset)
    with pytest.raises(DataError, match="contains 10 rows and"):
        open_store(dataset)


def test_a_changed_file_is_detected_by_its_checksum(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    path = next((dataset / "train").glob("*.parquet"))
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"part-00000.parquet does not have the SHA-256 in its manifest"):
        open_store(dataset)


@pytest.mark.parametrize("damage", ["truncated", "shorter", "missing", "other type"])
def test_a_damaged_cache_says_what_to_delete(small_dataset: Path, tmp_path: Path, damage: str) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    open_store(dataset)
    (cached,) = (dataset / ".cache").glob("*/events/item_id.npy")
    match damage:
        case "truncated":
            cached.write_bytes(cached.read_bytes()[:-8])
        case "shorter":
            np.save(cached, np.arange(3))
        case "missing":
            cached.unlink()
        case "other type":
            np.save(cached, np.load(cached).astype(np.float64))
    with pytest.raises(DataError, match=r"item_id.npy is damaged; delete .*-train-v3 to have it rebuilt"):
        open_store(dataset)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("offsets", {0: 1}),
        ("offsets", {5: 1 << 40}),
        ("offsets", {-1: 1 << 40}),
        # Each of these is 2^62 or 1 above its predecessor, modulo 2^64.
        ("offsets", {1: 1 << 62, 2: (1 << 63) - 1, 3: -(1 << 63), 4: -(1 << 62)}),
        ("num_targets", {0: -1}),
        ("num_targets", {0: 1000}),
        ("time_order", {0: -1}),
        ("time_order", {0: 1 << 40}),
        ("time_order", {0: 3, 1: 3}),
    ],
)
def test_a_cache_with_indices_out_of_range_is_refused(
    small_dataset: Path, tmp_path: Path, name: str, values: dict[int, int]
) -> None:
    dataset = _with_targets(small_dataset, tmp_path)
    open_store(dataset)
    (cached,) = (dataset / ".cache").glob(f"*/{name}.npy")
    changed = np.load(cached)
    for index, value in values.items():
        changed[index] = value
    np.save(cached, changed)
    with pytest.raises(DataError, match=rf"{name}.npy is damaged; delete .*-train-v3 to have it rebuilt"):
        open_store(dataset)


def _with_targets(small_dataset: Path, tmp_path: Path) -> Path:
    """Return a copy whose train split has one target in each row with events."""
    dataset = _fresh_copy(small_dataset, tmp_path)
    change_table(dataset, lambda table: _add_targets(table, np.minimum(table["length"].to_numpy(), 1)))
    return dataset


def _add_targets(table: pa.Table, num_targets: NDArray[np.int32]) -> pa.Table:
    return table.append_column("num_targets", pa.array(num_targets, pa.int32()))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("item_id", -1, "'item_id' has values from -1 to"),
        ("item_id", 1 << 40, r"to 1099511627776, which must be in 0\.\.\d+; preprocess"),
        ("action", -3, "'action' has values from -3 to"),
        ("action", 5, r"to 5, which must be in 0\.\.4"),
        ("segment", -1, "'segment' has values from -1 to"),
        ("segment", 9, r"to 9, which must be in 0\.\.8"),
        ("user_id", 301, "to 301, which must be below 301"),
    ],
)
def test_ids_outside_their_vocabulary_are_refused(
    small_dataset: Path, tmp_path: Path, name: str, value: int, message: str
) -> None:
    def change(table: pa.Table) -> pa.Table:
        column = table[name].to_pylist()
        row = int(np.argmax(table["length"].to_numpy()))
        column[row] = [value, *column[row][1:]] if isinstance(column[row], list) else value
        return set_columns({name: pa.array(column, table.schema.field(name).type)})(table)

    dataset = _fresh_copy(small_dataset, tmp_path)
    change_table(dataset, change)
    with pytest.raises(DataError, match=message):
        open_store(dataset)
    rows = len(open_store(small_dataset))
    with pytest.raises(DataError, match=message):
        open_stream(dataset, "train").read(0, rows)


@pytest.mark.parametrize(
    ("value", "message"), [(-1, "'num_targets' has values from -1"), (1, "has more 'num_targets'")]
)
def test_numbers_of_targets_out_of_range_are_refused(
    small_dataset: Path, tmp_path: Path, value: int, message: str
) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    change_table(dataset, lambda table: _add_targets(table, table["length"].to_numpy() * (value > 0) + value))
    with pytest.raises(DataError, match=message):
        open_store(dataset)


def test_files_with_and_without_numbers_of_targets_are_refused(small_dataset: Path, tmp_path: Path) -> None:
    dataset = write_in_parts(small_dataset, tmp_path / "parts")
    path = dataset / "train" / "part-00001.parquet"
    table = pq.read_table(path)
    pq.write_table(_add_targets(table, table["length"].to_numpy() * 0), path)
    update_manifest(dataset)
    with pytest.raises(DataError, match=r"part-00001.parquet: some files have a column 'num_targets' and some not"):
        open_store(dataset)
    with pytest.raises(DataError, match="parts: some files have a column 'num_targets' and some not"):
        open_stream(dataset, "train").read(0, 100)


def test_a_column_that_appears_twice_is_refused(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    change_table(dataset, lambda table: table.append_column("segment", table["segment"]))
    with pytest.raises(DataError, match="has more than one column 'segment'"):
        open_store(dataset)


@pytest.mark.parametrize("name", ["offsets", "time_order", "events", "rows", "timestamp", "Offsets_npy"])
def test_features_can_have_the_names_of_the_caches_own_files(tmp_path: Path, name: str) -> None:
    pytest.importorskip("polars", reason="hosts that only train have no Polars to make data with")
    from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

    synthetic = SyntheticConfig(num_users=30, contextual={name: Uniform(low=1, high=9)})
    preprocess(PreprocessConfig(dataset="synthetic", out=tmp_path / "data", split="none", synthetic=synthetic))
    store = open_store(tmp_path / "data")
    assert store.rows[name].tolist() == pq.read_table(tmp_path / "data" / "train")[name].to_pylist()
    assert store.time_order is not None
    assert sorted(store.time_order.tolist()) == list(range(30))


@pytest.mark.timeout(60, method="thread")  # a read that waits cannot be interrupted
@pytest.mark.parametrize("name", ["manifest.json", "train/part-00000.parquet"])
def test_a_named_pipe_is_refused_instead_of_waited_for(small_dataset: Path, tmp_path: Path, name: str) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    (dataset / name).unlink()
    os.mkfifo(dataset / name)
    for opens in (open_store, lambda path: open_stream(path, "train").read(0, 1)):
        with pytest.raises(DataError, match=f"{name} is a named pipe, not a regular file"):
            opens(dataset)


def _mapped_file(store: SequenceStore) -> object:
    base = store.events["item_id"].base
    assert isinstance(base, np.memmap)
    return base.filename


def test_a_pickled_store_maps_the_same_files(small_dataset: Path) -> None:
    store = open_store(small_dataset)
    data = pickle.dumps(store)
    assert len(data) < 1000
    reopened = pickle.loads(data)
    assert _mapped_file(reopened) == _mapped_file(store)


def test_a_cache_that_cannot_be_written_is_reported_in_one_line(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    (dataset / ".cache").write_text("a file")
    with pytest.raises(DataError, match=r"the cache .*\.cache could not be written") as raised:
        open_store(dataset)
    assert "\n" not in str(raised.value)


def test_an_unknown_split_is_named(small_dataset: Path) -> None:
    with pytest.raises(DataError, match="no split 'test'; known: eval, train"):
        open_store(small_dataset, "test")
