"""`build_loader`: datasets -> this rank's batches, in an order that can be resumed at any position."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.rules import NonNegative
from evenrank.core.settings import check_types
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.ranks.agree import create_on_all_ranks
from evenrank.dataloader.balance.ranks.process_group import Group, Members
from evenrank.dataloader.balance.refit import CostSchedule
from evenrank.dataloader.batches.batch import Batch
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.dataloader.config import LoaderConfig
from evenrank.dataloader.rank_loader import StepLoader, Transform
from evenrank.dataloader.sampling.balanced_steps import Memo, make_step_sampler
from evenrank.dataloader.sampling.epoch_positions import EpochSamples
from evenrank.dataloader.sampling.steps import StepSamples, StepShape, StoredSamples, find_samples, remapped_stores
from evenrank.dataloader.state.resume_point import Position
from evenrank.datasets.mixture import Mixture
from evenrank.datasets.order import Order, SampleOrder, Samples, resolve_order
from evenrank.datasets.schema import IdSummary, Manifest
from evenrank.datasets.slices import WindowsOfStore
from evenrank.datasets.store import SequenceStore, open_store

_log = logging.getLogger("evenrank")
_KEPT_EPOCHS = 4  # the one that is trained, the one before, of which a state can be asked for, and the next


def build_loader(
    data: Path | str | Mixture | SequenceStore,
    config: LoaderConfig,
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
        config: the same on all ranks. For other batches than SequenceBatches, declare the loader's type:
            `loader: Loader[SemanticIdBatch] = build_loader(...)`.
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
        order = resolve_order(config.order, data)
        opened = order.open(
            data,
            lambda each: each if isinstance(each, SequenceStore) else open_store(each, config.split),
            config.max_num_candidates,
        )
        return Loader(
            *opened, config, rank=rank, world_size=world_size, transform=transform, balance=balance, members=members
        )

    if balance is None:
        return make()
    return create_on_all_ranks(make, group=group, world_size=world_size, balance=balance)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenedSamples(EpochSamples):
    """The samples of an epoch, and how a rank reads them."""

    left_out: dict[str, NDArray[np.int64]]
    """Per reason, the rows of all stores that are not samples, ascending."""
    stored: StoredSamples


class Loader(StepLoader[Batch]):
    """The batches of one rank; each iteration is one epoch. It is also a torchdata node.

    Every rank yields the same number of batches; with `balance`, the end of an epoch waits for all ranks, up to
    `BalanceConfig.timeout`. If the samples of the last step do not fill it, its last ranks have fewer samples or none,
    see `num_real`; with `balance` any rank may. A loader can be pickled, except for `on_step` and the comparison of
    plans between ranks; unpickling maps the same files.
    """

    _can_skip = True

    def __init__(
        self,
        order: Order,
        stores: Sequence[SequenceStore],
        config: LoaderConfig,
        *,
        rank: int,
        world_size: int,
        transform: Transform[Batch] | None = None,
        balance: BalanceConfig | None = None,
        members: Members | None = None,
    ) -> None:
        ids = _shared_ids({str(store.folder): store.manifest for store in stores})
        of_rank: Any = {"rank": rank, "world_size": world_size, "transform": transform}
        super().__init__(config, stores[0].manifest, **of_rank, sources=stores, ids=ids)
        if balance is not None and transform is not None:
            raise ConfigError(
                "balance plans from the lengths in the store, which a transform may change; leave out transform and "
                "change the batches that the loader yields, or pass them to a Balancer instead of balance"
            )
        self._balance, self._costs = balance, None
        if balance is not None:
            balance.check(exchanges=False)
            self._balance, self._costs = balance.for_plans, CostSchedule.of(balance, members, world_size)
        self._order = order
        self._stores = stores
        self._opened: Memo[OpenedSamples] = Memo(_KEPT_EPOCHS)
        # Groups of batches are planned together, and an error in one of them should come at the same step on all ranks.
        self._balance_invariants = (
            {} if balance is None else balance.rank_invariants(exchanges=False) | {"prefetch": config.prefetch}
        )
        self._samples_of(0)  # so that what is wrong with them comes now
        self._compare_plans(balance, members, rank)

    def _samples_of(self, epoch: int) -> OpenedSamples:
        return self._opened.get(self._order.place(epoch), lambda: self._open(epoch))

    def _place(self, position: Position) -> str:
        """Return what tells the epoch from others that have other samples."""
        return self._order.place(position.epoch)

    def _open(self, epoch: int) -> OpenedSamples:
        config, stores = self._config, self._order.of_epoch(epoch, self._stores)
        samples, left_out = find_samples(stores, self._collate)
        if self._rank == 0:
            for reason, rows in left_out.items():
                if len(rows):
                    _log.warning("%s of %s rows are left out: %s", len(rows), sum(map(len, stores)), reason)
        order = self._order.of(stores, samples)
        stores = remapped_stores(stores, self._collate, config.key_maps)
        in_flight = (config.num_workers + 1) * config.prefetch
        shape = StepShape(
            self._rank, self._world_size, config.batch_size, drop_last=config.drop_last, in_flight=in_flight
        )
        collate = self._collate
        if (sampler := collate.sampler) is not None and sampler.settings.counted == "before":
            collate = replace(collate, sampler=sampler.before(self._windows.begin(epoch)))
        stored = StoredSamples(stores, collate, config.batch_size)
        return OpenedSamples(
            order=order,
            sampler=make_step_sampler(stored, shape, self._balance, self._costs),
            fingerprint=_fingerprint(stores, samples, self._collate, order),
            left_out=left_out,
            stored=stored,
        )

    @property
    def stores(self) -> Sequence[SequenceStore]:
        """The stores of the next iteration's samples, whose rows or slices `sample_ids` number one after the other."""
        return self._samples_of(self.epoch).stored.stores

    @property
    def left_out(self) -> dict[str, int]:
        """Per reason, how many rows are not samples."""
        return {reason: len(rows) for reason, rows in self.left_out_rows.items()}

    @property
    def left_out_rows(self) -> dict[str, NDArray[np.int64]]:
        """Per reason, the rows that are not samples: int64, ascending."""
        return self._samples_of(self.epoch).left_out

    @property
    def num_dropped(self) -> int:
        """Number of rows that are not samples."""
        return len(np.unique(np.hstack([[], *self.left_out_rows.values()])))

    @property
    def num_windows(self) -> int:
        """Number of windows of time from the first event, or the start, to the last event."""
        return self._windows.count

    def window(self, index: int) -> tuple[datetime, datetime]:
        """Return the begin and the end of a window of time, in UTC; the next window begins at the end."""
        return self._windows.times(index)

    @property
    def _windows(self) -> WindowsOfStore:
        if not isinstance(self._order, WindowsOfStore):
            raise ConfigError(f"order {self._config.order!r} has no windows of time; pass TimeWindows(every='1d')")
        return self._order

    def begin_after(self, state: Mapping[str, Any]) -> None:
        """Begin with the epoch after that of a state, which may be of another dataset, such as yesterday's log.

        With windows of time, begin where the state's window ends or, if nothing of it is trained, where it begins; its
        windows may have another length.

        Raises:
            StateError: the state is damaged, of a dataset whose vocabulary this one does not extend, or of `key_maps`
                that give keys other rows; it is of no windows, or no window of this loader begins then.
        """
        left = self._left(state)
        epoch, has_begun = left["epoch"] + 1, left["position"] > 0
        self._current.start_epoch(self._order.following(epoch, left.get("place", ""), has_begun=has_begun))

    def skip_empty(self) -> None:
        """Make the next iteration that of the first epoch with samples from the next one on, if there is one."""
        while not self.num_samples and (later := self._order.after_empty(self.epoch, self._stores)) is not None:
            self.begin_at(later)

    def peek(self, n: NonNegative = 3, *, max_events: NonNegative = 10) -> list[dict[str, Any]]:
        """Return the first n samples of this rank in the next iteration, as `SequenceStore.head` does; nothing moves.

        `sample_id` is the one in the batch. Samples are rows or slices as stored, before the loader cuts, filters or
        maps them.
        """
        check_types(Loader.peek, {"n": n, "max_events": max_events})
        iteration = self._begin(self._current.next)
        opened = self._samples_of(iteration.point.epoch)
        ids = np.empty(0, dtype=np.int64)
        for step in range(iteration.schedule.num_steps):
            if len(ids) >= n:
                break
            (samples,) = opened.sampler.sample(iteration, range(step, step + 1), is_measured=False)
            ids = np.concatenate([ids, samples.sample_ids])
        # Of the stores without `key_maps`, whose values are no ids of a vocabulary.
        stores = [
            replace(store, columns=given.columns, column_maps=given.column_maps)
            for store, given in zip(opened.stored.stores, self._stores, strict=True)
        ]
        shown: dict[int, dict[str, Any]] = {}
        for store, rows, indices in group_by_store(stores, ids[:n]):
            shown |= dict(zip(indices.tolist(), store.raw_rows(rows, max_events), strict=True))
        return [{"sample_id": int(ids[index]), **shown[index]} for index in sorted(shown)]

    def collate(self, sample_ids: NDArray[np.int64], *, epoch: int = 0) -> Batch:
        """Return a batch of an epoch, without padding, of the samples with these `sample_ids`, int64 [n]."""
        stored = self._samples_of(epoch).stored
        groups = group_by_store(stored.stores, sample_ids)
        batch: Batch
        (batch,) = stored.collate(groups, sample_ids, batch_size=len(sample_ids), seed=self._current.seed, epoch=epoch)
        return batch

    def _batches(self, steps: Sequence[StepSamples], *, seed: int, epoch: int) -> list[Batch]:
        return self._samples_of(epoch).stored.batches(steps, seed=seed, epoch=epoch, memory=self._collated_in)

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
    stores: Sequence[SequenceStore], all_samples: Sequence[Samples], collate: Collate, order: SampleOrder
) -> str:
    digest = hashlib.sha256()
    for store, samples in zip(stores, all_samples, strict=True):
        digest.update(f"{store.manifest.content_hash} {store.split} {len(samples.left_out)} ".encode())
        digest.update(samples.left_out.astype("<i8").tobytes())
        for values in () if store.slices is None else store.slices:
            digest.update(np.ascontiguousarray(values, dtype="<i8").data)
    digest.update(repr((collate.filters(), order.fingerprint())).encode())
    return digest.hexdigest()
