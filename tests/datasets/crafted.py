"""Datasets that were changed after they were written, with manifests that agree, as of another program."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.datasets.schema import DataFile, Manifest, content_hash, read_manifest, sha256_of
from evenrank.datasets.slices import TimeWindows, WindowsOfStore
from evenrank.datasets.store import SequenceStore


def store_of(times_of_rows: list[list[int]], num_targets: list[int] | None = None) -> SequenceStore:
    """Return a store in memory whose items number the events."""
    times = np.array([time for times in times_of_rows for time in times], dtype=np.int64)
    columns = {"user_id": np.arange(len(times_of_rows)), "timestamp_ms": times}
    return SequenceStore(
        manifest=Manifest(dataset="test"),
        split="train",
        offsets=np.cumsum([0, *map(len, times_of_rows)]),
        columns=columns | {name: np.arange(len(times)) for name in ("item_id", "action")},
        num_targets=None if num_targets is None else np.array(num_targets, dtype=np.int32),
    )


def windows_of(store: SequenceStore, max_targets: int = 1, **options: Any) -> WindowsOfStore:
    windows, (of_windows,) = TimeWindows(**options).open(store, lambda opened: opened, max_targets)
    assert of_windows is store
    return windows


def copy_dataset(dataset: Path, to: Path) -> Path:
    return Path(shutil.copytree(dataset, to, ignore=shutil.ignore_patterns(".cache")))


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write a manifest with the content hash that belongs to it."""
    replace(manifest, content_hash=content_hash(manifest)).write(folder)


def update_manifest(dataset: Path, split: str = "train", **changes: Any) -> None:
    """Write the checksums of a split's changed files, and changes to other fields, to the manifest."""
    manifest = read_manifest(dataset)
    old = manifest.splits[split]
    files = tuple(replace(file, sha256=sha256_of(dataset / file.path)) for file in old.files)
    splits = {**manifest.splits, split: replace(old, files=files)}
    write_manifest(replace(manifest, **{"splits": splits, **changes}), dataset)


def change_table(dataset: Path, change: Callable[[pa.Table], pa.Table], split: str = "train", **changes: Any) -> None:
    (path,) = (dataset / split).glob("*.parquet")
    pq.write_table(change(pq.read_table(path)), path)
    update_manifest(dataset, split, **changes)


def set_columns(columns: Mapping[str, pa.Array]) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        for name, column in columns.items():
            table = table.set_column(table.schema.get_field_index(name), name, column)
        return table

    return change


def add_targets(table: pa.Table, num_targets: NDArray[np.int32]) -> pa.Table:
    return table.append_column("num_targets", pa.array(num_targets, pa.int32()))


def write_in_parts(
    dataset: Path, out: Path, *, num_rows: int | None = None, rows_per_file: int = 64, rows_per_group: int = 10
) -> Path:
    """Copy a dataset with its train split, repeated up to `num_rows`, in files and row groups as of a large dataset."""
    table, files = pq.read_table(dataset / "train"), []
    if num_rows is not None:
        table = pa.concat_tables([table] * (num_rows // len(table) + 1)).slice(0, num_rows)
    shutil.rmtree(copy_dataset(dataset, out) / "train")
    (out / "train").mkdir()
    for number, first in enumerate(range(0, table.num_rows, rows_per_file)):
        rows, path = table.slice(first, rows_per_file), out / "train" / f"part-{number:05}.parquet"
        pq.write_table(rows, path, row_group_size=rows_per_group)
        files.append(DataFile(path=f"train/{path.name}", rows=rows.num_rows, sha256=sha256_of(path)))
    manifest, num_events = read_manifest(out), int(table["length"].to_numpy().sum())
    train = replace(manifest.splits["train"], rows=len(table), interactions=num_events, files=tuple(files))
    write_manifest(replace(manifest, splits={**manifest.splits, "train": train}), out)
    return out


def add_columns(dataset: Path) -> Path:
    """Add columns of all kinds to the dataset of `small_dataset`: `tags` and `share` of users, others of events."""
    manifest, rng = read_manifest(dataset), np.random.default_rng(0)
    described = {
        "contextual": {"segment": "int64", "tags": "list<int64>", "share": "float32"},
        "extra_events": {"price": "float32", "dwell": "int32"},
        "vocabulary_sizes": {**manifest.vocabulary_sizes, "tags": 9},
        "context_labels": {**manifest.context_labels, "tags": (None, *"abcdefgh")},
    }

    def add(table: pa.Table) -> pa.Table:
        lengths, num_tags = table["length"].to_numpy(), rng.integers(0, 4, len(table))
        share = rng.integers(0, 5, len(table)).astype(np.float32) / 4
        for name, values in (
            ("tags", _lists(num_tags, rng.integers(1, 9, num_tags.sum()))),
            ("share", pa.array(share)),
            ("price", _lists(lengths, rng.normal(size=lengths.sum()).astype(np.float32))),
            ("dwell", _lists(lengths, rng.integers(-5, 60, lengths.sum(), dtype=np.int32))),
        ):
            table = table.append_column(name, values)
        return table

    for split in manifest.splits:
        change_table(dataset, add, split, **described)
    return dataset


def _lists(lengths: NDArray[np.integer], values: NDArray[Any]) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths]), pa.int32()), pa.array(values))
