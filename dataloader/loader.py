"""`build_loader`: datasets -> this rank's batches, in an order that can be resumed at any position."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics
from evenrank.dataloader.balance.ranks.consistency import PlanCheck
from evenrank.dataloader.balance.ranks.handshake import create_on_all_ranks
from evenrank.dataloader.balance.ranks.process_group import Group, Members
from evenrank.dataloader.batches.batch import Batch, JaggedBatch
from evenrank.dataloader.batches.torch_compat import outside_inference_mode
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.dataloader.config import ReadConfig
from evenrank.dataloader.rank_loader import RankLoader, Transform
from evenrank.dataloader.sampling.balanced_steps import make_step_sampler
from evenrank.dataloader.sampling.epoch_positions import EpochPositions
from evenrank.dataloader.sampling.steps import (
    Mixture,
    StepShape,
    StoredSamples,
    find_samples,
    make_order,
    remapped_stores,
)
from evenrank.dataloader.state.resume_point import Position
from evenrank.dataloader.state.vocabulary import shared_ids
from evenrank.dataloader.workers import Workers
from evenrank.datasets.store import SequenceStore, open_store

_log = logging.getLogger("evenrank")


def build_loader(
    data: Path | str | Mixture | SequenceStore,
    config: ReadConfig[Batch],
    *,
    rank: int,
    world_size: int,
    transform: Transform[Batch] | None = None,
    balance: BalanceConfig | None = None,
    group: Group | None = None,
) -> "Loader[Batch]":
    """Open a dataset and return the loader of one rank.

    With `balance`, and where there is a process group, this is collective: every rank must call it.

    Args:
        data: the folder that `evenrank preprocess` wrote, a Mixture of such folders, or what `open_store` returned,
            whatever `config.split` is.
        config: LoaderConfig or SemanticIdConfig, which decides the type of the batches; the same on all ranks.
        rank: data-parallel rank of this process, 0..world_size-1.
        world_size: number of data-parallel ranks.
        transform: called with each padded batch and a random generator, by a worker thread if there are any. Returns
            the batch to yield, which may have other keys and fields, the same ones in every batch. The generator is
            seeded with the loader's seed, the epoch and the batch's position.
        balance: yield batches that are balanced over the ranks, as a Balancer would, but without an exchange: every
            rank reads the samples that it trains on, so all must be able to read all.
        group: with `balance`, the data-parallel ranks, which compare their loaders when these are created. None: the
            default process group or, without one, nothing is compared.

    Raises:
        ConfigError: the rank is out of range, or the settings do not fit the dataset or each other.
        DataError: the dataset, or the file of codes, is missing or malformed.
        RankError: with `balance`, another rank failed, or has other data or settings.
    """

    def make(members: Members | None = None) -> Loader[Batch]:
        opened, mixture = ([*data.weights], data) if isinstance(data, Mixture) else ([data], None)
        return Loader(
            [store if isinstance(store, SequenceStore) else open_store(store, config.split) for store in opened],
            config,
            rank=rank,
            world_size=world_size,
            mixture=mixture,
            transform=transform,
            balance=balance,
            members=members,
        )

    if balance is None:
        return make()
    return create_on_all_ranks(make, group=group, world_size=world_size, timeout=balance.timeout)


class Loader(EpochPositions, RankLoader[Batch]):
    """The batches of one rank; each iteration is one epoch. It is a torchdata node too.

    Every rank yields the same number of batches; with `balance`, the end of an epoch waits for all ranks, up to
    `BalanceConfig.timeout`. If the samples of the last step do not fill it, its last ranks have fewer samples or none,
    see `num_real`; with `balance` any rank may. A loader can be pickled, except for `on_step` and the comparison of
    plans between ranks; unpickling maps the same files.

    Attributes:
        num_samples: samples of an epoch, over all ranks.
        left_out: per reason, the rows that are not samples: int64, ascending.
    """

    def __init__(
        self,
        stores: Sequence[SequenceStore],
        config: ReadConfig[Batch],
        *,
        rank: int,
        world_size: int,
        mixture: Mixture | None = None,
        transform: Transform[Batch] | None = None,
        balance: BalanceConfig | None = None,
        members: Members | None = None,
    ) -> None:
        EpochPositions.__init__(self)
        RankLoader.__init__(self, config, rank=rank, world_size=world_size, transform=transform)
        if balance is not None and transform is not None:
            raise ConfigError(
                "balance plans from the lengths in the store, which a transform may change; leave out transform and "
                "change the batches that the loader yields, or pass them to a Balancer instead of balance"
            )
        self._mixture = mixture
        self._workers = Workers(config.num_workers, ahead=config.num_workers, persistent=config.persistent_workers)
        self._ids = shared_ids({str(store.folder): store.manifest for store in stores})
        self._samples, self.left_out = find_samples(stores, self._collate)
        self._stores = remapped_stores(stores, self._collate, config.key_maps)
        self._order = make_order(config.order, self._stores, self._samples, mixture)
        self._key_maps = config.key_maps
        self._plan_check = None if balance is None else PlanCheck(members, balance.timeout)
        # Groups of batches are planned together, and an error in one of them should come at the same step on all ranks.
        self._balance_invariants = (
            {} if balance is None else balance.rank_invariants(exchanges=False) | {"prefetch": config.prefetch}
        )
        in_flight = (config.num_workers + 1) * config.prefetch
        shape = StepShape(rank, world_size, config.batch_size, drop_last=config.drop_last, in_flight=in_flight)
        self._stored = StoredSamples(self._stores, self._collate, config.batch_size)
        self._sampler = make_step_sampler(self._stored, shape, balance)
        self._on_step = None if balance is None else balance.observer(rank, exchanges=False, data=self.rank_invariants)
        if rank == 0:
            for reason, rows in self.left_out.items():
                if len(rows):
                    _log.warning("%s of %s rows are left out: %s", len(rows), sum(map(len, self._stores)), reason)

    @property
    def num_dropped(self) -> int:
        """Number of rows that are not samples."""
        return sum(len(samples.left_out) for samples in self._samples)

    def collate(self, sample_ids: NDArray[np.int64]) -> Batch:
        """Return a batch, without padding, of the samples with these `sample_ids`, int64 [n]."""
        groups = group_by_store(self._stores, sample_ids)
        (batch,) = self._collate(groups, sample_ids, batch_size=len(sample_ids))
        return batch

    def __iter__(self) -> Iterator[Batch]:
        seed, iteration, is_measured = self._seed, self._begin_epoch(), self._on_step is not None
        epoch, schedule = iteration.point.epoch, iteration.schedule

        @outside_inference_mode()
        def make_batches(steps: range) -> list[tuple[Batch, StepMetrics | None]]:
            sampled = self._sampler.sample(iteration, steps, is_measured=is_measured)
            made = []
            for step, samples, batch in zip(steps, sampled, self._stored.batches(sampled), strict=True):
                batch.epoch, batch.step, batch.position = epoch, step, schedule.position_after(step)
                made.append((self._finish(batch, seed, schedule.first_position(step, self._rank)), samples.metrics))
            return made

        num_steps, prefetch = schedule.num_steps, self._config.prefetch
        plans = None if self._plan_check is None else self._plan_check.begin_epoch(epoch, num_steps)
        step_ranges = (range(num_steps)[first : first + prefetch] for first in range(0, num_steps, prefetch))
        for batch, metrics in chain.from_iterable(self._workers.map(make_batches, step_ranges)):
            if plans is not None and batch.plan_hash is not None:
                plans.add(batch.plan_hash)
            if self._on_step is not None and metrics is not None:
                self._on_step(metrics)
            self._after_last = Position(batch.epoch, batch.position)
            yield batch
        if self._plan_check is not None and plans is not None:
            self._plan_check.end_epoch(plans)

    def close(self) -> None:
        """Stop the threads that `persistent_workers` keeps; another iteration starts new ones."""
        self._workers.close()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in super().__getstate__().items() if name != "_order"}
        return state | {"_on_step": None, "_plan_check": None}  # often an open file; a connection

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        # Rebuilt rather than pickled, because an order may refer to a mapped column of the store.
        self._order = make_order(self._config.order, self._stores, self._samples, self._mixture)

    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the position after the batch yielded last, or after another one.

        The state is the same on all ranks, and can be loaded with any world size, batch size and number of workers.

        Args:
            after: the batch trained last, if something pulls batches ahead of training. It was yielded since a state of
                its epoch was loaded, if one was. None: the batch yielded last.

        Raises:
            RankError: with `balance`, ranks that have asked after as many steps have planned differently.
        """
        if self._plan_check is not None:
            self._plan_check.compare()
        return self._state(after)

    def get_state(self) -> dict[str, Any]:
        """Return `state_dict()` without comparing plans: some nodes of torchdata ask for it after every batch."""
        return self._state(None)

    def _own_invariants(self) -> dict[str, Any]:
        return {
            **self._balance_invariants,
            **self._sampler.rank_invariants(self._order, seed=self._config.seed),
            "datasets": [
                f"{store.manifest.dataset} {store.split} {store.manifest.content_hash[:12]}" for store in self._stores
            ],
            "num_samples": self.num_samples,
            "fingerprint": self._fingerprint,
        }

    @cached_property
    def _fingerprint(self) -> str:
        """A hash of everything that decides on the samples and their order."""
        digest = hashlib.sha256()
        for store, samples in zip(self._stores, self._samples, strict=True):
            digest.update(f"{store.manifest.content_hash} {store.split} {len(samples.left_out)} ".encode())
            digest.update(samples.left_out.astype("<i8").tobytes())
        digest.update(repr((self._collate.filters(), self._order.fingerprint())).encode())
        return digest.hexdigest()
