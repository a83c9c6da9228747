"""The background part of steps: all-gather their metadata, plan them, prepare their exchange, and confirm the plans.

Every rank takes part in every all-gather, even if its loader failed or has no more batches, so that no rank waits for
one that left, and an error reaches all ranks.
"""

import dataclasses
import functools
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import RankError, one_line
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.costs.cost import count_tokens, scaled_costs
from evenrank.dataloader.balance.exchange.exchange import PreparedStep
from evenrank.dataloader.balance.exchange.fields import sample_bytes
from evenrank.dataloader.balance.metrics.step_metrics import measure_step
from evenrank.dataloader.balance.partition.strategies import real_rows, unbalanced
from evenrank.dataloader.balance.plan import in_rows, plan_step
from evenrank.dataloader.balance.ranks import agree, compared_steps, metadata
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup
from evenrank.dataloader.balance.steps_ahead import Handle
from evenrank.dataloader.balance.steps_in_hand import Begin, MadeStep, StepsInHand
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.padding import empty_batch
from evenrank.dataloader.batches.schema import BatchSchema, schema_of


@dataclass(slots=True, eq=False)
class StepPlanner:
    """Plans steps, together with all other ranks."""

    rank_invariants: Callable[[], Mapping[str, Any]]  # settings of its loader that must be the same on all ranks
    _: KW_ONLY
    config: BalanceConfig
    group: FailFastGroup  # over which metadata is gathered
    prepare: Callable[..., PreparedStep]  # see `Exchange.prepare`
    batch_size: int  # rows that a batch of this rank's loader can have; 0 if it does not tell
    is_measured: bool  # whether steps have metrics: they are only computed where somebody reads them
    _schema: BatchSchema | None = field(default=None, init=False)
    _begin: Begin = field(default_factory=Begin, init=False)
    _hand: StepsInHand | None = field(default=None, init=False)  # of windows and packed steps
    _num_made: int = field(default=0, init=False)

    def begin(self, begin: Begin) -> None:
        """Begin an iteration."""
        self._begin, self._hand, self._num_made = begin, None, 0

    def plan(self, steps: Sequence[Handle]) -> Sequence[Handle]:
        """All-gather the metadata of steps, plan and prepare them. Collective: every rank must call this.

        Returns the steps to hand out: these or, of windows and packed steps, those that are made of them. The first one
        that fails, and those after it, have its error: on every rank, a RankError or its own.
        """
        started = time.perf_counter()
        if self._schema is None and (schema := self._common_schema(steps[0])) is not None:
            self._schema = schema
        if self._schema is None:
            return steps
        known, errors = self._gather_metadata(self._schema, steps)
        gather_seconds = (time.perf_counter() - started) / len(steps)
        num_steps, error = _steps_to_plan(known, errors)
        known = known[:num_steps]
        if self.config.makes_steps:
            return self._make(steps, self._schema, known, error, gather_seconds)
        plans: list[NDArray[np.int32]] = []
        failure: Exception | None = None
        for step, of_step in zip(steps, known, strict=False):
            try:
                plans.append(self._plan(step, self._schema, of_step, gather_seconds))
            except Exception as raised:  # reported to all ranks
                failure = raised
                break
        strategy = self.config.strategy
        if num_steps and (differing := compared_steps.confirm(self.group, plans, failure, known, strategy)):
            num_steps, error = differing
        if error is not None:
            for step in steps[num_steps:]:
                step.error = error
        return steps

    def _plan(
        self, step: Handle, schema: BatchSchema, known: metadata.StepMetadata, gather_seconds: float
    ) -> NDArray[np.int32]:
        """Plan and prepare a step that some rank has a batch of, and return who trains on each row: int32 [W, B]."""
        started = time.perf_counter()
        epoch, number = metadata.common_word(known, "epoch"), metadata.common_word(known, "step")
        names = ("costs", "tokens", "lengths")
        costs, tokens, lengths = (np.ascontiguousarray(known[name], dtype=np.int64) for name in names)
        batch = _own_batch(step, schema, known)
        assignment = plan_step(costs, tokens, self.config, num_real=known["num_real"], epoch=epoch, step=number)
        step.prepared = self.prepare([batch], schema, assignment.rank_of, lengths)
        plan_seconds = time.perf_counter() - started
        if self.is_measured:
            num_bytes = sample_bytes(schema, _by_key(lengths)).reshape(costs.shape)
            step.metrics = measure_step(
                assignment,
                costs=costs,
                tokens=tokens,
                sample_bytes=np.where(assignment.rank_of >= 0, num_bytes, 0),
                epoch=epoch,
                step=number,
                is_balanced=self.config.balances(epoch, number),
                gather_seconds=gather_seconds,
                plan_seconds=plan_seconds,
            )
        return assignment.rank_of

    def _make(
        self,
        loaded: Sequence[Handle],
        schema: BatchSchema,
        known: metadata.StepMetadata,
        error: Exception | None,
        gather_seconds: float,
    ) -> Sequence[Handle]:
        """Make steps of loaded ones, [n, W], after which `error` comes; see `plan`."""
        num_steps, is_last = len(known), len(known) < len(loaded)
        if (hand := self._hand) is None:
            hand = self._hand = StepsInHand(self.config, schema.batch_size, self._begin)
        first = known[:1] if num_steps or hand.known is None else hand.known[:1]
        made: list[Handle] = []
        plans: list[NDArray[np.int32]] = []
        failure: Exception | None = None
        try:
            if num_steps:
                own = zip(loaded, known, strict=False)
                hand.add(known, [_own_batch(step, schema, of_step) for step, of_step in own])
            started = time.perf_counter()
            if steps := hand.make(is_last=is_last):
                values = _InHand.of(hand)
                seconds = (time.perf_counter() - started) / len(steps)
                for step in steps:
                    made.append(handle := Handle(None, left=step.left))
                    plans.append(self._plan_made(handle, step, schema, values, gather_seconds, seconds))
            hand.drop()
        except Exception as raised:  # reported to all ranks
            failure = raised
        following = loaded[num_steps:]
        if len(first):
            # One plan of all these steps, because a rank that failed may not know how many there are.
            of_all = (
                [] if failure is not None else [np.concatenate([np.empty(0, dtype=np.int32), *map(np.ravel, plans)])]
            )
            if differing := compared_steps.confirm(self.group, of_all, failure, first, self.config.strategy):
                _, error = differing
                made, following = [], following or [Handle(None)]
        if error is not None:
            for failed in following:
                failed.error = error
        return [*made, *following]

    def _plan_made(
        self,
        handle: Handle,
        step: MadeStep,
        schema: BatchSchema,
        values: "_InHand",
        gather_seconds: float,
        seconds: float,
    ) -> NDArray[np.int32]:
        """Plan and prepare a step that is made of loaded ones; see `_plan`."""
        started = time.perf_counter()
        of_loaded, rows, world_size = values.known[step.loaded], step.rows, len(values.costs)
        # The order of rows is that of the ranks that have loaded them, so most count as loaded by their own rank.
        counts = np.diff(np.arange(world_size + 1) * len(rows) // world_size)
        is_real = real_rows(schema.batch_size, world_size, counts)
        costs, tokens = (in_rows(of_rows.reshape(-1)[rows], is_real) for of_rows in (values.costs, values.tokens))
        assignment = plan_step(costs, tokens, self.config, num_real=counts)
        rank_of = np.full(values.costs.shape, -1, dtype=np.int32)
        rank_of.reshape(-1)[rows] = trained_by = assignment.rank_of[is_real]
        place = {"epoch": metadata.common_word(of_loaded, "epoch"), "step": self._num_made}
        fields = {**place, "position": step.position, "plan_hash": metadata.common_word(of_loaded, "plan_hash") or None}
        handle.prepared = self.prepare(values.batches, schema, rank_of, values.lengths, **fields)
        self._num_made += 1
        plan_seconds = seconds + time.perf_counter() - started
        if self.is_measured:
            home = rows // values.costs.shape[1]
            of_samples = sample_bytes(schema, _by_key(values.lengths)[:, rows])
            metrics = measure_step(
                assignment,
                costs=costs,
                tokens=tokens,
                sample_bytes=in_rows(of_samples, is_real),
                moved=in_rows((trained_by != home).astype(np.int64), is_real) > 0,
                **place,
                gather_seconds=gather_seconds,
                plan_seconds=plan_seconds,
            )
            if not self.config.pack:  # else it was not loaded as a step
                is_loaded = real_rows(schema.batch_size, world_size, of_loaded["num_real"])
                before = unbalanced(is_loaded, padded=assignment.padded).loads(of_loaded["costs"])
                metrics = dataclasses.replace(metrics, before=before)
            handle.metrics = metrics
        return rank_of

    def _common_schema(self, first: Handle) -> BatchSchema | None:
        """Compare the loaders and schemas of all ranks, before the first step; None if no rank has any batch."""
        schema, error, (invariants, raised) = None, first.error, self._try_invariants()
        error = error or raised
        if first.loaded is not None and error is None:
            try:
                own = schema_of(first.loaded)
                pickle.dumps(own)
                empty_batch(own)  # needed once this rank has no more batches
                # Of a batch that may be the shorter one at the end of an epoch.
                schema = dataclasses.replace(own, batch_size=max(own.batch_size, self.batch_size))
            except Exception as raised:  # reported to all ranks
                error = raised
        report = schema, None if error is None else one_line(error), invariants
        schemas, errors, settings = zip(*metadata.all_gather_objects(self.group, report), strict=True)
        agree.raise_reported_errors(errors)
        agree.check_settings(settings)  # before schemas, which can differ because a setting does
        return compared_steps.common_schema(schemas, self.config.batch_size)

    def _try_invariants(self) -> tuple[Mapping[str, Any], Exception | None]:
        try:
            return self.rank_invariants(), None
        except Exception as raised:  # reported to all ranks
            return {}, raised

    def _gather_metadata(
        self, schema: BatchSchema, steps: Sequence[Handle]
    ) -> tuple[metadata.StepMetadata, Sequence[Sequence[str | None]]]:
        """Return the metadata of n steps, [n, W], and of each rank the error of each; none if no rank has any."""
        invariants, error = self._try_invariants()
        loader_hash = metadata.hash63({name: value for name, value in invariants.items() if name != "rank"})
        message, raised = read_steps(steps, schema, self.config, world_size=self.group.world_size, error=error)
        message[: len(steps)]["loader_hash"] = loader_hash
        known = metadata.started_steps(metadata.all_gather_bytes(self.group, message.view(np.uint8)), schema)
        errors: Sequence[Sequence[str | None]] = []
        if known["status"].any():
            texts = [None if error is None else one_line(error) for error in raised]
            errors = metadata.all_gather_objects(self.group, texts)
        if not known[0]["status"].any() and (known[0]["loader_hash"] != loader_hash).any():
            agree.check_settings(metadata.all_gather_objects(self.group, invariants))
        return known, errors


class _InHand(NamedTuple):
    """The rows of all ranks in n loaded steps."""

    known: metadata.StepMetadata  # [n, W]
    batches: Sequence[JaggedBatch]  # [n], of this rank
    costs: NDArray[np.int64]  # [W, n * B], as tokens
    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]  # [W, K, n * B]

    @classmethod
    def of(cls, hand: StepsInHand) -> "_InHand":
        known = hand.known
        assert known is not None
        world_size = known.shape[1]
        costs, tokens = (
            known[name].transpose(1, 0, 2).reshape(world_size, -1).astype(np.int64) for name in ("costs", "tokens")
        )
        lengths = known["lengths"].transpose(1, 2, 0, 3).astype(np.int64)
        return cls(known, hand.batches, costs, tokens, lengths.reshape(*lengths.shape[:2], -1))


