"""Iteration over one epoch of balanced batches, with a check of every sample.

Modules that need torch are imported inside functions: the process that starts the ranks reads a Walk without them.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from evenrank.cli import console
from evenrank.core.errors import RankError

if TYPE_CHECKING:
    from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch
    from evenrank.dataloader.balance import BalanceConfig, StepMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """One epoch in which each sample was seen exactly once and unaltered."""

    strategy: str
    metrics: "list[StepMetrics]"
    num_samples: int
    """Of all ranks."""
    has_exchange: bool = True
    """Samples moved between ranks, through a Balancer; otherwise each rank read those that it trained."""

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

    expected = pad_batch(loader.collate(batch.sample_ids[: batch.num_real].numpy()), batch.batch_size)
    equal = [
        torch.equal(batch.sample_ids, expected.sample_ids),
        torch.equal(batch.num_candidates, expected.num_candidates),
        batch.loss_tokens == expected.loss_tokens,
    ]
    for received, collated in ((batch.features, expected.features), (batch.labels, expected.labels)):
        if received is None or collated is None:
            equal.append(received is collated)
        else:
            equal.append(torch.equal(received.values(), collated.values()))
            equal.append(torch.equal(received.lengths(), collated.lengths()))
    return all(equal)
