"""Which rows of opened datasets are samples, and in which order they come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.collate.sequences import Collate
from evenrank.datasets.mixture import Mixed
from evenrank.datasets.order import AsStored, ByTime, Order, Samples, Shuffled
from evenrank.datasets.store import SequenceStore

_NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Several datasets, each with a share of an epoch in proportion to its weight.

    They must have the same contextual features. Rows, in `sample_ids`, are counted through all of them, in this order.
    """

    weights: Mapping[Path | str, float]  # per dataset's folder
    num_samples: int | None = None  # of an epoch; None: as many as the datasets have together

    def __post_init__(self) -> None:
        if not self.weights:
            raise ConfigError("a mixture needs at least one dataset; give weights as {folder: weight}")
        if self.num_samples is not None and self.num_samples < 1:
            raise ConfigError(f"num_samples of a mixture must be at least 1, got {self.num_samples}")


def find_samples(
    stores: Sequence[SequenceStore], collate: Collate[Any]
) -> tuple[list[Samples], dict[str, NDArray[np.int64]]]:
    """Find the rows that make samples.

    Returns:
        The samples of each store; and per reason the rows that make none, counted through all stores: int64, ascending.

    Raises:
        ConfigError, DataError: a store lacks what batches need, or has other contextual features than the first.

    """
    samples: list[Samples] = []
    left_out: dict[str, NDArray[np.int64]] = {}
    first_row = 0
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
    name: str, stores: Sequence[SequenceStore], samples: Sequence[Samples], mixture: Mixture | None
) -> Order:
    """Return the order that is called `name`: one of `ORDERS`."""
    if mixture is not None:
        if name != "shuffle":
            raise ConfigError(f"mixtures are always shuffled; order must be 'shuffle', got {name!r}")
        return Mixed(samples, list(mixture.weights.values()), mixture.num_samples)
    if name == "time":
        time_order = stores[0].time_order
        assert time_order is not None  # every store of a folder has one
        return ByTime(samples[0], time_order)
    return Shuffled(samples=samples[0]) if name == "shuffle" else AsStored(samples=samples[0])
