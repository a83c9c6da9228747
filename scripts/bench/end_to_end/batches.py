"""The batches of a run: drawn before the clock starts, balanced while training or before, or perfectly even."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from end_to_end.even import even_lengths
from end_to_end.experiments import Workload
from evenrank.dataloader import LoaderConfig, SequenceBatch
from evenrank.dataloader.balance import Cost
from evenrank.dataloader.random_batches import RandomBatches, RandomData
from evenrank.datasets.distributions import Distribution, Uniform, Zipf, parse_distribution
from evenrank.datasets.schema import ACTION, ITEM_ID, USER_ID
from trainer.world import World

Ints = NDArray[np.int64]


def draw_data(workload: Workload, lengths: Distribution, num_tasks: int) -> RandomData:
    """Return the distributions of the samples."""
    return RandomData(
        lengths=lengths,
        items=Zipf(exponent=workload.item_exponent, low=0, high=workload.item_rows - 1, shift=1),
        actions=Uniform(low=0, high=2**num_tasks - 1),
        users=Uniform(low=0, high=workload.user_rows - 1),
    )


class Source:
    """This rank's loaders, all over the same N batches.

    Args:
        workload: of the table.
        lengths: distribution of the events of a sample, as `parse_distribution` takes it.
        config: of the batches.
        world: the ranks of the run.
        cost: of a sample.

    """

    def __init__(self, workload: Workload, lengths: str, config: LoaderConfig, world: World, cost: Cost) -> None:
        self._workload = workload
        self._config = config
        self._world = world
        self._cost = cost
        self._lengths = parse_distribution(lengths)
        self._once = self._loader(self._lengths, workload.num_batches)

    def endless(self) -> RandomBatches[SequenceBatch]:
        """Return a loader that cycles through the batches for as long as anyone may train."""
        return self._loader(self._lengths, sys.maxsize // (self._config.batch_size * self._world.data_size))

    def once(self) -> RandomBatches[SequenceBatch]:
        """Return a loader of each batch once."""
        return self._once

    def even(self) -> RandomBatches[SequenceBatch]:
        """Return a loader of N perfectly even batches. Collective: every rank must call this."""
        mine = np.stack([feature_lengths(batch)[ITEM_ID] for batch in self._once])
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        # Ranks that divide heads have the same batches; those of their first one stand for all.
        all_lengths = np.stack(gathered[:: dist.get_world_size() // self._world.data_size])
        events = [
            even_lengths(
                all_lengths[:, index].reshape(-1),
                self._world.data_size,
                self._cost_of_events,
                max_length=self._config.max_history_length,
            )
            for index in range(self._workload.num_batches)
        ]
        return self._loader(_InTurn(np.concatenate(events)), self._workload.num_batches)

    def _cost_of_events(self, events: Ints) -> Ints:
        one = np.ones_like(events)
        return self._cost({USER_ID: one, ITEM_ID: events, ACTION: events}, np.zeros_like(events))

    def _loader(self, lengths: Distribution, num_batches: int) -> RandomBatches[SequenceBatch]:
        return RandomBatches(
            self._config,
            draw_data(self._workload, lengths, self._config.num_tasks or 1),
            num_batches=num_batches,
            num_distinct=self._workload.num_batches,
            rank=self._world.data_rank,
            world_size=self._world.data_size,
        )


class _InTurn:
    """Not drawn: lengths that are given, one after the other."""

    def __init__(self, lengths: Ints) -> None:
        self._left = lengths

    def sample(self, rng: np.random.Generator, size: int) -> Ints:
        """Return the next `size` lengths: int64 [size]."""
        taken, self._left = self._left[:size], self._left[size:]
        return taken


def feature_lengths(batch: SequenceBatch) -> dict[str, Ints]:
    """Return the lengths of each feature of a batch on any device: int64 [rows] by key."""
    lengths = batch.features.lengths().view(len(batch.features.keys()), -1).to("cpu", torch.int64).numpy()
    return dict(zip(batch.features.keys(), lengths, strict=True))


def tokens_of(batch: SequenceBatch) -> Ints:
    """Return the tokens of each row of a batch: int64 [rows]."""
    total: Ints = np.sum(list(feature_lengths(batch).values()), axis=0)
    return total


def load_of(batch: SequenceBatch, cost: Callable[..., Ints]) -> int:
    """Return the cost of a batch's samples."""
    lengths = feature_lengths(batch)
    return int(cost(lengths, np.zeros_like(lengths[ITEM_ID])).sum())
