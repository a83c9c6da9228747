"""How evenly each routing mode spreads a dataset's item ids over the ranks of a row-wise sharded table.

Stock TorchRec gives each rank a range of rows. The rank of an id is the one that has its row after a `KeyMap` of the
mode has renumbered the rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.routing import MODES, KeyMap
from evenrank.dataloader.routing.key_map import rows_per_rank

_RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
_KEYS_PER_CHUNK = 1 << 20  # ids
_MAX_ROWS = 1 << 62  # of a KeyMap


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingLoads:
    """The load of the busiest rank over the mean of all ranks, for each of `ranks`, the numbers of ranks."""

    num_embeddings: int
    ranks: Sequence[int]
    ids: Mapping[str, Sequence[float]]
    """Per mode, where load is the number of distinct ids that occur."""
    lookups: Mapping[str, Sequence[float]]
    """Per mode, where load is the number of events."""
    most_frequent: Sequence[float]
    """Events of the most frequent id over the mean of the ranks: a lower bound of `lookups` in any mode."""


def routing_loads(
    ids: NDArray[np.int64],
    counts: NDArray[np.int64],
    num_embeddings: int,
    *,
    ranks: Sequence[int] = _RANKS,
    on_ranks: Callable[[int], None] = lambda world_size: None,
) -> RoutingLoads | None:
    """Count the distinct ids and the events of each rank, in each mode.

    `ids` [n] are distinct, with `counts` [n] events each; `on_ranks` is called with each number of ranks before
    counting. None if there are no ids, or more than 2^62 embeddings: ids that are hashes index no table.
    """
    if not len(ids) or num_embeddings > _MAX_ROWS:
        return None
    id_ratios: dict[str, list[float]] = {mode: [] for mode in MODES}
    lookup_ratios: dict[str, list[float]] = {mode: [] for mode in MODES}
    for world_size in ranks:
        on_ranks(world_size)
        for mode in MODES:
            loads = _loads(ids, counts, KeyMap(num_embeddings=num_embeddings, world_size=world_size, mode=mode))
            for ratios, load in zip((id_ratios, lookup_ratios), loads, strict=True):
                ratios[mode].append(float(load.max() / load.mean()))
    largest_share = int(counts.max()) / int(counts.sum())
    return RoutingLoads(
        num_embeddings=num_embeddings,
        ranks=ranks,
        ids=id_ratios,
        lookups=lookup_ratios,
        most_frequent=[largest_share * world_size for world_size in ranks],
    )


def _loads(ids: NDArray[np.int64], counts: NDArray[np.int64], key_map: KeyMap) -> NDArray[np.float64]:
    """Return the distinct ids of each rank, and its events: [2, world size]."""
    range_rows = rows_per_rank(key_map.num_embeddings, key_map.world_size)
    loads = np.zeros((2, key_map.world_size))
    for start in range(0, len(ids), _KEYS_PER_CHUNK):
        chunk = slice(start, start + _KEYS_PER_CHUNK)
        owners = key_map(ids[chunk]) // range_rows
        loads[0] += np.bincount(owners, minlength=key_map.world_size)
        loads[1] += np.bincount(owners, weights=counts[chunk], minlength=key_map.world_size)
    return loads
