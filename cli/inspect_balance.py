"""`evenrank inspect-balance`: iterate over one epoch of a dataset through the Balancer, under torchrun.

Modules that need torch are imported inside functions: the process that starts the ranks reads a Walk without them.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenrank.cli import console
from evenrank.cli.options import STRATEGIES, DatasetFolder, make_cost
from evenrank.core.errors import ConfigError, RankError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

    from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch
    from evenrank.dataloader.balance import BalanceConfig, StepMetrics

EXPLANATION = """\
load      load of the heaviest rank over the lower bound, mean over steps; 1 is perfect
idle      share of the ranks' time spent waiting for the heaviest rank of each step
speed-up  expected by the cost model: heaviest loads before balancing / after
moved     share of samples trained on another rank than the one that loaded them
plan      median time to plan a step, in the background
"""


def inspect_balance_command(
    path: DatasetFolder,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.")] = 32,
    max_history_length: Annotated[
        int, typer.Option(help="Events per sample; longer histories are cut to their newest events.")
    ] = 2048,
    max_num_candidates: Annotated[int, typer.Option(help="How many of each user's last events are candidates.")] = 1,
    strategy: Annotated[str, typer.Option(help=f"Balancing strategy: one of {', '.join(STRATEGIES)}.")] = "lpt-swap",
    hidden: Annotated[int, typer.Option(help="Width of the HSTU layers whose cost is balanced.")] = 1024,
    heads: Annotated[int, typer.Option(help="Attention heads per layer, each hidden / heads wide.")] = 4,
) -> None:
    """Iterate over one epoch through the Balancer; run it under torchrun.

    Prints the load of the heaviest rank before and after balancing, and checks that each sample was seen exactly once
    and unaltered. Example:

    \b
        torchrun --nproc_per_node 4 -m evenrank inspect-balance out/ml-20m
    """
    # Some schedulers set WORLD_SIZE too, but not the others.
    if missing := [name for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(
            f"{missing[0]} is not set, because torchrun has not started this process; run "
            f"torchrun --nproc_per_node 4 -m evenrank inspect-balance {path}"
        )

    cost = make_cost(None, hidden=hidden, heads=heads, layers=8)
    with console.stages(shown=os.environ["RANK"] == "0") as on_stage:
        on_stage("importing torch")
        import torch.distributed as dist

        from evenrank.dataloader import LoaderConfig
        from evenrank.dataloader.balance import BalanceConfig

        config = LoaderConfig(
            batch_size=batch_size,
            split=split,
            max_history_length=max_history_length,
            max_num_candidates=max_num_candidates,
        )
        on_stage("waiting for the other ranks")
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    try:
        is_first = dist.get_rank() == 0
        walk = walk_epoch(path, config, BalanceConfig(cost=cost, strategy=strategy), show_progress=is_first)
        if is_first:
            console.print_result(load_table([walk]))
            console.print_result(EXPLANATION)
            console.print_result(
                f"{walk.num_samples:,} samples in {len(walk.metrics):,} steps on {dist.get_world_size()} ranks: each "
                "seen exactly once and unaltered"
            )
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """One epoch in which each sample was seen exactly once and unaltered."""

    strategy: str
    metrics: "list[StepMetrics]"
    num_samples: int  # of all ranks
    has_exchange: bool = True  # between ranks, through a Balancer; otherwise each read the samples that it trained

    @property
    def label(self) -> str:
        """The strategy, with a star where nothing was exchanged."""
        return self.strategy if self.has_exchange else f"{self.strategy}*"


def walk_epoch(
    path: Path,
    config: "LoaderConfig",
    balance: "BalanceConfig",
    *,
    has_exchange: bool = True,
    show_progress: bool = False,
) -> Walk:
    """Iterate over an epoch on the ranks of the default process group, and check every sample.

    Collective: every rank must call this. Every rank raises a RankError if a sample was lost, seen twice, or differs
    from the dataset.
    """
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    metrics: list[StepMetrics] = []
    balance = dataclasses.replace(balance, on_step=metrics.append)
    seen_ids: list[int] = []
    altered_steps: list[int] = []
    with contextlib.ExitStack() as stack:
        with console.stages(shown=show_progress) as on_stage:
            on_stage(f"opening {config.split}")
            from evenrank.dataloader import build_loader
            from evenrank.dataloader.balance import Balancer

            loader = build_loader(path, config, rank=rank, world_size=world_size)
            batches: Iterable[SequenceBatch]
            if has_exchange:
                batches = stack.enter_context(Balancer(loader, balance))
            else:
                batches = build_loader(path, config, rank=rank, world_size=world_size, balance=balance)
        walk = Walk(
            strategy=balance.strategy, metrics=metrics, num_samples=loader.num_samples, has_exchange=has_exchange
        )
        on_step = stack.enter_context(console.steps(f"{walk.label:>16}", len(loader), shown=show_progress))
        for batch in batches:
            seen_ids += batch.sample_ids[: batch.num_real].tolist()
            if not _matches_dataset(loader, batch):
                altered_steps.append(batch.step)
            on_step()
    of_ranks: list[tuple[list[int], list[int]]] = [([], [])] * world_size
    dist.all_gather_object(of_ranks, (seen_ids, altered_steps))
    altered_by_rank = [steps for _, steps in of_ranks]
    if any(altered_by_rank):
        raise RankError(f"samples differ from the dataset after balancing; steps of each rank: {altered_by_rank}")
    check_seen([ids for ids, _ in of_ranks], loader.num_samples)
    return walk


def check_seen(seen_by_rank: Sequence[Sequence[int]], num_samples: int) -> None:
    """Raise a RankError unless the ranks together have seen each of `num_samples` sample ids exactly once."""
    num_seen = sum(map(len, seen_by_rank))
    num_distinct = len(set(chain.from_iterable(seen_by_rank)))
    if not num_seen == num_distinct == num_samples:
        raise RankError(
            f"each of {num_samples:,} samples should be seen exactly once, but {num_distinct:,} different samples were "
            f"seen {num_seen:,} times in total"
        )


def _matches_dataset(loader: "Loader[SequenceBatch]", batch: "SequenceBatch") -> bool:
    """Return whether a batch equals one collated from the dataset for the same sample ids."""
    import torch

    from evenrank.dataloader import pad_batch

    def tensors_of(one: "SequenceBatch") -> list[torch.Tensor]:
        jagged = [one.features] if one.labels is None else [one.features, one.labels]
        return [one.sample_ids, one.num_candidates, *(part for kjt in jagged for part in (kjt.values(), kjt.lengths()))]

    expected = pad_batch(loader.collate(batch.sample_ids[: batch.num_real].numpy()), batch.batch_size)
    received, collated = tensors_of(batch), tensors_of(expected)
    are_alike = batch.loss_tokens == expected.loss_tokens and len(received) == len(collated)
    return are_alike and all(map(torch.equal, received, collated))


def load_table(walks: Sequence[Walk]) -> "Table":
    """Return a table with one row per strategy: loads before and after balancing, and how many samples move."""
    import numpy as np

    from evenrank.dataloader.balance.metrics import summarize

    headers = ("strategy", "load\nbefore", "load\nafter", "worst\nafter", "idle\nbefore", "idle\nafter")
    table = console.new_table(*headers, "expected\nspeed-up", "moved", "plan\n(ms)", left=["strategy"], narrow=True)
    for walk in walks:
        summary = summarize(walk.metrics)
        table.add_row(
            walk.label,
            f"{summary.ratio_before:.3f}",
            f"{summary.ratio_after:.3f}",
            f"{summary.worst_after:.3f}",
            f"{_idle_share([step.before for step in walk.metrics]):.1%}",
            f"{_idle_share([step.after for step in walk.metrics]):.1%}",
            f"{summary.speedup:.2f}x",
            f"{summary.moved_samples if walk.has_exchange else 0:.0%}",
            f"{np.median([step.plan_seconds for step in walk.metrics] or [0.0]) * 1e3:.2f}",
        )
    return table


def _idle_share(loads: "Sequence[NDArray[np.int64]]") -> float:
    """Return the share of all ranks' time that is spent waiting for the heaviest rank of each step."""
    elapsed = sum(int(step_loads.max()) * len(step_loads) for step_loads in loads)
    return 1 - sum(int(step_loads.sum()) for step_loads in loads) / elapsed if elapsed else 0.0
