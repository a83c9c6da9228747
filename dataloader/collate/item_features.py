"""`read_item_features`: the features of items that no row stores, as arrays by item."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.schema import FLOAT, ITEM_ID, REMEDY
from evenrank.datasets.store import SequenceStore
from evenrank.datasets.stream import StreamSource
from evenrank.datasets.unpack import check_columns, flat_values, open_file, wrap_parquet_errors

_MAX_ITEMS = 1 << 31  # 8 bytes each, per feature


def read_item_features(source: SequenceStore | StreamSource, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return each of these features for the items 0, 1, ...: int64, int32 or float32 [items], 0 without a row.

    Raises:
        ConfigError: the dataset has no table of item features, or not this feature, or one with several values.
        DataError: the table cannot be read, or is not the one of the manifest.
    """
    manifest = source.manifest
    if (file := manifest.item_features) is None:
        raise ConfigError(
            f"item_features has {names[0]!r}, but the dataset has no table of features of items; preprocess it with "
            "--item-features FILE --item-features-as table"
        )
    if (size := manifest.vocabulary_sizes[ITEM_ID]) > _MAX_ITEMS:
        raise ConfigError(f"item_features needs arrays of all {size:,} ids of items; preprocess with --ids item=dense")
    assert source.place is not None  # because stores in memory have no table of features
    path = source.place / file.path
    with open_file(path) as opened, wrap_parquet_errors(str(path)):
        content = opened.read()
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise DataError(f"{path} does not have the SHA-256 in its manifest; {REMEDY}")
        table = pq.read_table(pa.BufferReader(content))
    check_columns([ITEM_ID], table.column_names, path, REMEDY)
    known = [name for name in table.column_names if name != ITEM_ID]
    features = {}
    for name in names:
        if name not in known:
            raise ConfigError(f"the dataset has no feature of items {name!r}; known: {', '.join(known) or 'none'}")
        if not pa.types.is_primitive(table.schema.field(name).type):
            raise ConfigError(f"the feature of items {name!r} has several values per item; choose one with one value")
        is_float = table.schema.field(name).type == pa.float32()
        items = flat_values(table.column(ITEM_ID).combine_chunks(), "int64", ITEM_ID, str(path))
        values = flat_values(table.column(name).combine_chunks(), FLOAT if is_float else "int64", name, str(path))
        if items.min(initial=0) < 0:
            raise DataError(f"{path} has item {items.min()}; items are numbered from 0; {REMEDY}")
        is_there = items < size  # others are in no event
        is_small = not is_float and -(2**31) <= values.min(initial=0) <= values.max(initial=0) < 2**31
        features[name] = np.zeros(size, dtype=np.int32 if is_small else values.dtype)  # half of it for caches
        features[name][items[is_there]] = values[is_there]
    return features
