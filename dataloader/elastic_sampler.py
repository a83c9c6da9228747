"""`ElasticSampler` and `ElasticLoader`: anybody's map-style Dataset, in an order that any number of ranks can resume.

    sampler = ElasticSampler(len(dataset), batch_size=32, rank=rank, world_size=world_size)
    loader = ElasticLoader(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=4))
    for batch in loader:
        train(batch)
    torch.save(loader.state_dict(), path)  # the same on all ranks

The workers of a DataLoader take indices ahead of training, which the sampler alone cannot tell. `ElasticLoader` counts
the batches that are handed out; so does a Balancer over the DataLoader.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import DataLoader, Sampler

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Count, NonNegative, Seed
from evenrank.core.settings import check_types
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.ranks.agree import create_on_all_ranks
from evenrank.dataloader.balance.ranks.process_group import Group, Members
from evenrank.dataloader.balance.refit import CostSchedule
from evenrank.dataloader.batches.batch import JaggedBatch, LossKey
from evenrank.dataloader.batches.tensors import suppress_fx_tracing_warning
from evenrank.dataloader.rank_loader import check_rank
from evenrank.dataloader.sampling.balanced_steps import make_step_sampler
from evenrank.dataloader.sampling.epoch_positions import EpochPositions, EpochSamples
from evenrank.dataloader.sampling.steps import GivenLengths, StepSamples, StepShape
from evenrank.dataloader.state.resume_point import CurrentPosition, Position
from evenrank.dataloader.workers import Workers
from evenrank.datasets.order import RowOrder, Samples

Batch = TypeVar("Batch")

_STEPS_AT_ONCE = 8  # planned together, because some of the work is the same for one step and for 8


class ElasticSampler(EpochPositions, Sampler[list[int]]):
    """The indices of one rank's samples in each step: a `batch_sampler`. Each iteration is one epoch.

    Every rank takes the same number of steps. If the samples of the last step do not fill it, its last ranks have fewer
    samples or none; with `balance` any rank may. The collate function must then make a batch of no samples.

    With `lengths` and `balance`, every rank plans all steps, and reads the samples that it trains on: nothing is
    exchanged. Where there is a process group, creating it is then collective: every rank must call this.

    Args:
        num_samples: length of the dataset.
        batch_size: samples per rank and step; with `BalanceConfig(pack=True)`, at most.
        rank: data-parallel rank of this process, 0..world_size-1.
        world_size: number of data-parallel ranks.
        shuffle: take a different permutation in each epoch; otherwise, ascending indices.
        seed: of the permutations; the same on all ranks.
        drop_last: leave out a last step that does not fill every rank.
        lengths: per jagged key of the batches, the length of each sample, integers [num_samples]. An entry
            `num_candidates` tells costs how many of the last items of each sample are candidates.
        balance: how to balance steps by these lengths.
        loss_key: the key of `lengths` that counts loss tokens, as of the JaggedCollate; None: each sample is one.
        group: with `balance`, the data-parallel ranks, which compare their settings. None: the default process group
            or, without one, nothing is compared.

    Raises:
        ConfigError: an argument is out of range, or the lengths do not fit.
        RankError: with `balance`, another rank failed, or has other lengths or settings.
    """

    _shape: StepShape
    _loss_key: LossKey | None
    _balance: BalanceConfig | None
    _planning: Workers
    _handed_out: "deque[_Step] | None"  # of the next iteration, to an ElasticLoader
    _given: "GivenLengths | None"

    def __init__(
        self,
        num_samples: NonNegative,
        *,
        batch_size: Count,
        rank: int,
        world_size: int,
        shuffle: bool = True,
        seed: Seed = 0,
        drop_last: bool = False,
        lengths: Mapping[str, ArrayLike] | None = None,
        balance: BalanceConfig | None = None,
        loss_key: LossKey | None = None,
        group: Group | None = None,
    ) -> None:
        arguments = locals()

        def create(members: Members | None) -> ElasticSampler:
            check_types(ElasticSampler, arguments)
            check_rank(rank, world_size)
            if (lengths is None) != (balance is None):
                raise ConfigError(
                    "lengths and balance belong together: pass lengths={...} and balance=BalanceConfig(cost=...), or "
                    "neither, and a Balancer over the DataLoader"
                )
            samples = Samples(num_rows=num_samples, left_out=np.empty(0, dtype=np.int64))
            order = RowOrder(samples=samples, shuffle=shuffle)
            fingerprint = hashlib.sha256(repr(order.fingerprint()).encode()).hexdigest()
            self._shape = StepShape(rank, world_size, batch_size, drop_last=drop_last, in_flight=2 * _STEPS_AT_ONCE)
            self._set_up(CurrentPosition(seed))
            self._loss_key = loss_key
            self._balance = balance
            # DataLoaders ask for indices on the training thread.
            self._planning = Workers(0 if balance is None else 1, ahead=1, persistent=False)
            self._handed_out = None
            self._given = None if lengths is None else GivenLengths(lengths, num_samples, batch_size, loss_key)
            costs = None if balance is None else CostSchedule.of(balance, members, world_size)
            sampler = make_step_sampler(self._given, self._shape, balance, costs)
            self._samples = EpochSamples(order=order, sampler=sampler, fingerprint=fingerprint)
            self._compare_plans(balance, members, rank)
            return self

        if lengths is None and balance is None:
            create(None)
        else:
            create_on_all_ranks(create, group=group, world_size=world_size, balance=balance)

    def __iter__(self) -> Iterator[list[int]]:
        return _Indices(self)

    def _steps(self) -> Iterator[list[int]]:
        handed_out, self._handed_out = self._handed_out, None
        iteration = self._begin_epoch()
        epoch, schedule = iteration.point.epoch, iteration.schedule
        sample = partial(self._samples.sampler.sample, iteration, is_measured=self._observe is not None)
        starts = range(0, schedule.num_steps, _STEPS_AT_ONCE)
        planned = self._planning.map(sample, (range(schedule.num_steps)[first:][:_STEPS_AT_ONCE] for first in starts))
        try:
            for step, samples in enumerate(chain.from_iterable(planned)):
                after = Position(epoch, schedule.position_after(step))
                if handed_out is None:
                    self._current.after_last = after
                else:
                    handed_out.append(_Step(after, step, samples))
                yield samples.sample_ids.tolist()
        finally:
            iteration.left.set()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch, or what is left of it if it is the current epoch."""
        if epoch != self.epoch:
            self._current.start_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the position after the step whose indices were handed out last; see `ElasticLoader.state_dict`."""
        return self._state(None)

    def with_positions(self, loader: DataLoader[Any]) -> "ElasticLoader[Any]":
        """Return the ElasticLoader of a DataLoader over this sampler."""
        return ElasticLoader(loader)

    def rank_invariants(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks, and this process's `rank`."""
        balance = self._balance
        return {
            "rank": self._shape.rank,
            "world_size": self._shape.world_size,
            "batch_size": self._shape.batch_size,
            "num_samples": self.num_samples,
            "seed": self._current.seed,
            "drop_last": self._shape.drop_last,
            "fingerprint": self._samples.fingerprint,
            "loss_key": self._loss_key,
            **({} if balance is None else balance.rank_invariants(exchanges=False)),
            **self._samples.sampler.rank_invariants(self._samples.order, seed=self._current.seed),
        }


