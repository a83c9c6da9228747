"""How steps are balanced: the options of a partition and those of a Balancer, with their defaults."""

import dataclasses
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, get_args

from evenrank.core.errors import ConfigError

OnOverflow = Literal["raise", "warn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionSettings:
    """How the samples of a step are assigned to ranks."""

    strategy: str = "lpt-swap"
    """`lpt-swap` balances best; `min-move` moves the fewest tokens that bring the ranks within `tolerance`;
    `karmarkar-karp` is the baseline; `none` moves nothing; or one of your own (`register_strategy`)."""

    tolerance: float = 0.001
    """Relative tolerance, from 0 to below 1: a heaviest load of (1 + tolerance) * lower bound is good enough."""

    max_tokens_per_rank: int | None = None
    """Limit to the tokens of a rank in a step, so that it fits in device memory; None: no limit."""

    on_overflow: OnOverflow = "raise"
    """What to do in a step where that limit cannot be kept: raise on all ranks, or warn and exceed it."""

    equal_counts: bool = True
    """Every rank gets as many rows as the others, padding included. False, for `karmarkar-karp` and models that need no
    fixed batch size: any number of samples, at least one if there are as many samples as ranks, and no padding."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ConfigError(f"tolerance must be at least 0 and below 1, got {self.tolerance}")
        if self.max_tokens_per_rank is not None and self.max_tokens_per_rank < 1:
            raise ConfigError(f"max_tokens_per_rank must be at least 1, got {self.max_tokens_per_rank}")
        if self.on_overflow not in get_args(OnOverflow):
            known = ", ".join(get_args(OnOverflow))
            raise ConfigError(f"on_overflow must be one of {known}, got {self.on_overflow!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancerSettings:
    """How a Balancer works."""

    partition: PartitionSettings = field(default_factory=PartitionSettings)
    """How samples are assigned to ranks."""

    topology: tuple[int, int] | None = None
    """Hosts and ranks per host, for ranks that are numbered host by host; None: all ranks are equally close."""

    exchange: str = "all-to-all"
    """The collective that moves samples: `all-to-all`, `all-gather`, or one of your own (`register_exchange`)."""

    batch_size: int | None = None
    """Rows of every balanced batch; None: those of the longest batch of any rank so far."""

    lookahead: int = 2
    """Steps whose metadata is gathered ahead of the step that trains, at least 1."""

    timeout: timedelta = timedelta(minutes=30)
    """How long a collective waits for other ranks."""

    log_every: int | None = None
    """Steps from one line of the log to the next, at least 1; None: no lines."""

    log_window: tuple[int, int] | None = None
    """Start and stop of the steps that are logged, start..stop-1; None: all."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {self.batch_size}")
        if not self.partition.equal_counts and self.topology is not None:
            raise ConfigError(f"topology needs equal_counts=True, got False and {self.topology}; leave out one of them")
        if not self.partition.equal_counts and self.batch_size is not None:
            raise ConfigError(
                f"batch_size, the rows of every balanced batch, needs equal_counts=True, got False and "
                f"{self.batch_size}; leave out one of them"
            )
        if self.lookahead < 1:
            raise ConfigError(f"lookahead must be at least 1, got {self.lookahead}")
        if self.log_every is not None and self.log_every < 1:
            raise ConfigError(f"log_every must be at least 1, got {self.log_every}")
        if self.log_window is not None:
            start, stop = self.log_window
            if not 0 <= start < stop:
                raise ConfigError(f"log_window must be (start, stop) with 0 <= start < stop, got {self.log_window}")
            if self.log_every is None:
                raise ConfigError(f"log_window={self.log_window} needs log_every; log_every=1 logs each of these steps")

    def shared(self) -> dict[str, Any]:
        """Return the options that must be the same on all ranks, by name."""
        names = ("topology", "exchange", "batch_size", "lookahead")
        return dataclasses.asdict(self.partition) | {name: getattr(self, name) for name in names}


DEFAULTS = BalancerSettings()


def check_topology(topology: tuple[int, int], world_size: int) -> None:
    """Check that a topology has `world_size` ranks.

    Raises:
        ConfigError: it has another number of ranks.

    """
    hosts, ranks_per_host = topology
    if hosts < 1 or ranks_per_host < 1 or hosts * ranks_per_host != world_size:
        raise ConfigError(
            f"topology is (hosts, ranks per host): {hosts} * {ranks_per_host} differs from the world size, {world_size}"
        )
