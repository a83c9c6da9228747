"""The background part of steps: all-gather their metadata, plan them, prepare their exchange, and confirm the plans.

Every rank takes part in every all-gather, even if its loader failed or has no more batches, so that no rank waits for
one that left, and an error reaches all ranks.
"""

import dataclasses
import functools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.costs.cost import Cost, count_tokens, scaled_costs
from evenrank.dataloader.balance.exchange.exchange import Handle
from evenrank.dataloader.balance.exchange.fields import sample_bytes
from evenrank.dataloader.balance.metrics.step_metrics import measure_step
from evenrank.dataloader.balance.partition.strategies import Assignment, real_rows, unbalanced
from evenrank.dataloader.balance.plan import in_rows, plan_steps
from evenrank.dataloader.balance.ranks import agree, metadata
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup
from evenrank.dataloader.balance.refit import CostSchedule
from evenrank.dataloader.balance.steps_in_hand import StepsInHand
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.padding import empty_batch, without_token_padding
from evenrank.dataloader.batches.schema import BatchSchema, check_contents, schema_of


@dataclass(slots=True, eq=False)
class StepPlanner:
    """Plans steps, together with all other ranks."""

    rank_invariants: Callable[[], Mapping[str, Any]]  # settings of its loader that must be the same on all ranks
    _: KW_ONLY
    config: BalanceConfig
    group: FailFastGroup  # over which metadata is gathered
    prepare: Callable[..., None]  # see `Exchange.prepare`
    batch_size: int  # rows that a batch of this rank's loader can have; 0 if it does not tell
    is_measured: bool  # whether steps have metrics: they are only computed where somebody reads them
    costs: CostSchedule
    _schema: BatchSchema | None = field(default=None, init=False)
    _hand: StepsInHand | None = field(default=None, init=False)  # of windows and packed steps
    _num_planned: int = field(default=0, init=False)  # steps of the job
    _num_decisions: int = field(default=0, init=False)  # of which all ranks know

    def begin(self, hand: StepsInHand) -> None:
        """Begin an iteration of steps that are made of several loaded ones."""
        self._hand = hand

    def plan(self, steps: Sequence[Handle]) -> Sequence[Handle]:
        """All-gather the metadata of steps, plan and prepare them. Collective: every rank must call this.

        Returns the steps to hand out: these or, of windows and packed steps, those that are made of them. The first one
        that fails, and those after it, have its error: on every rank, a RankError or its own.
        """
        started = time.perf_counter()
        for step in steps:
            if (batch := step.loaded) is not None:  # the balanced batch is padded anew
                step.loaded, step.error = agree.attempt(functools.partial(without_token_padding, batch))
        if self._schema is None:
            self._schema = self._common_schema(steps[0])
        if (schema := self._schema) is None:
            return steps
        cost = self.costs.after(self._num_decisions)
        known, errors = self._gather_metadata(schema, steps, cost)
        gather_seconds = (time.perf_counter() - started) / len(steps)
        num_steps, error = agree.steps_to_plan(known, errors)
        known = compared = known[:num_steps]
        self._num_planned += num_steps
        if (hand := self._hand) is not None:
            hand.cost = cost
            compared = known[:1] if num_steps or hand.known is None else hand.known[:1]
        planned: list[Handle] = []
        plans: list[NDArray[np.int32]] = []
        failure: Exception | None = None
        try:
            for step, rank_of in self._steps_to_hand_out(steps, schema, known, gather_seconds):
                planned.append(step)
                plans.append(rank_of)
        except Exception as raised:  # reported to all ranks
            failure = raised
        if hand is not None:
            # One plan of all these steps, because a rank that failed may not know how many there are.
            of_all = np.concatenate([np.empty(0, dtype=np.int32), *map(np.ravel, plans)])
            plans = [of_all] if failure is None else []
        following = steps[num_steps:]
        if len(compared) and (differing := agree.confirm(self.group, plans, failure, compared, self.config.strategy)):
            first, error = differing
            planned = planned[:first]
            following = steps[first:] if hand is None else following or [Handle(None)]
        if error is not None:
            for step in following:
                step.error = error
        return [*planned, *following]

    def _steps_to_hand_out(
        self, steps: Sequence[Handle], schema: BatchSchema, known: metadata.StepMetadata, gather_seconds: float
    ) -> Iterator[tuple[Handle, NDArray[np.int32]]]:
        """Yield the steps that become of loaded ones, of which n are known, [n, W], and the plan of each."""
        batches = [_own_batch(step, schema, of_step) for step, of_step in zip(steps, known, strict=False)]
        started = time.perf_counter()
        if (hand := self._hand) is None:
            for step, of_step, batch in zip(steps, known, batches, strict=False):
                step.known = of_step
                yield step, self._plan(step, schema, [batch], _rows_of(of_step[np.newaxis]), gather_seconds, started)
                started = time.perf_counter()
            return
        if batches:
            hand.add(known, batches)
        if (made := hand.make(is_last=len(known) < len(steps))) and hand.known is not None:
            rows = _rows_of(hand.known)
            for step in made:
                yield step, self._plan(step, schema, hand.batches, rows, gather_seconds, started)
                started = time.perf_counter()
        hand.drop()

    def _plan(
        self,
        step: Handle,
        schema: BatchSchema,
        batches: Sequence[JaggedBatch],
        rows: Sequence[NDArray[np.int64]],
        gather_seconds: float,
        started: float,
    ) -> NDArray[np.int32]:
        """Plan and prepare a step that some rank has samples of, and return who trains on each row: int32 [W, n * B].

        `batches` are this rank's n loaded ones that it is made of, `rows` those of all ranks, see `_rows_of`. Planning
        it began at `started`.
        """
        (costs, tokens, lengths), num_real, made_of = rows, step.known["num_real"], step.rows
        place = {name: step.fields.get(name, metadata.common_word(step.known, name)) for name in ("epoch", "step")}
        if made_of is not None:
            # The order of rows is that of the ranks that have loaded them, so most count as loaded by their own rank.
            num_real = np.diff(np.arange(len(costs) + 1) * len(made_of) // len(costs))
            is_real = real_rows(schema.batch_size, len(costs), num_real)
            costs, tokens = (in_rows(values.reshape(-1)[made_of], is_real) for values in (costs, tokens))
        (plan,) = plan_steps(
            costs[np.newaxis],
            tokens[np.newaxis],
            self.config,
            num_real=num_real[np.newaxis],
            epoch=place["epoch"],
            steps=(place["step"],),
        )
        assignment = Assignment(rank_of=plan, padded=self.config.partition_options["padded"])
        rank_of: NDArray[np.int32] = plan
        if made_of is not None:
            rank_of = np.full((len(costs), lengths.shape[-1]), -1, dtype=np.int32)
            rank_of.reshape(-1)[made_of] = plan[is_real]
        self.prepare(step, batches, schema, rank_of, lengths)
        plan_seconds = time.perf_counter() - started
        if not self.is_measured:
            return rank_of
        of_rows, moved = lengths.transpose(1, 0, 2).reshape(lengths.shape[1], rank_of.size), None
        if made_of is None:
            num_bytes = np.where(rank_of >= 0, sample_bytes(schema, of_rows).reshape(rank_of.shape), 0)
        else:
            num_bytes = in_rows(sample_bytes(schema, of_rows[:, made_of]), is_real)
            home = np.full(is_real.shape, -1, dtype=np.int32)
            home[is_real] = made_of // rank_of.shape[1]
            moved = plan != home
        step.metrics = measure_step(
            assignment,
            costs=costs,
            tokens=tokens,
            sample_bytes=num_bytes,
            moved=moved,
            is_balanced=self.config.balances(**place),
            gather_seconds=gather_seconds,
            plan_seconds=plan_seconds,
            **place,
        )
        if made_of is not None and not self.config.pack:  # else it was not loaded as a step
            is_loaded = real_rows(schema.batch_size, len(costs), step.known["num_real"])
            before = unbalanced(is_loaded, padded=assignment.padded).loads(step.known["costs"])
            step.metrics = dataclasses.replace(step.metrics, before=before)
        return rank_of

    def _common_schema(self, first: Handle) -> BatchSchema | None:
        """Compare the loaders and schemas of all ranks, before the first step; None if no rank has any batch."""
        schema, (invariants, error) = None, agree.attempt(self.rank_invariants)
        error = first.error or error
        if first.loaded is not None and error is None:
            schema, error = agree.attempt(functools.partial(_own_schema, first.loaded, self.batch_size))
        report = schema, agree.reported(error), invariants or {}
        schemas, errors, settings = zip(*metadata.all_gather_objects(self.group, report), strict=True)
        agree.raise_reported_errors(errors)
        agree.check_settings(settings)  # before schemas, which can differ because a setting does
        return agree.common_schema(schemas, self.config.batch_size)

    def _gather_metadata(
        self, schema: BatchSchema, steps: Sequence[Handle], cost: Cost
    ) -> tuple[metadata.StepMetadata, Sequence[Sequence[str | None]]]:
        """Return the metadata of n steps, [n, W], and of each rank the error of each; none if no rank has any."""
        invariants, error = agree.attempt(self.rank_invariants)
        shared = {name: value for name, value in (invariants or {}).items() if name != "rank"}
        loader_hash = metadata.hash63(repr(shared).encode())
        message, raised = read_steps(steps, schema, cost, world_size=self.group.world_size, error=error)
        message[: len(steps)]["loader_hash"] = loader_hash
        message[: len(steps)]["cost_decisions"] = self.costs.decide(self._num_planned + len(steps))
        known = metadata.started_steps(metadata.all_gather_bytes(self.group, message.view(np.uint8)), schema)
        self._num_decisions = int(known["cost_decisions"].max(initial=self._num_decisions))
        errors: Sequence[Sequence[str | None]] = []
        if known["status"].any():
            errors = metadata.all_gather_objects(self.group, [agree.reported(error) for error in raised])
        if not known[0]["status"].any() and (known[0]["loader_hash"] != loader_hash).any():
            agree.check_settings(metadata.all_gather_objects(self.group, invariants or {}))
        return known, errors


def _rows_of(known: metadata.StepMetadata) -> list[NDArray[np.int64]]:
    """Return the costs and the tokens, [W, n * B], and the lengths, [W, K, n * B], of the rows of steps, [n, W]."""
    names = ("costs", "tokens", "lengths")
    return [np.concatenate([*known[name]], axis=-1, dtype=np.int64) for name in names]  # contiguous


def _own_schema(batch: JaggedBatch, batch_size: int) -> BatchSchema:
    """Return the schema of a first batch, which may be the shorter one at the end of an epoch."""
    schema = schema_of(batch)
    pickle.dumps(schema)
    empty_batch(schema)  # needed once this rank has no more batches
    return dataclasses.replace(schema, batch_size=max(schema.batch_size, batch_size))


def _own_batch(step: Handle, schema: BatchSchema, known: metadata.StepMetadata) -> JaggedBatch:
    """Return this rank's batch of a step that some rank has a batch of."""
    if step.loaded is not None:
        return step.loaded
    place = {name: metadata.common_word(known, name) for name in ("epoch", "step", "position")}
    return empty_batch(schema).replace(**place)


def read_steps(
    steps: Sequence[Handle], schema: BatchSchema, cost: Cost, *, world_size: int, error: Exception | None
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
            of_rows, errors[index] = agree.attempt(functools.partial(check_contents, batch, schema))
            if of_rows is not None:
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
        of_samples = scaled_costs(cost, by_key, num_candidates, samples_per_step=world_size * size)
        tokens_of_samples = count_tokens(cost, by_key, len(num_candidates))
        end = 0
        for index, count in zip(indices, counts, strict=True):
            start, end = end, end + count
            costs[index, :count], tokens[index, :count] = of_samples[start:end], tokens_of_samples[start:end]

    # An error of all steps together is that of a step, which is found by asking for each alone.
    if with_samples and agree.attempt(functools.partial(fill_in, [*with_samples]))[1] is not None:
        for index in with_samples:
            _, errors[index] = agree.attempt(functools.partial(fill_in, [index]))
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
    return metadata.hash63(repr(schema).encode())
