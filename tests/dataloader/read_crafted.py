"""Change datasets and caches at random, with checksums that agree, and read them; run as a process of its own.

    python -m tests.dataloader.read_crafted DATASET FOLDER FIRST-SEED END-SEED

Whatever was changed, reading gives valid batches, a DataError or a ConfigError. Anything else ends the process.
"""

import contextlib
import faulthandler
import json
import logging
import random
import shutil
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.settings import construct
from evenrank.dataloader import (
    LoaderConfig,
    StreamConfig,
    TimeWindows,
    build_loader,
    build_stream_loader,
)
from evenrank.dataloader.batches.batch import SemanticIdBatch, SequenceBatch
from evenrank.dataloader.codes import CodeTable
from evenrank.datasets import schema
from evenrank.datasets.store import open_store
from tests.datasets.crafted import copy_dataset

NUMBERS = (-(1 << 63), -(1 << 31), -2, -1, 0, 1, 2, 1000, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1)
TEXTS = ("", "x", "../x", "a\0b", "\ud800")
VALUES: tuple[Any, ...] = (*NUMBERS, 1 << 64, 1e308, float("nan"), 0.5, True, None, *TEXTS, [], {}, [[]])
NAMES = ("", "x", "..", "a/b", "label", "offsets", "USER_ID", "train")
TYPES = (pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.float64(), pa.string(), pa.bool_())
TABLE = CodeTable(codes=np.arange(80, dtype=np.int32).reshape(40, 2) % 8, codebook_sizes=(8, 8))
SPLIT = "eval"  # which has numbers of targets


def change_manifest(rng: random.Random, dataset: Path) -> None:
    """Change, remove or add a value anywhere in the manifest."""
    path = dataset / schema.MANIFEST_NAME
    raw: Any = json.loads(path.read_text())
    parent, key = raw, rng.choice(("splits", "splits", "splits", *raw))
    while isinstance(parent[key], dict | list) and len(parent[key]) and rng.random() < 0.9:
        parent = parent[key]
        key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
    if rng.random() < 0.1:
        del parent[key]
    elif isinstance(parent, dict) and rng.random() < 0.2:
        parent[rng.choice(NAMES)] = parent.pop(key)
    elif isinstance(parent[key], int) and rng.random() < 0.5:
        parent[key] += rng.choice((-1, 1))
    else:
        parent[key] = rng.choice((*VALUES, *NAMES))
    path.write_text(json.dumps(raw))


def change_columns(rng: random.Random, dataset: Path) -> None:
    """Change values, the type or the number of a column of a Parquet file."""
    path = dataset / SPLIT / "part-00000.parquet"
    table = pq.read_table(path)
    name = rng.choice(table.schema.names)
    index = table.schema.get_field_index(name)
    column = table[name]
    is_list = pa.types.is_list(column.type)
    kind = rng.choice(("value", "value", "value", "value", "type", "null", "lengths", "drop", "twice", "rows", "empty"))
    if kind in ("value", "null", "lengths"):
        values = column.to_pylist()
        row = rng.randrange(len(values))
        value = None if kind == "null" else rng.choice(NUMBERS)
        if is_list and kind == "lengths":
            values[row] = values[row][: rng.randrange(3)] + [1] * rng.randrange(3)
        elif is_list and values[row] and rng.random() < 0.8:
            values[row][rng.randrange(len(values[row]))] = value
        else:
            values[row] = [value] if is_list and value is not None else value
        with contextlib.suppress(pa.ArrowInvalid, OverflowError):  # the value does not fit the type
            table = table.set_column(index, name, pa.array(values, column.type))
    elif kind == "type":
        with contextlib.suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
            to = rng.choice(TYPES)
            table = table.set_column(index, name, column.cast(pa.list_(to) if is_list else to))
    elif kind == "drop":
        table = table.remove_column(index)
    elif kind == "twice":
        table = table.append_column(name, column)
    else:
        table = table.slice(rng.randrange(5), rng.randrange(9) if kind == "rows" else 0)
    pq.write_table(table, path, row_group_size=rng.choice((3, 100)))


