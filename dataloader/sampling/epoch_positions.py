"""`EpochPositions`: the position of a loader or sampler in its epochs, and the state that saves it."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

from evenrank.core.errors import ConfigError, StateError
from evenrank.core.rules import Bounds, Seed
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics
from evenrank.dataloader.balance.ranks.connection import PlanCheck
from evenrank.dataloader.balance.ranks.process_group import Members
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.routing.key_map import KeyMap
from evenrank.dataloader.routing.remap import DIST_TYPE, check_dist_type, dist_type
from evenrank.dataloader.sampling.steps import Iteration, StepSampler, StepSamples
from evenrank.dataloader.state import checks
from evenrank.dataloader.state.checks import Epoch, Natural, StateFormat, Text
from evenrank.dataloader.state.node import HasRankInvariants
from evenrank.dataloader.state.resume_point import (
    CurrentPosition,
    Position,
    ResumePoint,
    SkippedSamples,
    warn_of_rest,
)
from evenrank.datasets.order import SampleOrder
from evenrank.datasets.schema import IdSummary
from evenrank.datasets.slices import place_of

_log = logging.getLogger("evenrank")
_FORMAT = StateFormat(
    owner="the loader",
    version=6,
    fields={
        "epoch": Epoch,
        "position": Natural,
        "seed": Seed,
        "num_samples": Natural,
        "fingerprint": Text,
        checks.VOCABULARY: Text,
        "pending": Text,
        DIST_TYPE: Text,
        "place": Text,
    },
    not_covered=frozenset({DIST_TYPE}),  # a remapped checkpoint has another one; it is compared with the job's
)
_TIME = Annotated[int, Bounds(at_least=-62_135_596_800_000, at_most=253_402_300_799_999)]  # which `datetime` has
_TYPES = {**_FORMAT.fields, "num_shards": Natural, "places": Mapping, "mark": Text, "begin_ms": _TIME, "end_ms": _TIME}
# States of earlier versions, after which only another epoch can begin, most entries first.
_EARLIER = tuple(
    replace(
        _FORMAT,
        version=version,
        fields={name: _TYPES[name] for name in names.split()},
        not_covered=frozenset({DIST_TYPE, "places"}),
    )
    for version, names in (
        (5, "epoch position seed num_samples fingerprint vocabulary pending dist_type begin_ms end_ms"),
        (4, "epoch position seed num_samples fingerprint vocabulary pending dist_type"),
        (3, "epoch position seed num_shards fingerprint vocabulary places dist_type"),  # of a stream
        (3, "epoch position fingerprint"),  # of random batches
        (1, "epoch position seed mark vocabulary dist_type"),  # of a log
    )
)
ENDLESS = (1 << 63) - 1
"""The samples of a log, whose number is never known."""

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochSamples:
    """The samples of an epoch."""

    order: SampleOrder
    sampler: StepSampler
    fingerprint: str
    """A hash of everything that decides on the samples and their order."""


class EpochPositions(HasRankInvariants):
    """Mixin of what hands out the steps of an order, one epoch per iteration."""

    _current: CurrentPosition
    _samples: EpochSamples  # of all epochs
    _begun: dict[int, ResumePoint]  # by epoch, where its latest iteration began within it
    _plan_check: PlanCheck | None  # None: not balanced
    _observe: Callable[[StepMetrics], None] | None
    _can_skip: ClassVar = False  # whether an iteration can begin with any positions
    _left_out: Mapping[str, int] = MappingProxyType({})

    def _set_up(
        self,
        current: CurrentPosition,
        ids: Mapping[str, IdSummary] = MappingProxyType({}),
        key_maps: Mapping[str, KeyMap] = MappingProxyType({}),
    ) -> None:
        """Take a position, and what a state says of the meaning of ids and keys: the first part of creating it."""
        self._current, self._begun = current, {}
        self._ids, self._key_maps = ids, key_maps
        self._plan_check = self._observe = None

    @cached_property
    def _meaning(self) -> dict[str, str]:
        return {checks.VOCABULARY: checks.vocabulary_entry(self._ids), DIST_TYPE: dist_type(self._key_maps)}

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, from 0."""
        return self._current.next.epoch

    def begin_at(self, epoch: int) -> None:
        """Make the next iteration another epoch, with its own order and drawn negatives, or its window of time."""
        self._current.start_epoch(epoch)

    def peek(self, n: int = 3, *, max_events: int = 10) -> list[dict[str, Any]]:
        """Return samples to look at; a ConfigError here: only a `build_loader` can read them in between."""
        raise ConfigError(f"a {type(self).__name__} cannot peek; call open_store(...).head(), or look at its batches")

    @property
    def left_out(self) -> Mapping[str, int]:
        """Per reason, how many rows are known not to be samples: of streams and logs, of those that this rank read."""
        return self._left_out

    def _compare_plans(self, balance: BalanceConfig | None, members: Members | None, rank: int) -> None:
        """Compare plans with the other ranks, and observe steps: the last part of creating it, if it balances."""
        self._plan_check = None if balance is None else PlanCheck(members, balance.timeout)
        self._observe = None if balance is None else balance.observer(rank, exchanges=False, data=self.rank_invariants)

    def _samples_of(self, epoch: int) -> EpochSamples:
        """Return the samples of an epoch."""
        return self._samples

    def _place(self, position: Position) -> str:
        """Return what a state says of a position beyond its numbers, as text of one line: what tells it elsewhere."""
        return ""

    def _go_to(self, position: Position, place: str) -> None:
        """Go to a place before the position moves there; a StateError if it is none."""

    @property
    def rows_follow_positions(self) -> bool:
        """Whether samples have the positions of a step rank by rank, row by row, and can be loaded from any on.

        Not where ranks balance alone.
        """
        return self._can_skip and self._plan_check is None

    @property
    def num_samples(self) -> int:
        """Samples of the next iteration's epoch, over all ranks."""
        return self._samples_of(self.epoch).order.num_samples

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch; of the next one, as with `pack` epochs differ in this."""
        return self._num_steps(ResumePoint(epoch=self.epoch))

    def remaining_batches(self) -> int:
        """Return the number of batches of the next iteration: fewer than an epoch's after `load_state_dict`."""
        return self._num_steps(self._current.next)

    def _num_steps(self, point: ResumePoint) -> int:
        """Return the number of batches of an iteration from a point on; a TypeError if it is not known."""
        return self._begin(point).schedule.num_steps

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, from the next iteration on, at the position that `state_dict` returned.

        If no samples are left in that epoch, the next iteration is the next epoch.

        Raises:
            StateError: the state is damaged, of another version, or of other data, codes, filters or `key_maps`;
                to train on other data after it, call `begin_after`.
            ConfigError: the rest of the epoch cannot be packed.
        """
        if (earlier := _earlier(state)) is not None:
            raise StateError(
                f"the loader's state has version {earlier.version}, expected {_FORMAT.version}; go on after it with "
                "begin_after, or finish its epoch with the version of evenrank that saved it"
            )
        entries = _FORMAT.check(state)
        self._check_meaning(entries)
        epoch, position, seed, saved_samples = (entries[name] for name in ("epoch", "position", "seed", "num_samples"))
        samples = self._samples_of(epoch)
        order, num_samples = samples.order, samples.order.num_samples
        if saved_samples != num_samples or entries["fingerprint"] != samples.fingerprint:
            raise StateError(
                f"the loader's state is of other data, codes or filters: it has {_amount(saved_samples)} and "
                f"fingerprint {entries['fingerprint'][:12]}, this loader {_amount(num_samples)} and "
                f"{samples.fingerprint[:12]}; load it with the dataset, the codes and the filters that it was saved "
                "with, or train on other data after it with begin_after"
            )
        if position > num_samples:
            raise StateError(
                f"the loader's state has position {position} of {num_samples} samples; load a state that state_dict "
                "returned"
            )
        skipped = SkippedSamples.from_text(entries["pending"], position=position, num_samples=num_samples)
        after = ResumePoint(epoch=epoch, start=position, position=position, pending=skipped.pending)
        point = samples.sampler.resume(order, after, skipped, seed=seed)
        is_over = point.position > 0 and not samples.sampler.begin(order, point, seed=seed).schedule.num_steps
        self._go_to(Position(epoch, position), entries["place"])
        self._current.seed = seed
        self._begun[point.epoch] = point
        self._current.move_to(point, is_over=is_over)

    def load_window(self, state: Mapping[str, Any], num_steps: int) -> None:
        """Load a state and, if it is within a window of `num_steps` steps as these, go to its begin.

        The point there has what is left of that window, for a Balancer, which then makes its steps again.
        """
        self.load_state_dict(state)
        epoch, position, num_samples = (state[name] for name in ("epoch", "position", "num_samples"))
        skipped = SkippedSamples.from_text(state["pending"], position=position, num_samples=num_samples)
        world_size, batch_size = (self.rank_invariants()[name] for name in ("world_size", "batch_size"))
        if skipped.begin is None or skipped.shape != (num_steps, world_size, batch_size) or self._current.left is None:
            return
        if (position - skipped.begin.start) % (world_size * batch_size):
            return
        left = skipped.left(position, num_samples)
        self._begun[epoch] = point = replace(skipped.begin, epoch=epoch, left=left)
        self._current.move_to(point)
        self._current.after_last = Position(epoch, position)
        self._current.left.add(self._current.after_last, left)

    def begin_after(self, state: Mapping[str, Any]) -> None:
        """Begin with the epoch after that of a state, which may be of another dataset, such as yesterday's log.

        The state may also be of an earlier version, or of another kind of loader.

        Raises:
            StateError: the state is damaged, of a dataset whose vocabulary this one does not extend, or of `key_maps`
                that give keys other rows.
        """
        self._current.start_epoch(self._left(state)["epoch"] + 1)

    def _left(self, state: object) -> dict[str, Any]:
        """Return the entries of a state of any version, intact, of a dataset whose ids all mean the same here."""
        entries = (_earlier(state) or _FORMAT).check(state)
        self._check_meaning(entries, may_grow=True)
        position, num_samples = entries["position"], entries.get("num_samples", ENDLESS)
        if position and position < num_samples < ENDLESS:
            left_out = num_samples - position
            _log.warning(
                "epoch %d is not finished: %d samples of its dataset are never trained", entries["epoch"], left_out
            )
        if "begin_ms" in entries:
            entries["place"] = place_of(entries["begin_ms"], entries["end_ms"])
        return entries

    def _check_meaning(self, entries: Mapping[str, Any], *, may_grow: bool = False) -> None:
        """Raise a StateError unless ids and keys mean the same here as in a state, if it has any."""
        source, own = "the loader's state", self._meaning
        if (vocabulary := entries.get(checks.VOCABULARY, own[checks.VOCABULARY])) != own[checks.VOCABULARY]:
            checks.check_vocabulary(vocabulary, self._ids, source=source)
        if (saved := entries.get(DIST_TYPE, own[DIST_TYPE])) != own[DIST_TYPE]:
            check_dist_type(saved, self._key_maps, source=source, may_grow=may_grow)

    def _begin_epoch(self) -> Iteration:
        """Return the next iteration, after which the next epoch follows."""
        self._current.next = replace(self._current.next, first_step=self._current.steps)
        iteration = self._begin(self._current.next)
        epoch, position = self._current.after_last
        if self._plan_check is not None and epoch in self._begun and epoch < self.epoch:
            schedule = self._begin(self._begun[epoch]).schedule
            if position and schedule.num_steps and position < schedule.position_after(schedule.num_steps - 1):
                warn_of_rest(self._current.after_last)
        self._begun[iteration.point.epoch] = self._current.begin()
        return iteration

    def _begin(self, point: ResumePoint) -> Iteration:
        samples = self._samples_of(point.epoch)
        return samples.sampler.begin(samples.order, point, seed=self._current.seed)

    def _hand_out(self, steps: Iterable[tuple[Batch, Position, StepSamples]]) -> Iterator[Batch]:
        """Yield the batches of steps, given with the position after each, and its samples."""
        batches = self._counted(steps)
        return batches if self._plan_check is None else self._plan_check.telling(batches)

    def _counted(self, steps: Iterable[tuple[Batch, Position, StepSamples]]) -> Iterator[Batch]:
        check, observe = self._plan_check, self._observe
        plans = None if check is None else check.begin_epoch(self.epoch, self.remaining_batches())
        for batch, after, samples in steps:
            if plans is not None and "plan_hash" in samples.fields:
                plans.add(samples.fields["plan_hash"])
            if observe is not None and samples.metrics is not None:
                observe(samples.metrics)
            self._current.after_last = after
            self._current.steps += 1
            yield batch
        if check is not None and plans is not None:
            check.end_epoch(plans)

    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the position after the batch handed out last, or after another one.

        The state is the same on all ranks, and can be loaded with any world size, batch size, workers and balance.

        Args:
            after: the batch trained last, if something pulls batches ahead of training. It was handed out since a state
                of its epoch was loaded, if one was. None: the batch handed out last.

        Raises:
            RankError: with `balance`, ranks that have asked after as many steps have planned differently.
        """
        if self._plan_check is not None:
            self._plan_check.compare()
        return self._state(after)

    def _state(self, after: JaggedBatch | Position | None) -> dict[str, Any]:
        """Return the state after a batch, or a position, that was handed out; None: the last one."""
        epoch, position = self._current.after(after)
        point = self._begun.get(epoch)
        if point is None or position < point.position:
            point = ResumePoint(epoch=epoch)
        samples, seed = self._samples_of(epoch), self._current.seed
        left = self._current.left_after(Position(epoch, position))
        first = position if left is None else left.begin
        skipped = samples.sampler.skipped(samples.order, point, first, seed=seed)
        if left is not None:
            skipped = left.skipped(point, skipped)
        return _FORMAT.make(
            epoch=epoch,
            position=position,
            seed=seed,
            num_samples=samples.order.num_samples,
            fingerprint=samples.fingerprint,
            pending=skipped.to_text(),
            place=self._place(Position(epoch, position)),
            **self._meaning,
        )


def _amount(num_samples: int) -> str:
    return "all records of a log" if num_samples == ENDLESS else f"{num_samples:,} samples"


def _earlier(state: object) -> StateFormat | None:
    """Return the format of a state of an earlier version; None if it has none of these."""
    if not isinstance(state, Mapping) or type(state.get("version")) is not int:
        return None
    return next((form for form in _EARLIER if form.version == state["version"] and {*form.fields} <= {*state}), None)
