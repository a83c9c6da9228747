"""`build_loader`: datasets -> this rank's batches, in an order that can be resumed at any position.

The epochs of a `Loader` have the same samples, those of a `TimeWindowLoader` other ones each.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.settings import check_types
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.ranks.agree import create_on_all_ranks
from evenrank.dataloader.balance.ranks.process_group import Group, Members
from evenrank.dataloader.batches.batch import Batch
from evenrank.dataloader.batches.tensors import outside_inference_mode
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.dataloader.collate.sequences import Collate
from evenrank.dataloader.config import LoaderConfig, ReadConfig
from evenrank.dataloader.rank_loader import RankLoader, Transform
from evenrank.dataloader.sampling.balanced_steps import Memo, make_step_sampler
from evenrank.dataloader.sampling.epoch_positions import LAST_MS, EpochPositions, EpochSamples
from evenrank.dataloader.sampling.steps import (
    Mixture,
    StepSamples,
    StepShape,
    StoredSamples,
    find_samples,
    make_order,
    remapped_stores,
)
from evenrank.dataloader.state.resume_point import Position
from evenrank.dataloader.workers import Workers
from evenrank.datasets.order import SampleOrder, Samples
from evenrank.datasets.schema import IdSummary, Manifest
from evenrank.datasets.slices import Requests, TimeWindows
from evenrank.datasets.store import SequenceStore, open_store

_log = logging.getLogger("evenrank")
_KEPT_WINDOWS = 4  # the one that is trained, the one before, of which a state can be asked for, and the next


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
    arguments = locals()

    def make(members: Members | None = None) -> Loader[Batch]:
        check_types(build_loader, arguments)
        opened, mixture = ([*data.weights], data) if isinstance(data, Mixture) else ([data], None)
        kind = TimeWindowLoader if isinstance(config.order, TimeWindows) else Loader
        if isinstance(config.order, Requests):
            if not isinstance(data, Path | str):
                raise ConfigError(f"requests are of all splits of a dataset, not of {data!r}; pass its folder or URL")
            stores = config.order.of(data, config.max_num_candidates if isinstance(config, LoaderConfig) else 1)
        else:
            stores = [each if isinstance(each, SequenceStore) else open_store(each, config.split) for each in opened]
        return kind(
            stores,
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
    return create_on_all_ranks(make, group=group, world_size=world_size, balance=balance)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenedSamples(EpochSamples, Generic[Batch]):
    """The samples of an epoch, and how a rank reads them."""

    left_out: dict[str, NDArray[np.int64]]
    """Per reason, the rows of all stores that are not samples, ascending."""
    stored: StoredSamples[Batch]


class Loader(EpochPositions, RankLoader[Batch]):
    """The batches of one rank; each iteration is one epoch. It is a torchdata node too.

    Every rank yields the same number of batches; with `balance`, the end of an epoch waits for all ranks, up to
    `BalanceConfig.timeout`. If the samples of the last step do not fill it, its last ranks have fewer samples or none,
    see `num_real`; with `balance` any rank may. A loader can be pickled, except for `on_step` and the comparison of
    plans between ranks; unpickling maps the same files.
    """

    _can_skip = True

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
        RankLoader.__init__(self, config, rank=rank, world_size=world_size, transform=transform, sources=stores)
        if balance is not None and transform is not None:
            raise ConfigError(
                "balance plans from the lengths in the store, which a transform may change; leave out transform and "
                "change the batches that the loader yields, or pass them to a Balancer instead of balance"
            )
        self._mixture = mixture
        self._balance = None if balance is None else replace(balance, on_step=None)  # which cannot be pickled
        self._workers = Workers(config.num_workers, ahead=config.num_workers, persistent=config.persistent_workers)
        self._stores = stores
        self._ids = _shared_ids({str(store.folder): store.manifest for store in stores})
        self._key_maps = config.key_maps
        self._begun = {}
        # Groups of batches are planned together, and an error in one of them should come at the same step on all ranks.
        self._balance_invariants = (
            {} if balance is None else balance.rank_invariants(exchanges=False) | {"prefetch": config.prefetch}
        )
        self._whole = None if isinstance(config.order, TimeWindows) else self._open(stores)
        self._compare_plans(balance, members, rank)

    def _open(self, stores: Sequence[SequenceStore], window: tuple[int, int] | None = None) -> OpenedSamples[Batch]:
        config = self._config
        samples, left_out = find_samples(stores, self._collate)
        if self._rank == 0:
            for reason, rows in left_out.items():
                if len(rows):
                    _log.warning("%s of %s rows are left out: %s", len(rows), sum(map(len, stores)), reason)
        order = make_order(config.order, stores, samples, self._mixture)
        stores = remapped_stores(stores, self._collate, config.key_maps)
        in_flight = (config.num_workers + 1) * config.prefetch
        shape = StepShape(
            self._rank, self._world_size, config.batch_size, drop_last=config.drop_last, in_flight=in_flight
        )
        stored = StoredSamples(stores, self._collate, config.batch_size)
        return OpenedSamples(
            order=order,
            sampler=make_step_sampler(stored, shape, self._balance),
            fingerprint=_fingerprint(stores, samples, self._collate, order),
            window=window,
            left_out=left_out,
            stored=stored,
        )

    def _samples_of(self, epoch: int) -> OpenedSamples[Batch]:
        assert self._whole is not None
        return self._whole

    @property
    def stores(self) -> Sequence[SequenceStore]:
        """The stores of the next iteration's samples, whose rows or slices `sample_ids` number one after the other."""
        return self._samples_of(self.epoch).stored.stores

    @property
    def left_out(self) -> dict[str, NDArray[np.int64]]:
        """Per reason, the rows that are not samples: int64, ascending."""
        return self._samples_of(self.epoch).left_out

    @property
    def num_dropped(self) -> int:
        """Number of rows that are not samples."""
        return len(np.unique(np.hstack([[], *self.left_out.values()])))

    def skip_empty(self) -> None:
        """Make the next iteration that of an epoch with samples; all epochs have the same, except for windows."""

    def collate(self, sample_ids: NDArray[np.int64], *, epoch: int = 0) -> Batch:
        """Return a batch of an epoch, without padding, of the samples with these `sample_ids`, int64 [n]."""
        groups = group_by_store(self._samples_of(epoch).stored.stores, sample_ids)
        (batch,) = self._collate(groups, sample_ids, batch_size=len(sample_ids), seed=self._current.seed, epoch=epoch)
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return self._hand_out(self._make_steps())

    def _make_steps(self) -> Iterator[tuple[Batch, Position, StepSamples]]:
        seed, iteration, is_measured = self._current.seed, self._begin_epoch(), self._observe is not None
        epoch, schedule = iteration.point.epoch, iteration.schedule
        opened = self._samples_of(epoch)

        @outside_inference_mode()
        def make_batches(steps: range) -> list[tuple[Batch, StepSamples]]:
            sampled = opened.sampler.sample(iteration, steps, is_measured=is_measured)
            made = []
            batches = opened.stored.batches(sampled, seed=seed, epoch=epoch)
            for step, samples, batch in zip(steps, sampled, batches, strict=True):
                batch.epoch, batch.step, batch.position = epoch, step, schedule.position_after(step)
                made.append((self._finish(batch, seed, schedule.first_position(step, self._rank)), samples))
            return made

        num_steps, prefetch = schedule.num_steps, self._config.prefetch
        step_ranges = (range(num_steps)[first : first + prefetch] for first in range(0, num_steps, prefetch))
        for batch, samples in chain.from_iterable(self._workers.map(make_batches, step_ranges)):
            yield batch, Position(batch.epoch, batch.position), samples

    def close(self) -> None:
        """Stop the threads that `persistent_workers` keeps; another iteration starts new ones."""
        self._workers.close()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_observe": None, "_plan_check": None}  # often an open file; a connection

    def get_state(self) -> dict[str, Any]:
        """Return `state_dict()` without comparing plans: some nodes of torchdata ask for it after every batch."""
        return self._state(None)

    def _own_invariants(self) -> dict[str, Any]:
        samples = self._samples_of(0)
        return {
            **self._balance_invariants,
            **samples.sampler.rank_invariants(samples.order, seed=self._config.seed),
            "datasets": [
                f"{store.manifest.dataset} {store.split} {store.manifest.content_hash[:12]}" for store in self._stores
            ],
            "num_samples": samples.order.num_samples,
            "fingerprint": samples.fingerprint,
        }


