"""A small store in memory whose contents are easy to read."""

import numpy as np

from evenrank.datasets.schema import Manifest
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
