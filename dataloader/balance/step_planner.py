"""The background part of a step: all-gather its metadata, plan it, prepare its exchange, and confirm the plan.

Every rank takes part in every all-gather, even if its loader failed or has no more batches, so that no rank waits for
one that left, and an error reaches all ranks.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import one_line
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.cost import count_tokens, scaled_costs
from evenrank.dataloader.balance.exchange.exchange import PreparedStep
from evenrank.dataloader.balance.exchange.plan import Plan, make_plan, sample_bytes
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics, measure_step
from evenrank.dataloader.balance.partition.strategies import partition
from evenrank.dataloader.balance.ranks import consistency, metadata
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.padding import empty_batch, pad_batch
from evenrank.dataloader.batches.schema import BatchSchema, lengths_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """A step after planning. All fields are None if no rank has batches left."""

    plan: Plan | None = None
    batch: JaggedBatch | None = None  # this rank's batch before balancing; empty if it has no more
    prepared: PreparedStep | None = None  # its exchange, ready to be launched
    metrics: StepMetrics | None = None  # if they are measured; the times of the exchange are 0


@dataclass(slots=True, eq=False)
class StepPlanner:
    """Plans one step after the other, together with all other ranks."""

    rank_invariants: Callable[[], Mapping[str, Any]]  # settings of its loader that must be the same on all ranks
    _: KW_ONLY
    config: BalanceConfig
    all_gather: metadata.MetadataAllGather
    prepare: Callable[[JaggedBatch, Plan], PreparedStep]  # its errors reach all ranks before anything is sent
    rank: int
    world_size: int
    is_measured: bool  # whether steps have metrics: they are only computed where somebody reads them
    _schema: BatchSchema | None = field(default=None, init=False)
    _schema_hash: int = field(default=0, init=False)

    def plan(self, batch: JaggedBatch | None, error: Exception | None) -> PlannedStep:
        """All-gather the metadata of a step, plan and prepare it. Collective: every rank must call this.

        `batch` is this rank's, on the CPU; None once it has no more, or if its loader has raised `error` instead.
        """
        started = time.perf_counter()
        if self._schema is None:
            common = self._common_schema(batch, error)
            if common is None:
                return PlannedStep()
            self._schema, self._schema_hash = common, metadata.hash63(common)
        batch, step = self._gather_metadata(self._schema, batch, error)
        gathered = time.perf_counter()
        ranks_with_data = np.flatnonzero(step.header("ended") == 0)
        if len(ranks_with_data) == 0:
            return PlannedStep()
        epoch, number, position = (int(step.header(name)[ranks_with_data[0]]) for name in ("epoch", "step", "position"))
        planned, failure = PlannedStep(), None
        try:
            if batch is None:
                batch = empty_batch(self._schema).replace(epoch=epoch, step=number, position=position)
            plan, metrics = self._plan(self._schema, step, epoch=epoch, step=number, gather_seconds=gathered - started)
            planned = PlannedStep(plan=plan, batch=batch, prepared=self.prepare(batch, plan), metrics=metrics)
        except Exception as raised:  # reported to all ranks
            failure = raised
        rank_of = None if planned.plan is None else planned.plan.rank_of
        step_name = f"step {number} of epoch {epoch}"
        consistency.confirm(self.all_gather, step.messages, rank_of, failure, step_name, self.config.strategy)
        return planned

    def _plan(
        self, schema: BatchSchema, known: metadata.StepMetadata, *, epoch: int, step: int, **measured: Any
    ) -> tuple[Plan, StepMetrics | None]:
        """Return this rank's plan for a step, and its metrics, among them those that were `measured` before."""
        started = time.perf_counter()
        costs, tokens, options = known.costs, known.tokens, self.config.options_of_step(epoch, step)
        assignment = partition(costs, len(costs), tokens=tokens, num_real=known.num_real, **options)
        plan = make_plan(schema, known, assignment, self.rank)
        if not self.is_measured:
            return plan, None
        measured["plan_seconds"] = time.perf_counter() - started
        lengths = known.lengths.transpose(1, 0, 2).reshape(len(schema.jagged_keys), costs.size)  # [K, W * B]
        num_bytes = np.where(assignment.rank_of >= 0, sample_bytes(schema, lengths).reshape(costs.shape), 0)
        measured |= {"epoch": epoch, "step": step, "is_balanced": self.config.balances(epoch, step)}
        return plan, measure_step(assignment, costs=costs, tokens=tokens, sample_bytes=num_bytes, **measured)

    def _common_schema(self, batch: JaggedBatch | None, error: Exception | None) -> BatchSchema | None:
        """Compare the loaders and schemas of all ranks, before the first step; None if no rank has any batch."""
        invariants, error = self._try_invariants(error)
        schema, error = consistency.report_schema(batch, error)
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

    def _gather_metadata(
        self, schema: BatchSchema, batch: JaggedBatch | None, error: Exception | None
    ) -> tuple[JaggedBatch | None, metadata.StepMetadata]:
        """Return this rank's batch, padded to the batch size of all ranks, and the metadata of a step.

        Raises on every rank if one of them has failed.
        """
        num_rows = 0 if batch is None else batch.batch_size
        costs = tokens = np.zeros(schema.batch_size, dtype=np.int64)
        lengths = np.zeros((len(schema.jagged_keys), schema.batch_size), dtype=np.int64)
        invariants, error = self._try_invariants(error)
        if batch is not None and error is None:
            try:
                consistency.check_batch(batch, schema, max_batch_size=self.config.batch_size)
                if num_rows <= schema.batch_size:
                    batch = pad_batch(batch, schema.batch_size)
                    lengths = lengths_of(batch)
                    costs, tokens = self._costs_and_tokens(batch, schema, lengths)
            except Exception as raised:  # reported to all ranks below
                error = raised
        header = metadata.Header(
            schema_hash=self._schema_hash,
            status=int(error is not None),
            ended=int(batch is None and error is None),
            num_real=0 if batch is None or error is not None else batch.num_real,
            num_rows=num_rows,
            epoch=0 if batch is None else batch.epoch,
            step=0 if batch is None else batch.step,
            position=0 if batch is None else batch.position,
            loader_hash=metadata.hash63({name: value for name, value in invariants.items() if name != "rank"}),
        )
        message = metadata.encode(header, schema, costs=costs, tokens=tokens, lengths=lengths)
        step = metadata.decode(self.all_gather.all_gather(message), schema)
        if step.header("status").any():
            text = None if error is None else one_line(error)
            consistency.raise_reported_errors(metadata.all_gather_objects(self.all_gather, text))
        if (step.header("loader_hash") != header.loader_hash).any():
            consistency.check_settings(metadata.all_gather_objects(self.all_gather, invariants))
        consistency.check_headers(step)
        longest = int(step.header("num_rows").max())
        if longest > schema.batch_size:  # its lengths did not fit into this rank's message, or another's
            longer = dataclasses.replace(schema, batch_size=longest)
            self._schema, self._schema_hash = longer, metadata.hash63(longer)
            return self._gather_metadata(longer, batch, error)
        return batch, step

    def _costs_and_tokens(
        self, batch: JaggedBatch, schema: BatchSchema, lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the cost and the tokens of each row, int64 [B], 0 for padding."""
        candidates = getattr(batch, "num_candidates", None)
        lengths_by_key = schema.lengths_by_key(lengths)
        costs = scaled_costs(
            self.config.cost,
            lengths_by_key,
            np.zeros(batch.batch_size, dtype=np.int64) if candidates is None else candidates.numpy(),
            num_real=batch.num_real,
            samples_per_step=self.world_size * batch.batch_size,
        )
        tokens = count_tokens(self.config.cost, lengths_by_key, batch.batch_size)
        tokens[batch.num_real :] = 0
        return costs, tokens