def change_cache(rng: random.Random, dataset: Path) -> None:
    """Change the values, the header or the size of a file of the cache."""
    open_store(dataset, SPLIT)
    path = rng.choice(sorted(dataset.glob(".cache/*/**/*.npy")))
    kind = rng.choice(("value", "value", "value", "type", "header", "size", "remove", "shape"))
    values = np.load(path)
    content = bytearray(path.read_bytes())
    if kind == "value":
        # Values of events and rows are no indices, so any are valid.
        limits = np.iinfo(values.dtype)
        for _ in range(rng.randrange(1, 4)):
            values[rng.randrange(len(values))] = min(max(rng.choice(NUMBERS), limits.min), limits.max)
        np.save(path, values)
    elif kind == "type":
        np.save(path, values.astype(rng.choice(("int8", "float64", ">i8", "uint64"))))
    elif kind == "shape":
        np.save(path, rng.choice((values[:-1], np.append(values, values[:1]), values[None], values[:0])))
    elif kind == "header":
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(64)] = rng.randrange(256)
        path.write_bytes(content)
    elif kind == "size":
        path.write_bytes(content[: rng.choice((0, 5, 10, 100, len(content) - 1))])
    else:
        path.unlink()


def let_checksums_agree(dataset: Path) -> None:
    """Write the checksums of the files, and the content hash, to a manifest that may be malformed."""
    path = dataset / schema.MANIFEST_NAME
    raw: Any = json.loads(path.read_text())
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError, IndexError, ConfigError):
        for file in raw["splits"][SPLIT]["files"]:
            file["sha256"] = schema.sha256_of(dataset / file["path"])
        known = {name: raw[name] for name in schema.Manifest.__dataclass_fields__ if name in raw}
        raw["content_hash"] = schema.content_hash(construct(schema.Manifest, known, "manifest"))
    path.write_text(json.dumps(raw))


def read(dataset: Path, *, has_valid_ids: bool) -> Counter[str]:
    """Read a dataset with every kind of loader, and count what came of it."""
    sequences = LoaderConfig(batch_size=8, split=SPLIT, max_num_candidates=1, max_history_length=5, user_id=True)
    windows = TimeWindows(every="1w")
    by_time = LoaderConfig(
        batch_size=8, split=SPLIT, order=windows, max_num_candidates=2, extra_events=("timestamp_ms",)
    )
    codes = LoaderConfig(batch_size=8, split=SPLIT, codes=TABLE, history_labels=True)
    stream = StreamConfig(lanes=2, window_rows=5)
    counts: Counter[str] = Counter()
    configs: list[Any] = [sequences, by_time, codes]
    makers: list[Any] = [partial(build_loader, dataset, config) for config in configs]
    makers += [partial(build_stream_loader, dataset, config, stream) for config in (sequences, codes)]
    for make in makers:
        try:
            for batch in make(rank=0, world_size=1):
                check(batch, dataset, has_valid_ids=has_valid_ids)
            counts["read"] += 1
        except (DataError, ConfigError) as error:
            if "\n" in str(error):
                raise
            counts[type(error).__name__] += 1
    return counts


def check(batch: SequenceBatch | SemanticIdBatch, dataset: Path, *, has_valid_ids: bool) -> None:
    """Check that a batch is what its lengths say, and that its ids are indices of their embedding tables."""
    features = batch.features
    assert int(features.lengths().sum()) == features.values().numel()
    assert int(features.lengths().min()) >= 0
    sizes = {**schema.read_manifest(dataset).vocabulary_sizes, "semantic_id": 16}
    for key in features.keys() if has_valid_ids else ():
        values = features[key].values()
        if key in sizes and values.numel():
            assert 0 <= int(values.min()) <= int(values.max()) < sizes[key], key


def main() -> None:
    """Read the datasets of a range of seeds."""
    faulthandler.enable()
    logging.getLogger("evenrank").setLevel("ERROR")
    base, folder, seeds = Path(sys.argv[1]), Path(sys.argv[2]), range(int(sys.argv[3]), int(sys.argv[4]))
    counts: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        dataset = copy_dataset(base, folder / str(seed))
        change = rng.choice((change_manifest, change_columns, change_columns, change_cache))
        sys.stderr.write(f"seed {seed}: {change.__name__}\n")
        change(rng, dataset)
        if change is not change_cache:
            let_checksums_agree(dataset)
        counts += read(dataset, has_valid_ids=change is not change_cache)
        shutil.rmtree(dataset)
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    main()
