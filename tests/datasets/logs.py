"""Files of logs, as another process adds them, whose record n is the row of user n."""

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from evenrank.datasets import describe_log

SIZES = {"user_id": 10_000, "item_id": 50, "action": 3, "segment": 4}
MANIFEST = describe_log(SIZES, floats=("share",), extra_events={"dwell": "int32"})


def items_of(record: int) -> list[int]:
    return [(record + index) % 50 for index in range(record % 4 + 1)]


def table_of(records: Sequence[int]) -> pa.Table:
    lengths = [len(items_of(record)) for record in records]
    columns = {
        "user_id": pa.array(records, pa.int64()),
        "item_id": [items_of(record) for record in records],
        "action": [[record % 3] * length for record, length in zip(records, lengths, strict=True)],
        "segment": pa.array([record % 4 for record in records], pa.int64()),
        "share": pa.array([record / 2 for record in records], pa.float64()),
        "dwell": [[record] * length for record, length in zip(records, lengths, strict=True)],
    }
    return pa.table(columns)


def add_file(folder: Path, name: str, records: Sequence[int], *, group_rows: int = 4) -> Path:
    """Add a complete file to a log."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    pq.write_table(table_of(records), hidden, row_group_size=group_rows)
    os.rename(hidden, path)
    return path


def end_log(folder: Path) -> None:
    (folder / "_END").touch()
