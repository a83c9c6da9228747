"""The background part of a step: check that ranks are consistent, all-gather the step's metadata, and plan it.

Every rank takes part in every all-gather, even if its loader failed or has no more batches. So no rank waits for one
that left, and an error reaches all ranks.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import one_line
from evenrank.dataloader.balance.control.all_gather import MetadataAllGather, all_gather_objects
from evenrank.dataloader.balance.control.consistency import (
    check_batch,
    check_headers,
    check_settings,
    common_schema,
    raise_reported_errors,
    report_schema,
)
from evenrank.dataloader.balance.control.wire import (
    STATUS_FAILED,
    STATUS_OK,
    Header,
    StepMetadata,
    decode,
    encode,
    hash63,
)
from evenrank.dataloader.balance.cost import Cost, count_tokens, scaled_costs
from evenrank.dataloader.balance.exchange.plan import Plan, make_plan, sample_bytes
from evenrank.dataloader.balance.metrics import StepMetrics, measure_step
from evenrank.dataloader.balance.partition.strategies import Assignment, assign, real_rows
from evenrank.dataloader.balance.partition.two_level import assign_by_host
from evenrank.dataloader.balance.settings import BalancerSettings
from evenrank.dataloader.batch import JaggedBatch
from evenrank.dataloader.batch_schema import BatchSchema, lengths_of
from evenrank.dataloader.pad import empty_batch, pad_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """A step after planning."""

    plan: Plan | None
    """What this rank does; None if no rank has batches left."""

    batch: JaggedBatch | None
    """This rank's batch, an empty one if it has no more; None if no rank has batches left."""

    metrics: StepMetrics | None
    """What the plan achieves; None if no rank has batches left."""


NOTHING_LEFT = PlannedStep(plan=None, batch=None, metrics=None)


