"""The sources of batches that scripts/bench/host.py compares: prepared ones, loaders, and Balancers."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.dataloader import JaggedBatch, JaggedCollate, LoaderConfig, LossKey, build_loader, jagged
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, HSTUCost
from evenrank.dataloader.random_batches import RandomBatches, RandomData, draw_samples
from evenrank.datasets import SequenceStore
from evenrank.datasets.distributions import Lognormal, Uniform
from local_ranks import TIMEOUT

BATCH_SIZE, MAX_LENGTH = 32, 4096
COST = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=False)
DATA = RandomData(
    lengths=Lognormal(mean=512, std=512, low=1, high=MAX_LENGTH),
    items=Uniform(low=0, high=999_999),
    contextual={"user_age": Uniform(high=99)},
)
_DISTINCT = 64  # batches made before
_STORED_SAMPLES = 1 << 14  # of an epoch of all ranks
_WORKERS = 2  # processes of the StatefulDataLoader

Batches = Iterator[JaggedBatch]
PREPARED = "prepared"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """A rank, and what its batches are made of."""

    device: torch.device
    rank: int
    world_size: int
    num_batches: int
    """Batches that a source has to have."""
    close: contextlib.ExitStack
    """Closes the sources."""

    @property
    def config(self) -> LoaderConfig:
        """The settings of loaders."""
        return LoaderConfig(
            batch_size=BATCH_SIZE,
            max_history_length=MAX_LENGTH,
            num_tasks=1,
            user_id=True,
            num_workers=1,
            persistent_workers=True,
        )

    def made_before(self) -> RandomBatches[Any]:
        """Return batches on the host that are made now."""
        return RandomBatches(
            self.config,
            DATA,
            num_batches=self.num_batches,
            num_distinct=_DISTINCT,
            rank=self.rank,
            world_size=self.world_size,
        )

    def store(self) -> SequenceStore:
        """Return samples, the same on all ranks."""
        return draw_samples(DATA, np.random.default_rng(0), _STORED_SAMPLES, min_length=1, split="train")


def prepared(rank: Rank) -> Batches:
    """Return batches that are on the device."""
    made = rank.made_before()
    return itertools.cycle([made.batch(step).to(rank.device) for step in range(min(_DISTINCT, rank.num_batches))])


def loaded(rank: Rank, balance: BalanceConfig | None) -> Batches:
    """Return the batches of `build_loader`, epoch after epoch."""
    config = dataclasses.replace(rank.config, device=rank.device)
    loader = build_loader(rank.store(), config, rank=rank.rank, world_size=rank.world_size, balance=balance)
    while True:
        yield from loader


def balanced(rank: Rank, batches: Iterable[JaggedBatch], strategy: str) -> Batches:
    """Return the batches of a Balancer."""
    config = BalanceConfig(cost=COST, strategy=strategy, timeout=TIMEOUT)
    return iter(rank.close.enter_context(Balancer(batches, config, device=rank.device)))


def over_made_before(rank: Rank, strategy: str) -> Batches:
    """Return the batches of a Balancer over batches that are made now."""
    return balanced(rank, rank.made_before(), strategy)


class Users(Dataset[Mapping[str, NDArray[np.integer]]]):
    """One sample per user, as anyone's dataset has it."""

    def __init__(self, store: SequenceStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, row: int) -> Mapping[str, NDArray[np.integer]]:
        events = slice(self._store.offsets[row], self._store.offsets[row + 1])
        action = self._store.columns["action"][events]
        of_user = {name: self._store.columns[name][row : row + 1] for name in ("user_id", "user_age")}
        return {**of_user, "item_id": self._store.columns["item_id"][events], "action": action, "label": action}


def stateful_loader(rank: Rank) -> StatefulDataLoader[Any]:
    """Return torchdata's loader over samples that it draws at random, in one epoch."""
    keys = ("user_id", "user_age", "item_id", "action")
    collate = JaggedCollate(
        {**{key: jagged() for key in keys}, "label": jagged(field="labels")}, loss_key=LossKey("labels", "label")
    )
    users = Users(rank.store())
    generator = torch.Generator().manual_seed(rank.rank)
    sampler = RandomSampler(users, replacement=True, num_samples=rank.num_batches * BATCH_SIZE, generator=generator)
    return StatefulDataLoader(users, BATCH_SIZE, sampler=sampler, collate_fn=collate, num_workers=_WORKERS)


SOURCES: dict[str, Callable[[Rank], Batches]] = {
    PREPARED: prepared,
    "prepared again": prepared,
    "loader": lambda rank: loaded(rank, None),
    "no exchange": lambda rank: loaded(rank, BalanceConfig(cost=COST, timeout=TIMEOUT)),
    **{name: partial(over_made_before, strategy=name) for name in STRATEGIES},
    "StatefulDataLoader": lambda rank: balanced(rank, stateful_loader(rank), "lpt-swap"),
}
