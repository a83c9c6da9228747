"""`evenrank warmup`: compile what commands and Balancers need, before the first of them waits for it."""

import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from evenrank.cli import console
from evenrank.cli.options import STRATEGIES, CostOptions, make_cost
from evenrank.core.errors import DataError, MissingPackageError
from evenrank.core.optional_imports import naming_extras


def warmup_command() -> None:
    """Compile for this machine what commands, loaders and Balancers need, which the first of them would wait for.

    Takes less than a minute, once per machine and release, and nothing after that. Run it where the package is
    installed: in the image of a container, or on one node of each kind. Example:

    \b
        evenrank warmup
    """
    from evenrank.core.compiled import cache_folder

    cache = cache_folder()
    if cache is None:
        raise DataError("machine code cannot be cached: no folder can be written; see docs/how-to/install.md")
    start, known = time.perf_counter(), _machine_code(cache)
    with tempfile.TemporaryDirectory() as folder:
        for name, run in {"planning": _plan, "preprocessing": _preprocess, "training": _train}.items():
            try:
                with console.stages() as on_stage, naming_extras():
                    on_stage(f"compiling {name}")
                    run(Path(folder))
            except MissingPackageError as error:
                console.print_result(f"{name} is left out: {error}")
    seconds, count = time.perf_counter() - start, len(_machine_code(cache) - known)
    done = f"{count:,} loops were compiled in {seconds:.0f} s" if count else "everything is compiled already"
    console.print_result(f"{done}; cache: {cache}")


def _machine_code(cache: Path) -> set[Path]:
    return set(cache.rglob("*.nbc"))


def _plan(folder: Path) -> None:
    """Plan steps in every way and route items, as `simulate` and `inspect` do."""
    import numpy as np

    from evenrank.cli.reports.dataset_data import count_values, routing_loads
    from evenrank.cli.reports.simulation import LengthSource, simulate
    from evenrank.dataloader.balance import BalanceConfig
    from evenrank.dataloader.balance.partition.strategies import warm_up

    source = LengthSource(lengths=np.arange(8))
    for strategy in STRATEGIES:
        warm_up(strategy, limits_tokens=True)
    simulate(source, BalanceConfig(cost=make_cost(CostOptions(cost="linear")), window=2), 2, batch_size=2, steps=2)
    routing_loads(*count_values([np.arange(8)]), 8, ranks=[2])


def _preprocess(folder: Path) -> None:
    """Preprocess a log and synthetic data, which is left for `_train`."""
    from evenrank.datasets.distributions import Uniform
    from evenrank.preprocess import PreprocessConfig, RequestRule, SyntheticConfig, TabularConfig, preprocess

    requests, synthetic = RequestRule(seconds=2), SyntheticConfig(num_users=8, lengths=Uniform(low=4, high=8))
    for user in ("1", "a"):  # numbers and texts are read by different loops
        log = folder / "log.csv"
        log.write_text("user,item,time\n" + "".join(f"{user},{i},{1_500_000_000 + 1000 * i}\n" for i in range(8)))
        custom = TabularConfig(events=(log,), user_column="user", item_column="item", timestamp_column="time")
        preprocess(
            PreprocessConfig(
                dataset="custom", out=folder / "log", custom=custom, split="time:last:1h", requests=requests
            )
        )
    preprocess(
        PreprocessConfig(dataset="synthetic", out=folder / "data", split="none", synthetic=synthetic, requests=requests)
    )


def _train(folder: Path) -> None:
    """Lay out an exchange, and load steps of synthetic data, packed and not, if they could be made."""
    from evenrank.dataloader import Cross, LoaderConfig, Negatives, Pools, Requests, Targets, TimeWindows, build_loader
    from evenrank.dataloader.balance import BalanceConfig
    from evenrank.dataloader.balance.exchange.exchange import warm_up
    from evenrank.dataloader.config import StochasticLength

    warm_up()
    if (folder / "data").exists():
        candidates: dict[str, Any] = {"batch_size": 2, "max_num_candidates": 1, "negatives": Negatives(count=1)}
        orders = (Targets(), TimeWindows(every="1w"), Requests())
        made: dict[str, Any] = {
            "pools": Pools(values=(1,)),
            "stochastic_length": StochasticLength(alpha=1),
            "negatives": Negatives(count=1),
            "crosses": {"pair": Cross(of=("user_id", "item_id"), size=9)},
        }
        configs = [LoaderConfig(batch_size=2), LoaderConfig(batch_size=2, max_num_candidates=1, **made)]
        configs += [LoaderConfig(order=order, **candidates) for order in orders]
        for pack, config in product((False, True), configs):
            balance = BalanceConfig(cost=make_cost(CostOptions(cost="linear")), pack=pack, max_tokens_per_rank=1 << 20)
            next(iter(build_loader(folder / "data", config, rank=0, world_size=2, balance=balance)))