class TimeWindowLoader(Loader[Batch]):
    """The batches of one rank; each iteration is one window of time, from the first event's on.

    Samples end within the window: each of its events is once among the `max_num_candidates` last events of a sample,
    its candidates, and everything before them, in earlier windows too, is history. `epoch` is the index of the next
    iteration's window, and `sample_ids` number the samples of a window by the time of their first candidate. Windows
    after the last one have no batches.
    """

    def __init__(self, stores: Sequence[SequenceStore], config: ReadConfig[Batch], **arguments: Any) -> None:
        assert isinstance(config.order, TimeWindows)
        if arguments.get("mixture") is not None:
            raise ConfigError("a mixture of datasets has no windows of time; pass one dataset, or another order")
        self._windows = config.order.of(stores[0])
        self._opened_windows: Memo[OpenedSamples[Batch]] = Memo(_KEPT_WINDOWS)
        super().__init__(stores, config, **arguments)

    def _samples_of(self, epoch: int) -> OpenedSamples[Batch]:
        windows, max_targets = self._windows, self._collate.max_num_candidates
        times = min(windows.begin(epoch), LAST_MS), min(windows.begin(epoch + 1), LAST_MS)
        return self._opened_windows.get(epoch, lambda: self._open([windows.cut(epoch, max_targets)], times))

    @property
    def num_windows(self) -> int:
        """Windows from the first event, or the start, to the last event."""
        return self._windows.count

    def window(self, index: int) -> tuple[datetime, datetime]:
        """Return the begin of a window and its end, which is the next one's begin, in UTC."""
        return self._windows.times(index)

    def begin_at(self, index: int) -> None:
        """Make the next iteration that of another window, such as the one after the window that was trained."""
        self._current.start_epoch(index)

    def begin_after(self, state: Mapping[str, Any]) -> None:
        """Begin where the window of a state ends or, if nothing of it is trained, where it begins.

        The state may be of another dataset, and of windows of another length.

        Raises:
            StateError: the state is damaged, of no windows, of a dataset whose vocabulary this one does not extend, or
                of `key_maps` that give keys other rows; or no window of this loader begins then.
        """
        _, time_ms = self._next_epoch(state)
        self._current.start_epoch(self._windows.index_of(time_ms))

    def skip_empty(self) -> None:
        """Make the next iteration that of the first window with samples from the next one on, if there is one."""
        while self.epoch < self.num_windows and not self.num_samples:
            self.begin_at(self._windows.next_with_events(self.epoch + 1))

    def _own_invariants(self) -> dict[str, Any]:
        return {**super()._own_invariants(), "windows": (self._windows.start_ms, self._windows.count)}


