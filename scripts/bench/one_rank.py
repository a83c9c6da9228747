"""One rank of many that train a store, without a process group: benchmarks of planning with no exchange measure it."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch
from evenrank.dataloader.balance import BalanceConfig, HSTUCost
from evenrank.dataloader.balance.cost import count_tokens, scaled_costs
from evenrank.dataloader.batches.batch import name_keys
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.dataloader.random_batches import RandomData, draw_samples
from evenrank.dataloader.sampling.balanced_steps import make_step_sampler
from evenrank.dataloader.sampling.steps import StepSampler, StepShape
from evenrank.datasets import SequenceStore
from evenrank.datasets.distributions import Distribution, Lognormal
from evenrank.datasets.order import Samples, ShuffledOrder

LENGTHS = Lognormal(mean=512, std=512, low=1, high=4096)
COST = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=True)

Ints = NDArray[np.int64]


def make_store(num_rows: int, distribution: Distribution = LENGTHS) -> SequenceStore:
    """Return rows of drawn lengths, whose events are all the same element in memory."""
    store = draw_samples(RandomData(), np.random.default_rng(0), 1, min_length=1, split="train")
    lengths = distribution.sample(np.random.default_rng(0), num_rows)
    offsets: Ints = np.concatenate([[0], np.cumsum(lengths)])
    events = {name: np.broadcast_to(values[:1], offsets[-1:]) for name, values in store.events.items()}
    return replace(store, offsets=offsets, events=events, rows={"user_id": np.arange(num_rows)})


@dataclass(frozen=True, kw_only=True, slots=True)
class OneRank:
    """The rank in the middle of all."""

    store: SequenceStore
    """All samples."""
    world_size: int
    """Number of ranks."""
    config: LoaderConfig
    """The settings of its loader."""

    @property
    def rank(self) -> int:
        """Its number."""
        return self.world_size // 2

    @property
    def samples_per_step(self) -> int:
        """Samples of a full step of all ranks."""
        return self.world_size * self.config.batch_size

    @property
    def order(self) -> ShuffledOrder:
        """The order of its loader."""
        return ShuffledOrder(samples=Samples(num_rows=len(self.store), left_out=np.empty(0, dtype=np.int64)))

    def step_sampler(self, balance: BalanceConfig | None) -> StepSampler[SequenceBatch]:
        """Return its step sampler."""
        shape = StepShape(
            rank=self.rank, world_size=self.world_size, batch_size=self.config.batch_size, drop_last=False
        )
        return make_step_sampler([self.store], self.config.make_collate(), shape, balance)

    def loader(self, balance: BalanceConfig | None, *, num_workers: int, prefetch: int) -> Loader[SequenceBatch]:
        """Return its loader."""
        config = replace(self.config, num_workers=num_workers, prefetch=prefetch, persistent_workers=True)
        return Loader(
            [self.store],
            config,
            rank=self.rank,
            world_size=self.world_size,
            balance=balance,
        )

    def groups(self, num_steps: int) -> list[range]:
        """Return the steps that its loader sampled together."""
        prefetch = self.config.prefetch
        return [range(first, min(first + prefetch, num_steps)) for first in range(0, num_steps, prefetch)]

    def costs_and_tokens(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the costs, scaled as those of a step, and the tokens of these rows: int64 [n] both."""
        lengths = self.config.make_collate().lengths(group_by_store([self.store], rows), len(rows))
        by_key = dict(zip(name_keys(tuple(lengths.of_keys)), lengths.of_keys.values(), strict=True))
        costs = scaled_costs(
            COST, by_key, lengths.num_candidates, num_real=len(rows), samples_per_step=self.samples_per_step
        )
        return costs, count_tokens(COST, by_key, len(rows))
