"""The background part of steps: all-gather their metadata, plan them, prepare their exchange, and confirm the plans.

Every rank takes part in every all-gather, even if its loader failed or has no more batches, so that no rank waits for
one that left, and an error reaches all ranks.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import RankError, one_line
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.exchange.exchange import PreparedStep
from evenrank.dataloader.balance.exchange.fields import sample_bytes
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics, measure_step
from evenrank.dataloader.balance.own_steps import LoadedStep, read_steps
from evenrank.dataloader.balance.partition.strategies import partition
from evenrank.dataloader.balance.ranks import consistency, metadata
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.padding import empty_batch
from evenrank.dataloader.batches.schema import BatchSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """A step after planning. All fields are None if no rank has batches left."""

    prepared: PreparedStep | None = None  # its exchange, ready to be launched
    rank_of: NDArray[np.int32] | None = None  # [W, B]: see `Assignment`
    metrics: StepMetrics | None = None  # if they are measured; the times of the exchange are 0


class _Gathered(NamedTuple):
    """What is known of n steps after the all-gather of their metadata."""

    steps: Sequence[metadata.StepMetadata]
    errors: Sequence[Sequence[str | None]]  # of each rank, the error of each step; empty if no rank has any

    def check(self, index: int) -> None:
        """Raise a RankError if a rank has failed in a step, or ranks are not in the same one."""
        consistency.raise_reported_errors([errors[index] for errors in self.errors if index < len(errors)])
        consistency.check_headers(self.steps[index].headers)


@dataclass(slots=True, eq=False)
class StepPlanner:
    """Plans steps, together with all other ranks."""

    rank_invariants: Callable[[], Mapping[str, Any]]  # settings of its loader that must be the same on all ranks
    _: KW_ONLY
    config: BalanceConfig
    all_gather: metadata.MetadataAllGather
    prepare: Callable[[JaggedBatch, BatchSchema, NDArray[np.int32], NDArray[np.int64]], PreparedStep]
    world_size: int
    batch_size: int  # rows that a batch of this rank's loader can have; 0 if it does not tell
    is_measured: bool  # whether steps have metrics: they are only computed where somebody reads them
    _schema: BatchSchema | None = field(default=None, init=False)

    def plan(self, loaded: Sequence[LoadedStep]) -> list[PlannedStep | Exception]:
        """All-gather the metadata of steps, plan and prepare them. Collective: every rank must call this.

        Returns the steps up to the first that fails, and its error: on every rank, a RankError or its own.
        """
        started = time.perf_counter()
        if self._schema is None:
            self._schema = self._common_schema(loaded[0])
            if self._schema is None:
                return [PlannedStep() for _ in loaded]
        gathered = self._gather_metadata(self._schema, loaded)
        gather_seconds = (time.perf_counter() - started) / len(loaded)
        are_in_step = not gathered.errors and consistency.are_in_step(np.stack([one.headers for one in gathered.steps]))
        planned: list[PlannedStep] = []
        error, failure, num_steps = None, None, 0
        for index, step in enumerate(gathered.steps):
            if not are_in_step:
                try:
                    gathered.check(index)
                except RankError as raised:  # on all ranks
                    error = raised
                    break
                if step.header("ended").all():
                    break
            num_steps += 1
            if failure is None:
                try:
                    planned.append(self._plan(loaded[index].batch, self._schema, step, gather_seconds))
                except Exception as raised:  # reported to all ranks
                    failure = raised
        if num_steps:
            plans = [step.rank_of for step in planned if step.rank_of is not None]
            confirmation = consistency.confirm(self.all_gather, plans, failure, num_steps)
            for index, known in enumerate(gathered.steps[:num_steps] if not confirmation.are_same else ()):
                name = f"step {known.common('step')} of epoch {known.common('epoch')}"
                try:
                    confirmation.check(index, name, self.config.strategy)
                except Exception as raised:
                    return [*planned[:index], raised]
        if error is not None:
            return [*planned, error]
        return [*planned, *(PlannedStep() for _ in loaded[len(planned) :])]

    def _plan(
        self, batch: JaggedBatch | None, schema: BatchSchema, known: metadata.StepMetadata, gather_seconds: float
    ) -> PlannedStep:
        """Plan and prepare a step that some rank has a batch of."""
        started = time.perf_counter()
        epoch, step = known.common("epoch"), known.common("step")
        if batch is None:
            batch = empty_batch(schema).replace(epoch=epoch, step=step, position=known.common("position"))
        assignment = partition(
            known.costs,
            len(known.costs),
            tokens=known.tokens,
            num_real=known.num_real,
            **self.config.options_of_step(epoch, step),
        )
        prepared = self.prepare(batch, schema, assignment.rank_of, known.lengths)
        plan_seconds, metrics = time.perf_counter() - started, None
        if self.is_measured:
            lengths = known.lengths.transpose(1, 0, 2).reshape(len(schema.jagged_keys), -1)  # [K, W * B]
            num_bytes = sample_bytes(schema, lengths).reshape(known.costs.shape)
            metrics = measure_step(
                assignment,
                costs=known.costs,
                tokens=known.tokens,
                sample_bytes=np.where(assignment.rank_of >= 0, num_bytes, 0),
                epoch=epoch,
                step=step,
                is_balanced=self.config.balances(epoch, step),
                gather_seconds=gather_seconds,
                plan_seconds=plan_seconds,
            )
        return PlannedStep(prepared=prepared, rank_of=assignment.rank_of, metrics=metrics)

    def _common_schema(self, loaded: LoadedStep) -> BatchSchema | None:
        """Compare the loaders and schemas of all ranks, before the first step; None if no rank has any batch."""
        invariants, error = self._try_invariants(loaded.error)
        schema, error = consistency.report_schema(loaded.batch, error)
        if schema is not None:  # of a batch that may be the shorter one at the end of an epoch
            schema = dataclasses.replace(schema, batch_size=max(schema.batch_size, self.batch_size))
        report = schema, None if error is None else one_line(error), invariants
        schemas, errors, settings = zip(*metadata.all_gather_objects(self.all_gather, report), strict=True)
        consistency.raise_reported_errors(errors)
        consistency.check_settings(settings)  # before schemas, which can differ because a setting does
        return consistency.common_schema(schemas, self.config.batch_size)

    def _try_invariants(self, error: Exception | None) -> tuple[Mapping[str, Any], Exception | None]:
        try:
            return self.rank_invariants(), error
        except Exception as raised:
            return {}, error or raised

    def _gather_metadata(self, schema: BatchSchema, loaded: Sequence[LoadedStep]) -> _Gathered:
        """All-gather the metadata of steps."""
        invariants, invariants_error = self._try_invariants(None)
        loader_hash = metadata.hash63({name: value for name, value in invariants.items() if name != "rank"})
        known = metadata.Header(schema_hash=_hash_of(schema), loader_hash=loader_hash)
        own = read_steps(loaded, schema, self.config, world_size=self.world_size, common=known, error=invariants_error)
        message = metadata.encode(own.headers, schema, own.costs, own.tokens, own.lengths)
        steps = metadata.decode(self.all_gather.all_gather(message), schema)
        has_failed, errors = [step.header("status").any() for step in steps], []
        if any(has_failed):
            texts = [None if error is None else one_line(error) for error in own.errors]
            errors = metadata.all_gather_objects(self.all_gather, texts)
        if not has_failed[0] and (steps[0].header("loader_hash") != loader_hash).any():
            consistency.check_settings(metadata.all_gather_objects(self.all_gather, invariants))
        return _Gathered(steps, errors)


@functools.lru_cache
def _hash_of(schema: BatchSchema) -> int:
    return metadata.hash63(schema)
