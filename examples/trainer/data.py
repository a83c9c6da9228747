"""What a job reads: its dataset, the order of its samples, and their batches on this rank."""

from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evenrank.dataloader import Loader, LoaderConfig, StochasticLength, Targets, TimeWindows, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.datasets import open_store
from evenrank.datasets.order import Order
from evenrank.datasets.slices import moment
from trainer.config import TrainConfig
from trainer.tasks import Task
from trainer.world import World, on_all_ranks


def find_data(config: TrainConfig) -> Path:
    """Return the folder of the dataset; without one, rank 0 makes it first."""
    folder = Path(config.data or Path(config.out) / "synthetic")

    def make() -> None:
        from evenrank.datasets.distributions import Lognormal, Zipf
        from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess  # hosts that train lack Polars

        lengths, items = Lognormal(mean=30, std=40, low=1, high=300), Zipf(exponent=1.05, high=2000)
        synthetic = SyntheticConfig(num_users=1000, lengths=lengths, items=items)
        preprocess(PreprocessConfig(dataset="synthetic", out=folder, synthetic=synthetic))

    is_missing = config.data is None and not (folder / "manifest.json").exists()  # which is written last
    on_all_ranks(lambda: make() if is_missing and dist.get_rank() == 0 else None)
    return folder


def open_batches(
    data: Path, task: Task, config: TrainConfig, world: World, balance: BalanceConfig
) -> tuple[Loader[Any], AbstractContextManager[Any]]:
    """Open what is trained, if `balance` is observed, or evaluated; return its loader and its balanced batches."""
    is_trained, is_exchanged = balance.on_step is not None, config.balance in EXCHANGES
    split = "train" if is_trained or config.time_windows is not None else "eval"
    drawn = None
    if is_trained and (alpha := config.stochastic_alpha) is not None:
        drawn = StochasticLength(alpha=alpha, newest=config.stochastic_newest)
    read: LoaderConfig = task.read(
        split=split,
        order=on_all_ranks(lambda: _order(config, data, is_trained=is_trained)),
        batch_size=config.batch_size,
        max_history_length=config.max_history_length,
        stochastic_length=drawn,
        num_workers=config.num_workers,
        seed=config.seed,
        device=None if is_exchanged else world.device,
    )
    own = None if is_exchanged else balance  # else a Balancer balances
    loader: Loader[Any] = on_all_ranks(
        lambda: build_loader(data, read, rank=world.rank, world_size=world.size, balance=own)
    )
    return loader, Balancer(loader, balance, device=world.device) if is_exchanged else closing(loader)


def _order(config: TrainConfig, data: Path, *, is_trained: bool) -> str | Order:
    """Return the order of what is trained, or evaluated."""
    own: dict[str, Any] = {"where": config.where(is_trained=is_trained), "min_history": config.min_history}
    own |= {"within": config.within, "segment": config.segment} if is_trained else {"within": "time"}
    if config.time_windows is not None:
        every, start = config.time_windows, config.time_windows_start
        if start == "first":  # of all users, so that windows of held-out ones are the same
            first = TimeWindows(every=every, start=start, where=config.targets, min_history=config.min_history)
            windows, _ = first.open(data, partial(open_store, split="train"), config.num_candidates)
            start = moment(windows.start_ms).isoformat()
        return TimeWindows(every=every, start=start, **own)
    if config.targets is None and not config.min_history:
        return "shuffle" if is_trained else "rows"
    return Targets(**own)
