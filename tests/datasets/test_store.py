import multiprocessing
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evenrank.core.errors import DataError
from evenrank.datasets.schema import read_manifest, sha256_of
from evenrank.datasets.store import SequenceStore, open_store


def _fresh_copy(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copy", ignore=shutil.ignore_patterns(".cache")))


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
    assert [path.name for path in built] == [f"{read_manifest(dataset).content_hash}-train-v2"]


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
    path = next((dataset / "train").glob("*.parquet"))
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, column), path)
    _update_checksum(dataset)
    return open_store(dataset)


def _update_checksum(dataset: Path) -> None:
    """Write the changed file's checksum to the manifest, as if another program had written both."""
    manifest = read_manifest(dataset)
    split = manifest.splits["train"]
    file = replace(split.files[0], sha256=sha256_of(dataset / split.files[0].path))
    replace(manifest, splits={**manifest.splits, "train": replace(split, files=(file,))}).write(dataset)


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
    _update_checksum(dataset)
    with pytest.raises(DataError, match=r"part-00000.parquet cannot be read as Parquet") as raised:
        open_store(dataset)
    assert "\n" not in str(raised.value)


def test_missing_rows_are_detected(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    path = next((dataset / "train").glob("*.parquet"))
    pq.write_table(pq.read_table(path).slice(0, 10), path)
    _update_checksum(dataset)
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
    (cached,) = (dataset / ".cache").glob("*/item_id.npy")
    match damage:
        case "truncated":
            cached.write_bytes(cached.read_bytes()[:-8])
        case "shorter":
            np.save(cached, np.arange(3))
        case "missing":
            cached.unlink()
        case "other type":
            np.save(cached, np.load(cached).astype(np.float64))
    with pytest.raises(DataError, match=r"item_id.npy is damaged; delete .*-train-v2 to have it rebuilt"):
        open_store(dataset)


def test_offsets_out_of_range_are_detected(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    offsets = open_store(dataset).offsets.copy()
    (cached,) = (dataset / ".cache").glob("*/offsets.npy")
    for row, value in ((0, 1), (5, 1 << 40), (-1, offsets[-1] + 1)):
        changed = offsets.copy()
        changed[row] = value
        np.save(cached, changed)
        with pytest.raises(DataError, match=r"offsets.npy is damaged"):
            open_store(dataset)


def test_the_cache_of_a_read_only_folder_is_in_the_home_folder(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = _fresh_copy(small_dataset, tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # file modes do not stop root
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    store = open_store(dataset)
    assert not (dataset / ".cache").exists()
    assert (tmp_path / "home" / ".cache" / "evenrank" / f"{store.manifest.content_hash}-train-v2").is_dir()


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
