"""Walks one epoch through a Balancer and looks at every sample that comes out."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from evenrank.cli import console
from evenrank.core.errors import RankError
from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader, pad_batch
from evenrank.dataloader.balance import Balancer, Cost, StepMetrics
from evenrank.dataloader.loader import Loader


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """What an epoch looked like."""

    strategy: str
    metrics: list[StepMetrics]
    samples: int  # of all ranks: each was seen exactly once, and unaltered


def walk_epoch(
    path: Path,
    config: LoaderConfig,
    *,
    cost: Cost,
    strategy: str,
    show_progress: bool = False,
) -> Walk:
    """Iterate over an epoch on all ranks of the default process group, and check what comes out.

    Raises:
        RankError: a sample was lost, seen twice, or differs from the dataset; on every rank.

    """
    # Since 2.13 PyTorch warns of what torchrec calls whenever it builds a KeyedJaggedTensor.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = build_loader(path, config, rank=rank, world_size=world_size)
    metrics: list[StepMetrics] = []
    seen: list[int] = []
    altered: list[int] = []
    with (
        Balancer(loader, cost=cost, strategy=strategy, on_step=metrics.append) as balancer,
        console.steps(f"{strategy:>16}", len(loader), shown=show_progress) as on_step,
    ):
        for batch in balancer:
            seen += batch.sample_ids[: batch.num_real].tolist()
            if not _is_as_in_dataset(loader, batch):
                altered.append(batch.step)
            on_step()
    everybody: list[tuple[list[int], list[int]]] = [([], [])] * world_size
    dist.all_gather_object(everybody, (seen, altered))
    if any(steps for _, steps in everybody):
        raise RankError(f"samples were altered, in steps {[steps for _, steps in everybody]} of each rank")
    check_seen([ids for ids, _ in everybody], loader.num_samples)
    return Walk(strategy=strategy, metrics=metrics, samples=loader.num_samples)


def check_seen(seen: Sequence[Sequence[int]], num_samples: int) -> None:
    """Check that the ranks together have seen each sample exactly once.

    Raises:
        RankError: they have not; with the numbers.

    """
    times = len(list(itertools.chain.from_iterable(seen)))
    different = len(set(itertools.chain.from_iterable(seen)))
    if not times == different == num_samples:
        raise RankError(f"of {num_samples:,} samples {different:,} were seen, {times:,} times in all")


def _is_as_in_dataset(loader: Loader[SequenceBatch], batch: SequenceBatch) -> bool:
    """Compare a batch with one that is collated anew from the samples it claims to hold."""
    expected = pad_batch(loader.collate(batch.sample_ids[: batch.num_real].numpy()), batch.batch_size)
    equal = [
        torch.equal(batch.sample_ids, expected.sample_ids),
        torch.equal(batch.num_candidates, expected.num_candidates),
        batch.loss_tokens == expected.loss_tokens,
    ]
    for ours, theirs in ((batch.features, expected.features), (batch.labels, expected.labels)):
        if ours is not None and theirs is not None:
            equal += [torch.equal(ours.values(), theirs.values()), torch.equal(ours.lengths(), theirs.lengths())]
    return all(equal)