class _Indices(Iterator[list[int]]):
    """The indices of an iteration, with a state: with workers, a StatefulDataLoader goes on with one that is over."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._steps = sampler._steps()
        self._has_begun = False

    def __next__(self) -> list[int]:
        self._has_begun = True
        return next(self._steps)

    def state_dict(self) -> dict[str, Any]:
        """Return what the state of the sampler lacks."""
        return {"has_begun": self._has_begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the sampler does, even if nothing is left of that epoch."""
        current = self._sampler._current
        if state["has_begun"] and current.after_last.epoch < current.next.epoch:
            self._steps = iter(())


class _Step(NamedTuple):
    """A step of this rank."""

    position: Position  # after it
    step: int
    samples: StepSamples


class ElasticLoader(EpochPositions, Generic[Batch]):
    """The batches of a DataLoader over an ElasticSampler, with the position after each.

    The Dataset and the collate function make what is trained, so there is no `transform`, and nothing is left out.
    JaggedBatches get the fields that a Loader's have: epoch, step and position and, where they are balanced,
    `world_loss_tokens`, `dp_size` and `plan_hash`. The end of a balanced epoch waits for all ranks, up to
    `BalanceConfig.timeout`.

    Args:
        loader: DataLoader, or StatefulDataLoader, with `batch_sampler=ElasticSampler(len(dataset), ...)`, and any
            number of workers.

    Raises:
        ConfigError: it has another sampler, another number of samples, or yields batches out of order.
    """

    _can_skip = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        sampler: Any = loader.batch_sampler
        if not isinstance(sampler, ElasticSampler):
            raise ConfigError(
                f"the loader has a {type(sampler).__name__}; pass DataLoader(dataset, "
                "batch_sampler=ElasticSampler(len(dataset), ...), ...)"
            )
        if (num_samples := len(loader.dataset)) != sampler.num_samples:  # type: ignore[arg-type]
            raise ConfigError(f"the dataset has {num_samples:,} samples, its ElasticSampler {sampler.num_samples:,}")
        if not getattr(loader, "in_order", True):
            raise ConfigError("the DataLoader has in_order=False, so positions are unknown; leave it out")
        suppress_fx_tracing_warning()  # of batches that workers send
        self._loader = loader
        self._sampler = sampler
        # The positions of the sampler, and none of its own.
        self._set_up(sampler._current)
        self._samples, self._begun = sampler._samples, sampler._begun
        self._plan_check, self._observe = sampler._plan_check, sampler._observe

    def __iter__(self) -> Iterator[Batch]:
        return self._hand_out(self._place_batches())

    def _place_batches(self) -> Iterator[tuple[Any, Position, StepSamples]]:
        handed_out: deque[_Step] = deque()
        self._latest = self._sampler._handed_out = handed_out
        for batch in self._loader:
            if not handed_out or (self._loader.persistent_workers and self._latest is not handed_out):
                raise ConfigError(
                    "the DataLoader yields batches of an iteration that was not begun here, or of two at once over "
                    "persistent workers; iterate over the ElasticLoader alone, and once at a time"
                )
            step = handed_out.popleft()
            placed = self._placed(batch, step) if isinstance(batch, JaggedBatch) else batch
            yield placed, step.position, step.samples

    def _placed(self, batch: Any, step: _Step) -> Any:
        sample_ids, fields, _ = step.samples
        if batch.num_real != len(sample_ids):
            raise ConfigError(
                f"collate_fn made {batch.num_real} rows of {len(sample_ids)} samples; make one row of each sample"
            )
        if fields and batch.loss_key() != self._sampler._loss_key:
            raise ConfigError(
                f"the batch has loss_key {batch.loss_key()}, its ElasticSampler {self._sampler._loss_key}; pass both "
                "the same"
            )
        if (given := self._sampler._given) is not None:
            given.check(batch, sample_ids)
        return batch.replace(**step.position._asdict(), step=step.step, **fields)

    def close(self) -> None:
        """Stop the processes that `persistent_workers` keeps; another iteration starts new ones."""
        self._loader._iterator = None

    def rank_invariants(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks, and this process's `rank`."""
        return self._sampler.rank_invariants()
