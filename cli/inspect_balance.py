"""`evenrank inspect-balance`: iterate over one epoch of a dataset through the Balancer, under torchrun.

Modules that need torch are imported inside functions: the process that starts the ranks reads a Gain without them.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenrank.cli import console, options, settings_options
from evenrank.cli.reports.gains import Gain, describe_settings, print_gains
from evenrank.core.errors import ConfigError, RankError
from evenrank.core.rules import NonNegative, OneOf, Option
from evenrank.core.settings import Settings

if TYPE_CHECKING:
    from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch
    from evenrank.dataloader.balance import BalanceConfig, StepMetrics


@dataclass(frozen=True, kw_only=True)
class InspectBalanceOptions(Settings):
    """What is iterated over, and how it is balanced."""

    path: Annotated[Path, Option("PATH", is_argument=True)]
    """Folder or URL written by `evenrank preprocess`."""
    samples: options.StepOptions = field(default_factory=options.StepOptions)
    max_num_candidates: Annotated[NonNegative, Option("EVENTS")] = 0
    """How many of each user's last events are candidates."""
    strategy: Annotated[str, OneOf(options.STRATEGIES), Option("NAME", panel="Balancing")] = "lpt-swap"
    """Balancing strategy."""
    model: options.CostOptions = field(default_factory=options.CostOptions)


OPTIONS = settings_options.options_of(InspectBalanceOptions)


@settings_options.command_of(OPTIONS)
def inspect_balance_command(ctx: typer.Context) -> None:
    """Iterate over one epoch through the Balancer; run it under torchrun.

    Prints how long ranks are idle before and after balancing, and checks that each sample was seen exactly once and
    unaltered. Example:

    \b
        torchrun --nproc_per_node 4 -m evenrank inspect-balance out/ml-20m
    """
    # Some schedulers set WORLD_SIZE too, but not the others.
    if missing := [name for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(
            f"{missing[0]} is not set, because torchrun has not started this process; run "
            f"torchrun --nproc_per_node 4 -m evenrank inspect-balance {ctx.params['path']}"
        )

    chosen = settings_options.chosen(InspectBalanceOptions, ctx, OPTIONS)
    path, samples, model = chosen.path, chosen.samples, options.make_cost(chosen.model)
    with console.stages(shown=os.environ["RANK"] == "0") as on_stage:
        on_stage("importing torch")
        import torch.distributed as dist

        from evenrank.dataloader import LoaderConfig
        from evenrank.dataloader.balance import BalanceConfig

        # Imported later, its defaults would keep the group, whose threads can abort the end of the process.
        import_module("torch.distributed.nn.functional")
        config = LoaderConfig(**asdict(samples), max_num_candidates=chosen.max_num_candidates)
        on_stage("waiting for the other ranks")
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    try:
        is_first = dist.get_rank() == 0
        gain = walk_epoch(path, config, BalanceConfig(cost=model, strategy=chosen.strategy), show_progress=is_first)
        if is_first:
            console.print_result(f"{path}: {describe_settings(samples, chosen.model)}")
            print_gains([gain])
            console.print_result(
                f"{gain.num_samples:,} samples in {len(gain.steps):,} steps on {gain.ranks} ranks: each seen exactly "
                "once and unaltered"
            )
    finally:
        dist.destroy_process_group()


def walk_epoch(
    path: Path,
    config: "LoaderConfig",
    balance: "BalanceConfig",
    *,
    has_exchange: bool = True,
    show_progress: bool = False,
) -> Gain:
    """Iterate over an epoch on the ranks of the default process group, and check every sample.

    Without `has_exchange`, each rank reads the samples that it trains on, and the label has a star.

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
            from evenrank.dataloader.balance.ranks.agree import create_on_all_ranks

            build = partial(build_loader, path, config, rank=rank, world_size=world_size)
            loader = create_on_all_ranks(lambda _: build(), group=None, world_size=world_size, balance=balance)
            batches: Iterable[SequenceBatch]
            if has_exchange:
                batches = stack.enter_context(Balancer(loader, balance))
            else:
                batches = build(balance=balance)
        label = balance.strategy + "*" * (not has_exchange)
        on_step = stack.enter_context(console.steps(f"{label:>16}", len(loader), shown=show_progress))
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
    return Gain(world_size, label, metrics, has_exchange=has_exchange)


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
        fields = [value for _, value in one.tensors() if value is not None]
        parts = ([one] if isinstance(one, torch.Tensor) else [one.values(), one.lengths()] for one in fields)
        return [*chain.from_iterable(parts)]

    expected = pad_batch(
        loader.collate(batch.sample_ids[: batch.num_real].numpy(), epoch=batch.epoch), batch.batch_size
    )
    received, collated = tensors_of(batch), tensors_of(expected)
    are_alike = batch.loss_tokens == expected.loss_tokens and len(received) == len(collated)
    return are_alike and all(map(torch.equal, received, collated))
