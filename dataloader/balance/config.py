"""`BalanceConfig`: the options of balancing, for a Balancer and for a loader that balances itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Annotated, Any, Self

from evenrank.core.errors import ConfigError
from evenrank.core.rules import PER_RANK, AllBut, AppliesTo, Bounds, Count, Needs, OneOf, Only
from evenrank.core.settings import check_settings, check_user, construct, shared_options
from evenrank.dataloader.balance.costs.cost import Cost, describe_cost, resolve_cost
from evenrank.dataloader.balance.costs.model_costs import PaddedCost, counted_tokens
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics
from evenrank.dataloader.balance.metrics.writers import BeginsRun, KeepsTimes, StepLogger
from evenrank.dataloader.balance.partition.strategies import (
    DEFAULT_STRATEGY,
    DEFAULT_TOLERANCE,
    STRATEGIES,
    OnOverflow,
    Tolerance,
)

DEFAULT_TIMEOUT = timedelta(minutes=30)
EXCHANGES = ("all-to-all", "all-gather")

MAX_STEPS = 8
"""Steps whose metadata a Balancer gathers at once: an all-gather takes about as long for 8 as for one."""

BALANCER, BUILD_LOADER = Only("Balancer"), Only("build_loader")


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
    """Options of balancing, equal on all ranks except for `timeout`, `on_step` and options that begin with `log_`.

    A Balancer or `build_loader` checks the options, so that a mistake on one rank is reported on all ranks.
    """

    cost: Cost
    """The cost of a sample; see `evenrank.dataloader.balance.costs.cost`. `from_dict` also takes the name of a
    registered cost (`register_cost`), or a mapping of its `name` and settings."""
    strategy: Annotated[str, OneOf(STRATEGIES)] = DEFAULT_STRATEGY
    """`lpt-swap` balances best; `min-move` moves the fewest tokens that bring the ranks within `tolerance`;
    `karmarkar-karp` is the baseline; `none` moves nothing. `register_strategy` adds your own."""
    tolerance: Tolerance = DEFAULT_TOLERANCE
    """Relative tolerance: a heaviest load of (1 + tolerance) * lower bound is good enough."""
    max_tokens_per_rank: Count | None = None
    """Most tokens that a rank may have in a step, so that the step fits in device memory; None: no limit. The tokens of
    a sample are `cost.tokens(lengths)` if the cost has that method, else the sum of its lengths over all keys."""
    on_overflow: OnOverflow = "raise"
    """If `max_tokens_per_rank` cannot be kept: `raise` on all ranks, or `warn` and exceed the limit."""
    pack: Annotated[bool, Needs("max_tokens_per_rank")] = False
    """Fill each step with as many samples as fit `max_tokens_per_rank`, at most `batch_size` per rank; the other rows
    are padding. A sample longer than the limit raises an error or, with `on_overflow="warn"`, gets a rank to itself,
    apart from samples without tokens. With `build_loader`, `drop_last` leaves out a last step that has room for more
    samples; a Balancer packs 8 loaded batches at a time."""
    window: Count = 1
    """Number of consecutive steps between which samples may move, so that fewer steps wait for a long sample. A
    Balancer takes at most 8, and loads all of them first. 1: samples stay in their steps."""
    compare_every: Annotated[int, Bounds(at_least=2)] | None = None
    """Leave one step in this many unbalanced, a different one in each epoch, so that a running job can show its gain.
    See `training.StepTimer`. None: balance all steps."""
    refit_every: Annotated[Count | None, Needs("on_step"), AppliesTo(strategy=AllBut(("none",)))] = None
    """Fit a MeasuredCost to the times of all ranks every this many steps of the job, and balance by it if it tells
    ranks apart better than the cost before. Needs a `training.StepTimer` as `on_step` on every rank, and a cost of this
    package other than PaddedCost. Which rank trains on a sample then depends on times. None: the cost stays."""
    exchange: Annotated[str, OneOf(EXCHANGES), BALANCER] = "all-to-all"
    """`Balancer` only. The collective that moves samples: `all-to-all`, or `all-gather`, which moves more bytes and
    gives the same batches."""
    batch_size: Annotated[Count | None, BALANCER] = None
    """`Balancer` only. Rows of every balanced batch including padding, at least as many as the loader's batches have;
    None: the rows of the longest first batch of any rank, or the `batch_size` of a DataLoader or Batcher."""
    lookahead: Annotated[Count, BALANCER] = 2
    """`Balancer` only. Steps that are planned ahead of the step that trains. Up to 7 more batches are loaded, because
    metadata is gathered for 8 steps at once. Device memory does not grow with `lookahead`: on a GPU the next step
    takes twice its batch; with `all-gather`, its batch and one batch of every rank."""
    timeout: Annotated[timedelta, Bounds(above=timedelta()), PER_RANK] = DEFAULT_TIMEOUT
    """How long a collective or a comparison waits for other ranks; `from_dict` also takes seconds."""
    on_step: Annotated[Callable[[StepMetrics], None] | None, PER_RANK] = field(default=None, compare=False)
    """Called on the training thread with the metrics of each step, before its batch is handed out; see
    `evenrank.dataloader.balance.metrics.writers`. Without an exchange, samples that change ranks count as moved,
    and gathering and exchanging take 0 seconds."""
    log_every: Annotated[Count | None, PER_RANK] = None
    """Log a readable line for one step in this many, on rank 0; None: no lines."""
    log_window: Annotated[tuple[int, int] | None, Needs("log_every"), PER_RANK] = None
    """(start, stop): log only the steps start..stop-1, counted from 0 over all epochs; None: log all steps."""
    log_loads: Annotated[bool, Needs("log_every"), PER_RANK] = False
    """Add the loads of all ranks to the lines of `log_every`."""

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Return a config with options by name, for example from a TOML, JSON or YAML file.

        Raises:
            ConfigError: an option or a setting of the cost is unknown, missing or of the wrong type, or no cost has
                that name.
            DataError: the file of a measured cost is missing or malformed.
        """
        given = dict(options)
        if "cost" in given and not callable(given["cost"]):
            given["cost"] = resolve_cost(given["cost"])
        return construct(cls, given, cls.__name__)

    def check(self, *, exchanges: bool) -> None:
        """Check the options for a Balancer, which exchanges samples, or for `build_loader`.

        Raises:
            ConfigError: an option is of another type, out of range, contradicts another one, or has no effect.
        """
        check_settings(self)
        check_user(self, _user(exchanges))
        if self.strategy == "none" and (self.window > 1 or self.pack):
            option = "pack=True" if self.pack else f"window={self.window}"
            raise ConfigError(f"{option} needs a strategy that assigns samples to ranks, got 'none'; choose another")
        if exchanges and self.window > MAX_STEPS:
            raise ConfigError(
                f"a Balancer has windows of at most {MAX_STEPS} steps, whose metadata it gathers at once, got "
                f"window={self.window}; lower it, or pass balance to build_loader"
            )
        if self.pack and self.window > 1:
            raise ConfigError(f"pack=True decides which samples a step has; leave out window={self.window}")
        if self.compare_every is not None and (self.max_tokens_per_rank is not None or self.window > 1):
            raise ConfigError(
                f"compare_every={self.compare_every} needs the same samples in each step; leave it out, or window and "
                "max_tokens_per_rank, which change which samples a step has or may have"
            )
        if self.refit_every is not None:
            self._check_refit(exchanges=exchanges)
        if self.max_tokens_per_rank is not None and isinstance(self.cost, PaddedCost):
            raise ConfigError(
                f"max_tokens_per_rank = {self.max_tokens_per_rank} limits sums of tokens, but a PaddedCost is of "
                "rows x longest; leave it out, and lower the loader's max_history_length"
            )
        if self.log_window is not None:
            start, stop = self.log_window
            if not 0 <= start < stop:
                raise ConfigError(f"log_window must be (start, stop) with 0 <= start < stop, got {self.log_window}")

    def _check_refit(self, *, exchanges: bool) -> None:
        if isinstance(self.cost, PaddedCost):
            raise ConfigError(
                f"refit_every={self.refit_every} changes nothing: samples of a PaddedCost are sorted by their tokens, "
                "however much each costs; leave it out"
            )
        if counted_tokens(self.cost) is None:
            raise ConfigError(
                f"refit_every={self.refit_every} needs a cost that says which tokens count, got "
                f"{describe_cost(self.cost)}; begin with one of the package, such as LinearCost(...)"
            )
        if exchanges and self.pack:
            raise ConfigError(
                f"refit_every={self.refit_every} does not go with pack=True of a Balancer, whose steps have samples "
                "that were loaded before the cost changed; pass balance to build_loader, or leave one out"
            )

    def observer(
        self, rank: int, *, exchanges: bool, data: Callable[[], Mapping[str, Any]]
    ) -> Callable[[StepMetrics], None] | None:
        """Return the function to call with the metrics of each step on a rank; None if nothing observes them.

        `exchanges` is that of `check`; `data` returns what the log says of the loader.
        """
        if isinstance(self.on_step, BeginsRun):
            options = self.rank_invariants(exchanges=exchanges) | {"tokens": counted_tokens(self.cost)}
            self.on_step.begin(
                options | {"data": {name: value for name, value in data().items() if name not in options}}
            )
        on_step = self.on_step
        if isinstance(on_step, KeepsTimes) and not on_step.takes_steps:
            on_step = None
        if self.log_every is None or rank != 0:
            return on_step
        log = StepLogger(every=self.log_every, window=self.log_window, with_loads=self.log_loads)
        if on_step is None:
            return log

        def observe(metrics: StepMetrics) -> None:
            log(metrics)
            on_step(metrics)

        return observe

    @property
    def partition_options(self) -> dict[str, Any]:
        """The options of `partition`, by name."""
        names = ("strategy", "tolerance", "max_tokens_per_rank", "on_overflow")
        return {name: getattr(self, name) for name in names} | {"padded": isinstance(self.cost, PaddedCost)}

    @property
    def for_plans(self) -> Self:
        """These options without `on_step`, which often cannot be pickled, and what needs it."""
        return replace(self, on_step=None, refit_every=None)

    @property
    def makes_steps(self) -> bool:
        """Whether a step may have samples of several loaded ones."""
        return self.pack or self.window > 1

    def balances(self, epoch: int, step: int) -> bool:
        """Return whether a step is balanced: one in `compare_every` is not, another one in each epoch."""
        if (every := self.compare_every) is None:
            return True
        return (step + epoch * (5 * every // 8)) % every != every // 2

    def rank_invariants(self, *, exchanges: bool) -> dict[str, Any]:
        """Return the options that must be the same on all ranks, by name; for `exchanges` see `check`."""
        return shared_options(self, _user(exchanges)) | {"cost": describe_cost(self.cost)}


def _user(exchanges: bool) -> str:
    return (BALANCER if exchanges else BUILD_LOADER).user


def timeout_of(config: object) -> timedelta:
    """Return the timeout of a config or, until it was reported that this is none, the default."""
    timeout = getattr(config, "timeout", None)
    return timeout if isinstance(timeout, timedelta) and timeout > timedelta() else DEFAULT_TIMEOUT
