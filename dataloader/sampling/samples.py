"""The rows of opened datasets that are samples, and the order in which they come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.dataloader.collate.sequences import Collate
from evenrank.dataloader.config import Order
from evenrank.dataloader.routing.key_map import KeyMap
from evenrank.datasets.order import MixtureOrder, RowOrder, SampleOrder, Samples, ShuffledOrder, TimeOrder
from evenrank.datasets.store import SequenceStore

_NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Several datasets with the same contextual features, each with a share of an epoch proportional to its weight."""

    weights: Mapping[Path | str, float]
    """Per folder of a dataset; positive. `sample_ids` number the rows of the datasets consecutively, in this order."""
    num_samples: int | None = None
    """Samples of an epoch, over all ranks; None: the number of samples of all datasets."""

    def __post_init__(self) -> None:
        if not self.weights:
            raise ConfigError("a mixture needs at least one dataset, got no weights; pass weights as {folder: weight}")
        if self.num_samples is not None and self.num_samples < 1:
            raise ConfigError(f"num_samples of a mixture must be at least 1, got {self.num_samples}")


def find_samples(
    stores: Sequence[SequenceStore], collate: Collate[Any]
) -> tuple[list[Samples], dict[str, NDArray[np.int64]]]:
    """Return the samples of each store and, per reason, the rows of all stores that are not samples, ascending."""
    samples: list[Samples] = []
    left_out: dict[str, NDArray[np.int64]] = {}
    first_row = 0  # of the store, over all stores
    for store in stores:
        collate.check(store)
        if store.manifest.contextual != stores[0].manifest.contextual:
            raise DataError(
                f"{store.folder} has the contextual features {list(store.manifest.contextual)}, {stores[0].folder} has "
                f"{list(stores[0].manifest.contextual)}; the datasets of a mixture must have the same"
            )
        unusable = collate.unusable(store)
        for reason, rows in unusable.items():
            left_out[reason] = np.concatenate([left_out.get(reason, _NO_ROWS), first_row + rows])
        samples.append(Samples(num_rows=len(store), left_out=np.unique(np.concatenate([*unusable.values(), _NO_ROWS]))))
        first_row += len(store)
    return samples, left_out


def make_order(
    order: Order, stores: Sequence[SequenceStore], samples: Sequence[Samples], mixture: Mixture | None
) -> SampleOrder:
    """Return the order of a mixture's samples or, without a mixture, of the samples of the only store."""
    if mixture is not None:
        if order != "shuffle":
            raise ConfigError(f"mixtures are always shuffled; order must be 'shuffle', got {order!r}")
        return MixtureOrder(samples, list(mixture.weights.values()), mixture.num_samples)
    if order == "time":
        time_order = stores[0].time_order
        assert time_order is not None  # stores opened from a folder have one
        return TimeOrder(samples[0], time_order)
    return ShuffledOrder(samples=samples[0]) if order == "shuffle" else RowOrder(samples=samples[0])


def remapped_stores(
    stores: Sequence[SequenceStore], collate: Collate[Any], key_maps: Mapping[str, KeyMap]
) -> tuple[SequenceStore, ...]:
    """Return these stores, which fit the collate, with the rows of tables in the columns that have a KeyMap."""
    if key_maps:
        (empty,) = collate(group_by_store(stores, _NO_ROWS), _NO_ROWS, batch_size=1)
        features = empty.features.keys()
        if unknown := [name for name in key_maps if name not in features]:
            raise ConfigError(
                f"key_maps has {unknown[0]!r}, which is no feature of the batches; they have {', '.join(features)}"
            )
    return tuple(store.remapped(key_maps) for store in stores)