class StepPlanner:
    """Plans one step after the other, together with all other ranks.

    Args:
        identity: returns what this rank's loader must have in common with those of all others, by name.
        cost: what a sample costs.
        settings: how steps are balanced; the same on all ranks.
        all_gather: of all ranks.
        rank: this rank.
        world_size: the number of ranks.

    """

    def __init__(
        self,
        identity: Callable[[], Mapping[str, Any]],
        *,
        cost: Cost,
        settings: BalancerSettings,
        all_gather: MetadataAllGather,
        rank: int,
        world_size: int,
    ) -> None:
        self._identity = identity
        self._cost = cost
        self._settings = settings
        self._all_gather = all_gather
        self._rank = rank
        self._world_size = world_size
        self._schema: BatchSchema | None = None
        self._schema_hash = 0

    def plan(self, batch: JaggedBatch | None, error: Exception | None) -> PlannedStep:
        """All-gather the metadata of a step and plan it. Collective: every rank must call this.

        Args:
            batch: this rank's batch, on the CPU; None once it has no more.
            error: what the loader raised instead.

        Raises:
            RankError: a rank failed, or ranks are inconsistent.
            ConfigError: `max_tokens_per_rank` cannot be kept; on all ranks.

        """
        started = time.perf_counter()
        if self._schema is None:
            common = self._common_schema(batch, error)
            if common is None:
                return NOTHING_LEFT
            self._schema, self._schema_hash = common, hash63(common)
        batch, step = self._gather_metadata(self._schema, batch, error)
        schema = self._schema
        gathered = time.perf_counter()
        ranks_with_data = np.flatnonzero(step.header("ended") == 0)
        if len(ranks_with_data) == 0:
            return NOTHING_LEFT
        epoch, number, position = (int(step.header(name)[ranks_with_data[0]]) for name in ("epoch", "step", "position"))
        if batch is None:
            batch = empty_batch(schema).replace(epoch=epoch, step=number, position=position)
        is_real = real_rows(schema.batch_size, self._world_size, step.num_real)
        lengths = step.lengths.transpose(1, 0, 2).reshape(len(schema.jagged_keys), is_real.size)  # [K, W * B]
        tokens = count_tokens(self._cost, schema.lengths_by_key(lengths), is_real.size).reshape(is_real.shape)
        tokens = np.where(is_real, tokens, 0)
        assignment = self._assign(step, tokens)
        plan = make_plan(schema, step, assignment, self._rank)
        planned = time.perf_counter()
        topology = self._settings.topology
        metrics = measure_step(
            assignment,
            costs=step.costs,
            tokens=tokens,
            sample_bytes=np.where(is_real, sample_bytes(schema, lengths).reshape(is_real.shape), 0),
            ranks_per_host=None if topology is None else topology[1],
            epoch=epoch,
            step=number,
        )
        metrics = dataclasses.replace(metrics, gather_seconds=gathered - started, plan_seconds=planned - gathered)
        return PlannedStep(plan=plan, batch=batch, metrics=metrics)

    def _assign(self, step: StepMetadata, tokens: NDArray[np.int64]) -> Assignment:
        settings = self._settings.partition
        if self._settings.topology is None:
            return assign(step.costs, self._world_size, settings, tokens=tokens, num_real=step.num_real)
        return assign_by_host(step.costs, self._settings.topology, settings, tokens=tokens, num_real=step.num_real)

    def _common_schema(self, batch: JaggedBatch | None, error: Exception | None) -> BatchSchema | None:
        """Compare the loaders and schemas of all ranks, before the first step; None if no rank has any batch."""
        identity, error = self._try_identity(error)
        reports = all_gather_objects(self._all_gather, (report_schema(batch, error), identity))
        schema = common_schema([report for report, _ in reports], self._settings.batch_size)
        check_settings([identity for _, identity in reports])
        return schema

    def _try_identity(self, error: Exception | None) -> tuple[Mapping[str, Any], Exception | None]:
        """Return this rank's identity, and the error to report to all ranks."""
        try:
            return self._identity(), error
        except Exception as raised:
            return {}, error or raised

    def _gather_metadata(
        self, schema: BatchSchema, batch: JaggedBatch | None, error: Exception | None
    ) -> tuple[JaggedBatch | None, StepMetadata]:
        """All-gather the messages of a step; raise on every rank if one of them has failed.

        Returns:
            This rank's batch, padded to the batch size of all ranks, and the metadata.

        """
        num_rows = 0 if batch is None else batch.batch_size
        costs: NDArray[np.int64] = np.zeros(schema.batch_size, dtype=np.int64)
        lengths = np.zeros((len(schema.jagged_keys), schema.batch_size), dtype=np.int64)
        identity, error = self._try_identity(error)
        if batch is not None and error is None:
            try:
                check_batch(batch, schema, max_batch_size=self._settings.batch_size)
                if num_rows <= schema.batch_size:
                    batch = pad_batch(batch, schema.batch_size)
                    lengths = lengths_of(batch)
                    costs = self._costs(batch, schema, lengths)
            except Exception as raised:  # reported to all ranks below
                error = raised
        header = Header(
            schema_hash=self._schema_hash,
            status=STATUS_OK if error is None else STATUS_FAILED,
            ended=int(batch is None and error is None),
            num_real=0 if batch is None or error is not None else batch.num_real,
            num_rows=num_rows,
            epoch=0 if batch is None else batch.epoch,
            step=0 if batch is None else batch.step,
            position=0 if batch is None else batch.position,
            loader_hash=hash63({name: value for name, value in identity.items() if name != "rank"}),
        )
        step = decode(self._all_gather.all_gather(encode(header, schema, costs, lengths)), schema)
        if (step.header("status") != STATUS_OK).any():
            raise_reported_errors(all_gather_objects(self._all_gather, None if error is None else one_line(error)))
        if (step.header("loader_hash") != header.loader_hash).any():
            check_settings(all_gather_objects(self._all_gather, identity))
        check_headers(step)
        longest = int(step.header("num_rows").max())
        if longest > schema.batch_size:  # its lengths did not fit into this rank's message, or another's
            longer = dataclasses.replace(schema, batch_size=longest)
            self._schema, self._schema_hash = longer, hash63(longer)
            return self._gather_metadata(longer, batch, error)
        return batch, step

    def _costs(self, batch: JaggedBatch, schema: BatchSchema, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        candidates = getattr(batch, "num_candidates", None)
        return scaled_costs(
            self._cost,
            schema.lengths_by_key(lengths),
            np.zeros(batch.batch_size, dtype=np.int64) if candidates is None else candidates.numpy(),
            num_real=batch.num_real,
            world_size=self._world_size,
        )
