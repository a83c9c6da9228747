"""What happens to a step in the background: ranks compare what they have, gather its sizes, and plan it.

Every rank takes part in every gather, whatever befell its batch, so that nobody waits in vain and errors reach all.
"""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.control.all_gather import Gather, gather_objects
from evenrank.dataloader.balance.control.consistency import (
    check_batch,
    check_headers,
    check_introductions,
    check_settings,
    describe_cost,
    in_words,
    introduce,
    raise_failures,
)
from evenrank.dataloader.balance.control.wire import STATUS_FAILED, STATUS_OK, Header, StepSizes, decode, encode, hash63
from evenrank.dataloader.balance.cost import Cost, batch_costs, tokens_of
from evenrank.dataloader.balance.exchange.plan import Plan, make_plan, sample_bytes
from evenrank.dataloader.balance.metrics import StepMetrics, measure_step
from evenrank.dataloader.balance.partition.strategies import STRATEGIES, check_limits, partition
from evenrank.dataloader.balance.partition.two_level import check_topology, partition_by_host
from evenrank.dataloader.batch import BatchSchema, JaggedBatch, lengths_of
from evenrank.dataloader.pad import empty_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How steps are balanced; the same on all ranks. See `Balancer` and `partition`."""

    strategy: str
    tolerance: float
    max_tokens_per_rank: int | None
    on_overflow: str
    exchange: str
    lookahead: int
    topology: tuple[int, int] | None = None

    def check(self, exchanges: Any, world_size: int) -> None:
        """Check the values.

        Raises:
            ConfigError: one is out of its range.

        """
        for what, known in (("strategy", STRATEGIES), ("exchange", exchanges)):
            if (value := getattr(self, what)) not in known:
                raise ConfigError(f"no {what} is called {value!r}; there are {', '.join(known)}")
        if self.lookahead < 1:
            raise ConfigError(f"lookahead must be at least 1, got {self.lookahead}")
        check_limits(self.max_tokens_per_rank, self.on_overflow, self.tolerance)
        if self.topology is not None:
            check_topology(self.topology, world_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A step that can be launched."""

    plan: Plan | None  # None: no rank has data left
    batch: JaggedBatch | None  # this rank's; an empty one if its data have run out
    metrics: StepMetrics | None


