"""A copy of a dataset in many small files and row groups, like those of a large dataset."""

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from evenrank.datasets.schema import DataFile, read_manifest, sha256_of
from tests.datasets.crafted import copy_dataset, write_manifest

ROWS_PER_FILE = 64
ROWS_PER_GROUP = 10


def write_in_parts(dataset: Path, out: Path) -> Path:
    """Copy a dataset's train split into files of 64 rows, with row groups of 10."""
    copy_dataset(dataset, out)
    table = pq.read_table(dataset / "train")
    shutil.rmtree(out / "train")
    (out / "train").mkdir()
    files = []
    for number, first in enumerate(range(0, table.num_rows, ROWS_PER_FILE)):
        rows = table.slice(first, ROWS_PER_FILE)
        path = out / "train" / f"part-{number:05}.parquet"
        pq.write_table(rows, path, row_group_size=ROWS_PER_GROUP)
        files.append(DataFile(path=f"train/{path.name}", rows=rows.num_rows, sha256=sha256_of(path)))
    manifest = read_manifest(out)
    train = replace(manifest.splits["train"], files=tuple(files))
    write_manifest(replace(manifest, splits={**manifest.splits, "train": train}), out)
    return out