def _steps_to_plan(
    known: metadata.StepMetadata, errors: Sequence[Sequence[str | None]]
) -> tuple[int, Exception | None]:
    """Return how many of n started steps, [n, W], can be planned, and the error of the next one, if it has one."""
    if not errors and compared_steps.are_in_step(known):
        return len(known), None
    for index, of_step in enumerate(known):
        try:
            agree.raise_reported_errors([of_rank[index] for of_rank in errors if index < len(of_rank)])
            compared_steps.check_headers(of_step)
        except RankError as raised:  # on all ranks
            return index, raised
        if of_step["ended"].all():
            return index, None
    return len(known), None


def _own_batch(step: Handle, schema: BatchSchema, known: metadata.StepMetadata) -> JaggedBatch:
    """Return this rank's batch of a step that some rank has a batch of."""
    if step.loaded is not None:
        return step.loaded
    place = {name: metadata.common_word(known, name) for name in ("epoch", "step", "position")}
    return empty_batch(schema).replace(**place)


def _by_key(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return lengths [W, K, rows] as [K, W * rows]."""
    return lengths.transpose(1, 0, 2).reshape(lengths.shape[1], -1)


def read_steps(
    steps: Sequence[Handle], schema: BatchSchema, config: BalanceConfig, *, world_size: int, error: Exception | None
) -> tuple[metadata.StepMetadata, list[Exception | None]]:
    """Return the message of a rank's steps, without `loader_hash`, and the error of each: of its batch or its costs.

    `error` is one of all steps.
    """
    message, size = metadata.new_message(schema), schema.batch_size
    costs, tokens, lengths = (message[name] for name in ("costs", "tokens", "lengths"))
    errors = [error or step.error for step in steps]
    with_samples: dict[int, tuple[JaggedBatch, NDArray[np.int64]]] = {}
    for index, batch in enumerate(step.loaded for step in steps):
        if batch is not None and errors[index] is None:
            try:
                of_rows = compared_steps.check_batch(batch, schema)
            except Exception as raised:
                errors[index] = raised
                continue
            lengths[index, :, : batch.batch_size] = of_rows
            with_samples[index] = batch, of_rows[:, : batch.num_real]

    def fill_in(indices: Sequence[int]) -> None:
        batches, parts = zip(*(with_samples[index] for index in indices), strict=True)
        counts = [batch.num_real for batch in batches]
        by_key = schema.lengths_by_key(np.concatenate(parts, axis=1))
        candidates = [getattr(batch, "num_candidates", None) for batch in batches]
        num_candidates = np.concatenate(
            [
                np.zeros(count, dtype=np.int64) if of_batch is None else of_batch.numpy()[:count]
                for of_batch, count in zip(candidates, counts, strict=True)
            ]
        )
        of_samples = scaled_costs(config.cost, by_key, num_candidates, samples_per_step=world_size * size)
        tokens_of_samples = count_tokens(config.cost, by_key, len(num_candidates))
        end = 0
        for index, count in zip(indices, counts, strict=True):
            start, end = end, end + count
            costs[index, :count], tokens[index, :count] = of_samples[start:end], tokens_of_samples[start:end]

    try:
        if with_samples:
            fill_in([*with_samples])
    except Exception:  # of a step that is found by asking for each alone
        for index in with_samples:
            try:
                fill_in([index])
            except Exception as raised:
                errors[index] = raised
    message[: len(steps)]["started"], message[: len(steps)]["schema_hash"] = 1, _hash_of(schema)
    for header, step, raised_error in zip(message, steps, errors, strict=False):
        header["status"] = raised_error is not None
        if (batch := step.loaded) is None:
            header["ended"] = raised_error is None
            continue
        header["num_real"] = 0 if raised_error is not None else batch.num_real
        header["epoch"], header["step"], header["position"] = batch.epoch, batch.step, batch.position
        header["plan_hash"] = batch.plan_hash or 0
    return message, errors


@functools.lru_cache
def _hash_of(schema: BatchSchema) -> int:
    return metadata.hash63(schema)