class Planner:
    """Plans one step after the other, all ranks together.

    Args:
        batches: this rank's; asked for their `identity()`, if they have one.
        cost: what a sample costs.
        settings: how steps are balanced.
        gather: tells all ranks something.
        rank: this one.
        world_size: the number of ranks.

    """

    def __init__(
        self, batches: object, *, cost: Cost, settings: Settings, gather: Gather, rank: int, world_size: int
    ) -> None:
        self._batches = batches
        self._cost = cost
        self._settings = settings
        self._gather = gather
        self._rank = rank
        self._world_size = world_size
        self._schema: BatchSchema | None = None
        self._schema_hash = 0

    def settle(self, exchanges: Any) -> None:
        """Check the settings and compare them between ranks, before anybody waits for a rank that has none.

        Raises:
            ConfigError: they are wrong on this rank.
            RankError: they are wrong on another one, or differ.

        """
        error: ConfigError | None = None
        try:
            self._settings.check(exchanges, self._world_size)
        except ConfigError as raised:
            error = raised
        settings = {**dataclasses.asdict(self._settings), "cost": describe_cost(self._cost)}
        everybody = gather_objects(self._gather, (in_words(error), settings))
        if error is not None:
            raise error
        raise_failures([words for words, _ in everybody])
        check_settings([one for _, one in everybody])

    def plan(self, batch: JaggedBatch | None, error: Exception | None) -> Planned:
        """Gather the sizes of a step and plan it.

        Args:
            batch: this rank's, on the CPU; None once its data have run out.
            error: what its loader raised instead.

        Raises:
            RankError: some rank failed, or ranks disagree.
            ConfigError: `max_tokens_per_rank` cannot be kept; on all ranks.

        """
        begun = time.perf_counter()
        if self._schema is None:
            self._schema = self._agree(batch, error)
            if self._schema is None:
                return Planned(plan=None, batch=None, metrics=None)
            self._schema_hash = hash63(self._schema)
        schema = self._schema
        sizes = self._gather_sizes(schema, batch, error)
        gathered = time.perf_counter()
        going = np.flatnonzero(sizes.header("ended") == 0)
        if len(going) == 0:
            return Planned(plan=None, batch=None, metrics=None)
        epoch, step, position = (int(sizes.header(name)[going[0]]) for name in ("epoch", "step", "position"))
        if batch is None:
            batch = dataclasses.replace(empty_batch(schema), epoch=epoch, step=step, position=position)
        is_real = np.arange(schema.batch_size) < sizes.num_real[:, np.newaxis]
        flat = sizes.lengths.transpose(1, 0, 2).reshape(len(schema.jagged_keys), is_real.size)  # [K, W * B]
        tokens = np.where(is_real, tokens_of(self._cost, schema.named(flat), is_real.size).reshape(is_real.shape), 0)
        topology = self._settings.topology
        options: dict[str, Any] = {
            "strategy": self._settings.strategy,
            "sizes": tokens,
            "num_real": sizes.num_real,
            "max_tokens_per_rank": self._settings.max_tokens_per_rank,
            "on_overflow": self._settings.on_overflow,
            "tolerance": self._settings.tolerance,
        }
        if topology is None:
            assignment = partition(sizes.costs, self._world_size, **options)
        else:
            assignment = partition_by_host(sizes.costs, topology, **options)
        plan = make_plan(schema, sizes, assignment, self._rank)
        planned = time.perf_counter()
        metrics = measure_step(
            assignment,
            costs=sizes.costs,
            tokens=tokens,
            sizes=np.where(is_real, sample_bytes(schema, flat).reshape(is_real.shape), 0),
            ranks_per_host=None if topology is None else topology[1],
            epoch=epoch,
            step=step,
        )
        metrics = dataclasses.replace(metrics, gather_seconds=gathered - begun, plan_seconds=planned - gathered)
        return Planned(plan=plan, batch=batch, metrics=metrics)

    def _agree(self, batch: JaggedBatch | None, error: Exception | None) -> BatchSchema | None:
        """Compare all ranks' loaders and schemas, once; None if no rank has any batch."""
        everybody = gather_objects(self._gather, (introduce(batch, error), self._identity()))
        schema = check_introductions([introduction for introduction, _ in everybody])
        check_settings([identity for _, identity in everybody])
        return schema

    def _identity(self) -> dict[str, Any]:
        """Return what the loader says of itself, if it can."""
        identity: dict[str, Any] = getattr(self._batches, "identity", dict)()
        return identity

    def _gather_sizes(self, schema: BatchSchema, batch: JaggedBatch | None, error: Exception | None) -> StepSizes:
        """Exchange this step's messages; raise on every rank if a rank has failed."""
        costs: NDArray[np.int64] = np.zeros(schema.batch_size, dtype=np.int64)
        lengths = np.zeros((len(schema.jagged_keys), schema.batch_size), dtype=np.int64)
        if batch is not None and error is None:
            try:
                check_batch(batch, schema)
                lengths = lengths_of(batch)
                costs = batch_costs(self._cost, batch, schema.named(lengths), world_size=self._world_size)
            except Exception as raised:  # all ranks are told of it below
                error = raised
        header = Header(
            schema_hash=self._schema_hash,
            status=STATUS_OK if error is None else STATUS_FAILED,
            ended=int(batch is None and error is None),
            num_real=0 if batch is None or error is not None else batch.num_real,
            epoch=0 if batch is None else batch.epoch,
            step=0 if batch is None else batch.step,
            position=0 if batch is None else batch.position,
            data=hash63({name: value for name, value in self._identity().items() if name != "rank"}),
        )
        sizes = decode(self._gather.messages(encode(header, schema, costs, lengths)), schema)
        if (sizes.header("status") != STATUS_OK).any():
            raise_failures(gather_objects(self._gather, in_words(error)))
        if (sizes.header("data") != header.data).any():
            check_settings(gather_objects(self._gather, self._identity()))
        check_headers(sizes)
        return sizes
