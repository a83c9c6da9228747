"""Files of logs, as another process adds them, whose record n is the row of user n."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from evenrank.datasets import describe_log

SIZES = {"user_id": 10_000, "item_id": 50, "action": 3, "segment": 4}
MANIFEST = describe_log(SIZES, floats=("share",), extra_events={"dwell": "int32"})
_INTS = pa.list_(pa.int64())
_ROW = {"user_id": pa.int64(), "item_id": _INTS, "action": _INTS, "segment": pa.int64(), "share": pa.float64()}


def items_of(record: int) -> list[int]:
    return [(record + index) % 50 for index in range(record % 4 + 1)]


def _row_of(record: int) -> dict[str, Any]:
    lists = {"action": [record % 3] * (record % 4 + 1), "dwell": [record] * (record % 4 + 1)}
    return {"user_id": record, "item_id": items_of(record), "segment": record % 4, "share": record / 2, **lists}


def table_of(records: Sequence[int]) -> pa.Table:
    return pa.Table.from_pylist([*map(_row_of, records)], pa.schema({**_ROW, "dwell": _INTS}))


def add_file(folder: Path, name: str, records: Sequence[int], *, group_rows: int = 4) -> Path:
    """Add a complete file to a log."""
    (path := folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table_of(records), hidden := path.with_name(f".{path.name}"), row_group_size=group_rows)
    os.rename(hidden, path)
    return path


def end_log(folder: Path) -> None:
    (folder / "_END").touch()
