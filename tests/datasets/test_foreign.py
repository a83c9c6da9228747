from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from evenrank.datasets import open_store

COLUMNS = {"item_id": "movies", "user_id": "uid", "timestamp_ms": "ts", "action": "stars", "shop": "shop", "age": "age"}
ROWS = [
    {"uid": 7, "movies": [3, 1, 4], "ts": [10, 20, 30], "stars": [1, 2, 3], "shop": [-1, 8, 9], "age": 30, "x": "a"},
    {"uid": -5, "movies": [], "ts": [], "stars": [], "shop": [], "age": 0, "x": "b"},
    {"uid": 9, "movies": [5], "ts": [5], "stars": [0], "shop": [2**40], "age": 41, "x": "c"},
]
LISTS = {"ts": pa.list_(pa.int64()), "stars": pa.list_(pa.int8()), "shop": pa.list_(pa.int64())}
SCHEMA = pa.schema(
    {"uid": pa.int64(), "movies": pa.large_list(pa.uint16()), **LISTS, "age": pa.int16(), "x": pa.string()}
)


def _write(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = SCHEMA, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, **options)


def test_any_folder_of_lists_is_opened_by_the_names_of_its_columns(tmp_path: Path) -> None:
    folder = tmp_path / "lake"
    _write(folder / "date=2/a.parquet", ROWS[2:])
    _write(folder / "date=1/b.parquet", ROWS[:2], row_group_size=1)  # read in the order of paths
    (folder / "_temporary").mkdir()
    (folder / "_temporary/c.parquet").write_bytes(b"not written yet")
    store = open_store(folder, columns=COLUMNS)
    assert store.lengths.tolist() == [3, 0, 1]
    assert {name: (str(values.dtype), values.tolist()) for name, values in store.columns.items()} == {
        "user_id": ("int64", [7, -5, 9]),
        "age": ("int64", [30, 0, 41]),
        "item_id": ("int64", [3, 1, 4, 5]),
        "action": ("int32", [1, 2, 3, 0]),
        "timestamp_ms": ("int64", [10, 20, 30, 5]),
        "shop": ("int64", [-1, 8, 9, 2**40]),
    }
    assert store.manifest.vocabulary_sizes == {"user_id": 10, "item_id": 6, "action": 4, "age": 42}
    assert store.manifest.splits["train"].lengths["max"] == 3
    known = f"SequenceStore('{folder}', split='train', 3 rows, 4 events: item_id, action, timestamp_ms"
    assert repr(store) == f"{known}, shop; context: age)"
    least = open_store(folder, columns={"item_id": "movies"})
    assert least.columns["action"].tolist() == least.columns["timestamp_ms"].tolist() == [0] * 4
    assert repr(least) == f"{known})"
    # The hash is of the files and the columns, wherever they are.
    swapped = open_store(folder, columns=COLUMNS | {"timestamp_ms": "shop", "shop": "ts"})
    _write(folder / "date=2/a.parquet", [ROWS[2] | {"stars": [3]}])
    changed = open_store(folder, columns=COLUMNS)
    assert changed.columns["action"].tolist() == [1, 2, 3, 3]
    moved = open_store(folder.rename(tmp_path / "moved"), columns=COLUMNS)
    assert len({each.manifest.content_hash for each in (store, swapped, changed, moved)}) == 3
    assert moved.manifest.content_hash == changed.manifest.content_hash
