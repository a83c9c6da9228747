"""Two levels: first between hosts, where moving is dear, then among the ranks of each."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.partition.strategies import PADDING, Assignment, partition


def partition_by_host(
    costs: NDArray[np.int64],
    topology: tuple[int, int],
    *,
    strategy: str = "lpt-swap",
    sizes: NDArray[np.int64],
    num_real: NDArray[np.int64] | None = None,
    max_tokens_per_rank: int | None = None,
    on_overflow: str = "raise",
    tolerance: float = 0.001,
) -> Assignment:
    """Decide which rank trains which sample, so that little goes from host to host.

    Hosts are levelled with `min-move`, as if each were one rank; then the ranks of each host among themselves with
    `strategy`. What comes from other hosts takes the places of what has left, and no rank of the host is its home.

    Args:
        costs: int64 [W * B] or [W, B], rank after rank.
        topology: hosts and ranks per host; host h has the ranks h * ranks_per_host and so on.
        strategy: among the ranks of a host; see `partition`, as for the arguments below. `identity` leaves all where
            they are.
        sizes: the tokens of each sample.
        num_real: how many of each rank's rows are samples.
        max_tokens_per_rank: kept within each host.
        on_overflow: where it cannot be.
        tolerance: of each level.

    Raises:
        ConfigError: an argument is out of its range.

    """
    hosts, ranks_per_host = topology
    world_size = hosts * ranks_per_host
    check_topology(topology, world_size)
    if strategy == "identity" or hosts == 1:
        return partition(
            costs,
            world_size,
            strategy=strategy,
            sizes=sizes,
            num_real=num_real,
            max_tokens_per_rank=max_tokens_per_rank,
            on_overflow=on_overflow,
            tolerance=tolerance,
        )
    # Checks the arguments, and says which rows are samples.
    dealt = partition(costs, world_size, strategy="identity", sizes=sizes, num_real=num_real).rank_of
    is_real = dealt.reshape(-1) >= 0
    slots = np.where(is_real, costs.reshape(-1), 0)
    tokens = np.where(is_real, sizes.reshape(-1), 0)
    host_of = partition(slots, hosts, strategy="min-move", sizes=tokens, tolerance=tolerance).rank_of.reshape(-1)
    home = np.arange(len(slots)) // (len(slots) // hosts)
    rank_of = np.empty(len(slots), dtype=np.int32)
    for host in range(hosts):
        place = np.flatnonzero(home == host)
        has = place.copy()
        has[host_of[place] != host] = np.flatnonzero((host_of == host) & (home != host))
        within = partition(
            slots[has],
            ranks_per_host,
            strategy=strategy,
            sizes=tokens[has],
            max_tokens_per_rank=max_tokens_per_rank,
            on_overflow=on_overflow,
            tolerance=tolerance,
        )
        rank_of[has] = host * ranks_per_host + within.rank_of.reshape(-1)
    return Assignment(rank_of=np.where(is_real, rank_of, np.int32(PADDING)).reshape(dealt.shape))


def check_topology(topology: tuple[int, int], world_size: int) -> None:
    """Check that a topology is one of so many ranks.

    Raises:
        ConfigError: it is not.

    """
    hosts, ranks_per_host = topology
    if hosts < 1 or ranks_per_host < 1 or hosts * ranks_per_host != world_size:
        raise ConfigError(
            f"topology is hosts and ranks per host, {hosts} times {ranks_per_host} is not the world size, {world_size}"
        )
