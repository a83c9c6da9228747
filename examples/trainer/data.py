"""The data of a job: a dataset that exists, or a synthetic one, and its balanced batches."""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TypeVar

from evenrank.core.errors import ConfigError
from evenrank.dataloader import JaggedBatch, Loader, LoaderConfig, TimeWindows, build_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, Cost, MeasuredCost, StepMetrics
from evenrank.dataloader.balance.config import EXCHANGES
from trainer.config import TrainConfig
from trainer.world import World, on_all_ranks, on_first_rank

Batch = TypeVar("Batch", bound=JaggedBatch)

Batches = Balancer[Batch] | Loader[Batch]
"""Balanced batches, on the device that trains on them: of a loader that balances, or of a Balancer."""
NO_EXCHANGE = "no-exchange"
"""Each rank plans the steps of all ranks and reads what it trains; likewise with `none`, which moves no sample."""


def find_data(config: TrainConfig) -> Path:
    """Return the folder of the dataset; without one, rank 0 makes it first. Collective: every rank must call this."""
    if config.data is not None:
        return Path(config.data)
    folder = Path(config.out) / "synthetic"
    on_first_rank(lambda: _make_synthetic(folder))
    return folder


def _make_synthetic(folder: Path) -> None:
    if (folder / "manifest.json").exists():  # written last
        return
    # Polars, which hosts that only train lack.
    from evenrank.datasets.distributions import Lognormal, Zipf
    from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

    synthetic = SyntheticConfig(
        num_users=1000,
        lengths=Lognormal(mean=30, std=40, low=1, high=300),
        items=Zipf(exponent=1.05, high=2000),
    )
    preprocess(PreprocessConfig(dataset="synthetic", out=folder, synthetic=synthetic))


def balance_config(
    config: TrainConfig, *, cost: Cost, on_step: Callable[[StepMetrics], None] | None = None
) -> BalanceConfig:
    """Return how a job balances its steps.

    `balance = "none"` is the strategy `none`, which moves no sample but counts the loss tokens of all ranks.

    Args:
        config: the job's settings.
        cost: of a sample of the model, if the settings name no file of a measured one.
        on_step: see `BalanceConfig`; without one, the cost is not fitted either.

    Raises:
        DataError: the file of the cost is missing or malformed.
    """
    return BalanceConfig(
        cost=cost if config.cost is None else MeasuredCost.load(Path(config.cost)),
        strategy="none" if config.balance == "none" else config.strategy,
        tolerance=config.tolerance,
        max_tokens_per_rank=config.max_tokens_per_rank,
        window=config.window,
        refit_every=None if on_step is None else config.refit_every,
        exchange=config.balance if config.balance in EXCHANGES else EXCHANGES[0],
        on_step=on_step,
    )


def open_loader(
    data: Path, read: LoaderConfig, config: TrainConfig, world: World, balance: BalanceConfig
) -> Loader[Batch]:
    """Return this rank's loader of a split, which balances its own steps unless a Balancer does. Collective.

    Raises:
        ConfigError: a setting does not fit the data.
        DataError: the dataset is missing or damaged.
        RankError: one of these on another rank.
    """
    own = None if config.balance in EXCHANGES else balance
    return on_all_ranks(
        lambda: build_loader(
            data,
            read,
            rank=world.data_rank,
            world_size=world.data_size,
            balance=own,
            group=None if own is None else world.data,
        )
    )


def open_batches(
    loader: Loader[Batch], config: TrainConfig, world: World, balance: BalanceConfig
) -> AbstractContextManager[Batches[Batch]]:
    """Return the balanced batches of a loader from `open_loader`. Collective: every rank must call this."""
    if config.balance in EXCHANGES:
        return Balancer(loader, balance, device=world.device, group=world.data)
    return closing(loader)


def find_split(config: TrainConfig, *, is_trained: bool) -> tuple[str, str | TimeWindows]:
    """Return the split that a job trains, or that it evaluates, and its order.

    Raises:
        ConfigError: the settings describe no windows of time.
    """
    if config.time_windows is None:
        return ("train", "shuffle") if is_trained else ("eval", "rows")
    return "train", TimeWindows(every=config.time_windows, start=config.time_windows_start, shuffle=is_trained)


def check_names(config: TrainConfig) -> None:
    """Check the names of implementations and windows that a job chooses, before anything is made or opened.

    Raises:
        ConfigError: there is no such strategy, exchange or length of windows.
    """
    find_split(config, is_trained=True)
    STRATEGIES.check(config.strategy)
    if config.balance not in (known := (NO_EXCHANGE, *EXCHANGES, "none")):
        raise ConfigError(f"balance must be one of {', '.join(known)}, got {config.balance!r}")
