"""The data of a job: a dataset that exists, or a synthetic one, and its balanced batches."""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, TypeVar

from evenrank.core.errors import ConfigError
from evenrank.dataloader import JaggedBatch, Loader, build_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, Cost, StepMetrics
from evenrank.dataloader.balance.exchange.collectives import COLLECTIVES as EXCHANGES
from evenrank.dataloader.config import ReadConfig
from trainer.config import TrainConfig
from trainer.world import World, on_all_ranks, on_first_rank

Batch = TypeVar("Batch", bound=JaggedBatch)

Batches = Balancer[Batch] | Loader[Batch]
"""Balanced batches: of a Balancer, on the device that trains them, or of a loader that balances, on the CPU."""
SAMPLER = "sampler"
"""Balance with no exchange; otherwise the name of one, or none."""


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


def open_loader(
    data: Path,
    read: ReadConfig[Batch],
    config: TrainConfig,
    world: World,
    *,
    cost: Cost,
    on_step: Callable[[StepMetrics], None] | None = None,
) -> Loader[Batch]:
    """Return this rank's loader of a split, which balances if the settings say so. Collective.

    Raises:
        ConfigError: a setting does not fit the data.
        DataError: the dataset is missing or damaged.
        RankError: one of these on another rank.

    """
    balance = None
    if config.balance == SAMPLER:
        balance = BalanceConfig(
            cost=cost, strategy=config.strategy, window=config.window, group=world.data, on_step=on_step
        )
    return on_all_ranks(
        lambda: build_loader(data, read, rank=world.data_rank, world_size=world.data_size, balance=balance)
    )


def open_batches(
    loader: Loader[Batch], config: TrainConfig, world: World, **options: Any
) -> AbstractContextManager[Batches[Batch]]:
    """Return the batches of a loader from `open_loader`, balanced as the settings say. Collective.

    Args:
        loader: of this rank.
        config: the job's settings.
        world: the ranks of the job.
        options: the other arguments of the Balancer, if there is one.

    """
    return closing(loader) if config.balance == SAMPLER else balanced(loader, config, world, **options)


def balanced(loader: Loader[Batch], config: TrainConfig, world: World, **options: Any) -> Balancer[Batch]:
    """Return the balanced batches of a loader, on the device that trains them. Collective: every rank must call this.

    `balance = "none"` is the strategy `none` on the same path, which moves no sample but counts the loss tokens.

    Args:
        loader: of this rank.
        config: the job's settings.
        world: the ranks of the job.
        options: the other arguments of the Balancer.

    """
    options = {"device": world.device, "group": world.data, **options}
    if config.balance == "none":
        return Balancer(loader, BalanceConfig(strategy="none", **options))
    return Balancer(loader, BalanceConfig(strategy=config.strategy, exchange=config.balance, **options))


def check_names(config: TrainConfig) -> None:
    """Check the names of implementations that a job chooses, before anything is made or opened.

    Raises:
        ConfigError: there is no such strategy or exchange.

    """
    STRATEGIES.check(config.strategy)
    if config.balance not in ("none", SAMPLER, *EXCHANGES):
        raise ConfigError(f"balance must be one of none, {SAMPLER}, {', '.join(EXCHANGES)}, got {config.balance!r}")
