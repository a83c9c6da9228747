"""Stores whose columns have the rows of tables instead of keys, where a loader's settings have a KeyMap."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evenrank.core.errors import ConfigError
from evenrank.dataloader.collate.sequences import Collate
from evenrank.dataloader.collate.spans import group_by_store
from evenrank.dataloader.routing.key_map import KeyMap
from evenrank.datasets.store import SequenceStore


def map_stores(
    stores: Sequence[SequenceStore], collate: Collate[Any], key_maps: Mapping[str, KeyMap]
) -> tuple[SequenceStore, ...]:
    """Return these stores, which fit the collate, with the rows of tables in the columns that have a KeyMap.

    Raises:
        ConfigError: a KeyMap is for no feature, or for a table that is too small.
        DataError: the mapped column cannot be written.

    """
    if key_maps:
        none = np.empty(0, dtype=np.int64)
        (empty,) = collate(group_by_store(stores, none), none, batch_size=1)
        features = empty.features.keys()
        if unknown := [name for name in key_maps if name not in features]:
            raise ConfigError(
                f"key_maps has {unknown[0]!r}, which is no feature of the batches; they have {', '.join(features)}"
            )
    return tuple(store.mapped(key_maps) for store in stores)
