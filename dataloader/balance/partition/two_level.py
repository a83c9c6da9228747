"""Two-level partition: first between hosts, where moving is expensive, then among the ranks of each host.

Hosts are levelled with `min_move` as if each were one rank; then the ranks of each host with the chosen strategy. Rows
that come from other hosts take the slots of rows that left, and no rank of the host counts as their home.

Cost: that of `min_move` on H ranks of R * B slots, and of the strategy H times on R ranks. Trade-off: the tolerance
applies to each level, so the heaviest load can be (1 + tolerance)^2 times the lower bound.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.config import PartitionSettings, check_topology
from evenrank.dataloader.balance.partition.strategies import (
    PADDING,
    Assignment,
    assign,
    by_slot,
    real_rows,
    rows_per_rank,
)


def assign_by_host(
    costs: NDArray[np.int64],
    topology: tuple[int, int],
    settings: PartitionSettings,
    *,
    tokens: NDArray[np.int64],
    num_real: NDArray[np.int64] | None = None,
) -> Assignment:
    """Decide which rank trains which sample, moving little between hosts.

    Args:
        costs: int64 [W * B] or [W, B], in rank order.
        topology: hosts and ranks per host; host h has the ranks from h * ranks_per_host on.
        settings: `strategy` applies among the ranks of a host (`none`: nothing moves at all), `tolerance` to both
            levels, `max_tokens_per_rank` within each host.
        tokens: int64, shaped like `costs`.
        num_real: int64 [W], how many of each rank's first rows are samples; None: all.

    Raises:
        ConfigError: an argument is out of range, or `max_tokens_per_rank` could not be kept.

    """
    hosts, ranks_per_host = topology
    world_size = hosts * ranks_per_host
    check_topology(topology, world_size)
    if settings.strategy == "none" or hosts == 1:
        return assign(costs, world_size, settings, tokens=tokens, num_real=num_real)
    is_real = real_rows(rows_per_rank(costs, world_size), world_size, num_real)
    slot_costs, slot_tokens = by_slot("costs", costs, is_real), by_slot("tokens", tokens, is_real)
    between_hosts = PartitionSettings(strategy="min-move", tolerance=settings.tolerance)
    host_of = assign(slot_costs, hosts, between_hosts, tokens=slot_tokens).rank_of.reshape(-1)
    home = np.arange(len(slot_costs)) // (len(slot_costs) // hosts)
    rank_of = np.empty(len(slot_costs), dtype=np.int32)
    for host in range(hosts):
        slots = np.flatnonzero(home == host)
        slots[host_of[slots] != host] = np.flatnonzero((host_of == host) & (home != host))
        within_host = assign(slot_costs[slots], ranks_per_host, settings, tokens=slot_tokens[slots])
        rank_of[slots] = host * ranks_per_host + within_host.rank_of.reshape(-1)
    return Assignment(rank_of=np.where(is_real, rank_of.reshape(is_real.shape), np.int32(PADDING)))