def _shared_ids(manifests: Mapping[str, Manifest]) -> Mapping[str, IdSummary]:
    """Return the ids of datasets that share embedding tables: of each column, those that extend all others.

    Raises:
        DataError: there are none, so that equal ids mean different values.
    """
    shared: dict[str, IdSummary] = {}
    for name in dict.fromkeys(name for manifest in manifests.values() for name in manifest.ids):
        given = [manifest.ids[name] for manifest in manifests.values() if name in manifest.ids]
        widest = [ids for ids in given if all(ids.extends(other.version) for other in given)]
        if not widest:
            raise DataError(
                f"{', '.join(manifests)} number their {name} differently; preprocess one with --vocabulary of the other"
            )
        shared[name] = widest[0]
    return shared


def _fingerprint(
    stores: Sequence[SequenceStore], all_samples: Sequence[Samples], collate: Collate[Any], order: SampleOrder
) -> str:
    digest = hashlib.sha256()
    for store, samples in zip(stores, all_samples, strict=True):
        digest.update(f"{store.manifest.content_hash} {store.split} {len(samples.left_out)} ".encode())
        digest.update(samples.left_out.astype("<i8").tobytes())
        for values in () if store.slices is None else store.slices:
            digest.update(values.astype("<i8").tobytes())
    digest.update(repr((collate.filters(), order.fingerprint())).encode())
    return digest.hexdigest()
