"""Small stores in memory whose contents are easy to read."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from evenrank.datasets.schema import IdSummary, Manifest
from evenrank.datasets.store import SequenceStore

# Users with 3, 0 and 6 events; actions are the last digits of the item ids.
ITEMS = np.array([10, 11, 12, 30, 31, 32, 33, 34, 35])
STORE = SequenceStore(
    manifest=Manifest(
        schema_version=2,
        dataset="test",
        sources=(),
        options={},
        splits={},
        contextual={"sex": "int64", "age": "int64"},
        extra_events={},
        vocabulary_sizes={},
        context_labels={},
        ids={},
        content_hash="",
    ),
    split="train",
    offsets=np.array([0, 3, 3, 9]),
    columns={
        "user_id": np.array([1, 2, 3]),
        "sex": np.array([1, 0, 2]),
        "age": np.array([7, 8, 9]),
        "item_id": ITEMS,
        "action": (ITEMS % 10).astype(np.int32),
        "timestamp_ms": ITEMS * 0,
    },
)


def store_of_items(rows: Sequence[Sequence[int]], *, size: int, rule: str = "dense") -> SequenceStore:
    """Return a store of these items, of which there are `size`."""
    items = np.array([item for row in rows for item in row], dtype=np.int64)
    ids = {"item_id": IdSummary(rule=rule, kind="int64")}
    columns: dict[str, Any] = {name: np.zeros(len(rows), dtype=np.int64) for name in ("user_id", "sex", "age")}
    of_events = {"item_id": items, "action": (items * 0).astype(np.int32), "timestamp_ms": items * 0}
    return replace(
        STORE,
        manifest=replace(STORE.manifest, vocabulary_sizes={"item_id": size}, ids=ids),
        offsets=np.cumsum([0, *map(len, rows)]),
        columns=columns | of_events,
    )
