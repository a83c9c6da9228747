"""The batches of a run: drawn before the clock starts, balanced while training or before, or perfectly even."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from end_to_end.experiments import Workload
from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, Cost
from evenrank.dataloader.random_batches import RandomBatches, RandomData, draw_samples
from evenrank.dataloader.rank_loader import make_rng
from evenrank.datasets import SequenceStore
from evenrank.datasets.distributions import Uniform, Zipf, parse_distribution
from evenrank.datasets.order import Order, RowOrder, Samples
from evenrank.datasets.schema import ACTION, ITEM_ID, USER_ID
from local_ranks import gather
from trainer import World

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_SAMPLES_OF_EPOCH = sys.maxsize // 2  # which nobody reaches
_HALVINGS = 32  # of an interval: what is left is far less than the half event by which lengths are rounded
_MAX_POWER = 16.0


class Source:
    """This rank's loaders, all over the same N batches."""

    def __init__(self, workload: Workload, config: LoaderConfig, world: World) -> None:
        self._workload, self._config, self._world = workload, config, world
        self._data = RandomData(
            lengths=parse_distribution(workload.lengths),
            items=Zipf(exponent=workload.exponent, low=0, high=workload.item_rows - 1, shift=1),
            actions=Uniform(low=0, high=2 ** (config.num_tasks or 1) - 1),
            users=Zipf(exponent=workload.exponent, low=0, high=workload.user_rows - 1, shift=1),
        )
        self._once = self._loader(self._data, workload.num_batches)

    def once(self) -> RandomBatches[SequenceBatch]:
        """Return a loader of each batch once."""
        return self._once

    def endless(self) -> RandomBatches[SequenceBatch]:
        """Return a loader that cycles through the batches for as long as anyone may train."""
        return self._loader(self._data, _SAMPLES_OF_EPOCH // (self._config.batch_size * self._world.size))

    def reading(self, balance: BalanceConfig, *, num_workers: int, endless: bool) -> Loader[SequenceBatch]:
        """Return a loader that reads the same batches from a dataset in memory, and balances them. Collective.

        Args:
            balance: with no exchange.
            num_workers: threads that read ahead.
            endless: cycle through the batches in one epoch. Epochs of as few steps as there are batches would often
                begin while the clock runs, and their first batches are not read ahead.
        """
        config, world = self._config, self._world
        parts = [  # as RandomBatches draws them: in the order of the steps, and of the ranks within a step
            draw_samples(
                self._data,
                make_rng(config.seed, 0, place),
                config.batch_size,
                min_length=config.max_num_candidates,
                split=config.split,
            )
            for place in range(self._workload.num_batches * world.size)
        ]
        dataset = dataclasses.replace(
            parts[0],
            offsets=np.concatenate([[0], np.cumsum(np.concatenate([part.lengths for part in parts]))]),
            columns={name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
        )
        order = _Cycle() if endless else "rows"
        config = dataclasses.replace(config, order=order, num_workers=num_workers, device=world.device)
        ranks: Any = {"rank": world.rank, "world_size": world.size}
        return build_loader(dataset, config, **ranks, balance=balance, group=None)

    def even(self, cost: Cost) -> RandomBatches[SequenceBatch]:
        """Return a loader of N perfectly even batches by a cost. Collective: every rank must call this."""

        def cost_of_events(events: Ints) -> Ints:
            one = np.ones_like(events)
            return cost({USER_ID: one, ITEM_ID: events, ACTION: events}, np.zeros_like(events))

        gathered = gather(np.stack([feature_lengths(batch)[ITEM_ID] for batch in self._once]))
        # Ranks that divide heads have the same batches; those of their first one stand for all.
        all_lengths = np.stack(gathered[:: len(gathered) // self._world.size], axis=1)
        options = {"max_length": self._config.max_history_length}
        events = [
            even_lengths(lengths.reshape(-1), self._world.size, cost_of_events, **options) for lengths in all_lengths
        ]
        data = dataclasses.replace(self._data, lengths=_InTurn(np.concatenate(events)))
        return self._loader(data, self._workload.num_batches)

    def _loader(self, data: RandomData, num_batches: int) -> RandomBatches[SequenceBatch]:
        options: Any = {"rank": self._world.rank, "world_size": self._world.size}
        options |= {"num_batches": num_batches, "num_distinct": self._workload.num_batches}
        return RandomBatches(self._config, data, **options)


class _CycledRows(RowOrder):
    """All rows, again and again in one epoch."""

    def __init__(self, *, samples: Samples) -> None:
        super().__init__(samples=samples)
        self._num_rows, self.num_samples = len(samples), _SAMPLES_OF_EPOCH

    def rows(self, positions: Ints, *, seed: int, epoch: int) -> Ints:
        """Return the rows at positions."""
        return super().rows(positions % self._num_rows, seed=seed, epoch=epoch)


class _Cycle(Order):
    def arrange(self, stores: Sequence[SequenceStore], samples: Sequence[Samples]) -> RowOrder:
        """Return the endless order of a dataset."""
        return _CycledRows(samples=samples[0])


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


def load_of(batch: SequenceBatch, cost: Callable[..., Ints]) -> int:
    """Return the cost of a batch's samples."""
    lengths = feature_lengths(batch)
    return int(cost(lengths, np.zeros_like(lengths[ITEM_ID])).sum())


def even_lengths(lengths: Ints, num_ranks: int, cost: Callable[[Ints], Ints], *, max_length: int) -> Ints:
    """Return lengths that all ranks can have, with as many events and the same cost as a rank has on average.

    The lengths of the step are sorted, and every `num_ranks`-th of them is taken. Then these q become s q^g, where g,
    the skew, and s, the scale, are such that both sums agree. Rounding leaves a difference of about half an event per
    sample.

    Args:
        lengths: int64 [ranks x B]: events of all samples of a step, all ranks together.
        num_ranks: data-parallel ranks.
        cost: cost of samples with these numbers of events, of the same shape; increasing.
        max_length: no sample gets longer.

    Returns:
        int64 [B], longest first.
    """
    quantiles = np.sort(lengths)[::-1][num_ranks // 2 :: num_ranks].astype(np.float64)
    mean_events = lengths.sum() / num_ranks
    mean_cost = float(cost(lengths).sum(dtype=np.float64)) / num_ranks

    def shaped(power: float, scale: float) -> Floats:
        # Relative to the longest, so that large powers do not overflow.
        values: Floats = np.clip(scale * (quantiles / quantiles[0]) ** power, 1, max_length)
        return values

    def cost_of(values: Floats) -> float:
        below = np.floor(values).astype(np.int64)
        low, high = cost(below).astype(np.float64), cost(below + 1).astype(np.float64)
        return float((low + (values - below) * (high - low)).sum())  # between whole numbers of events

    def scale_for(power: float, total: Callable[[Floats], float], wanted: float) -> float:
        # By its logarithm, because the scale at which all samples have the maximal length may be 4096^16.
        largest = np.log(max_length) - power * np.log(quantiles[-1] / quantiles[0])
        return float(np.exp(_root(lambda log: total(shaped(power, np.exp(log))) - wanted, 0.0, largest)))

    def excess(power: float) -> float:  # with as many events, more skew costs more
        return cost_of(shaped(power, scale_for(power, np.sum, mean_events))) - mean_cost

    power = _root(excess, 0.0, _MAX_POWER)
    # Where no skew fits, such as for a single sample, the cost counts.
    even = shaped(power, scale_for(power, cost_of, mean_cost))
    return np.rint(even).astype(np.int64)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where an increasing function is 0, or the end of the interval that is nearest to that."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return (low + high) / 2
