"""`Balancer`: an iterator over batches that gives every rank an equal share of each step's work.

A step passes through three states:

    start    this rank's sizes are gathered with the others', and a plan is made: in a background thread, on a CPU group
    launch   the batch is packed and its exchange begins, on a communicator of its own
    finish   the exchange is waited for; the balanced batch is there

Iterating starts steps up to `lookahead` ahead and launches step t+1 before it finishes step t. Every rank does the same
at the same points: step t+lookahead is started exactly when step t is handed out, and a rank whose data have run out,
or whose loader has failed, takes part in the gathers like any other, so that nobody waits for it in vain.
"""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenrank.dataloader.balance.agreement import (
    check_batch,
    check_headers,
    check_introductions,
    check_settings,
    describe_cost,
    in_words,
    introduce,
    raise_failures,
)
from evenrank.dataloader.balance.cost import Cost, batch_costs
from evenrank.dataloader.balance.exchange import EXCHANGES, Exchange, InFlight, lost_ranks_reported
from evenrank.dataloader.balance.message import STATUS_FAILED, STATUS_OK, Header, StepSizes, decode, encode, hash63
from evenrank.dataloader.balance.metrics import StepMetrics, measure_step
from evenrank.dataloader.balance.partition import STRATEGIES, partition
from evenrank.dataloader.balance.plan import Plan, make_plan
from evenrank.dataloader.batch import BatchSchema, JaggedBatch, lengths_of
from evenrank.dataloader.pad import empty_batch
from evenrank.datasets.errors import ConfigError, EvenrankError, RankError

Batch = TypeVar("Batch", bound=JaggedBatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    """What the background thread hands over."""

    plan: Plan | None  # None: no rank has data left
    batch: JaggedBatch | None  # this rank's; an empty one if its data have run out
    metrics: StepMetrics | None


@dataclass(kw_only=True, slots=True)
class Handle:
    """A step on its way through `start`, `launch` and `finish`."""

    planned: "Future[_Planned]"
    flight: InFlight | None = None


class Balancer(Generic[Batch]):
    """Balances every step over all ranks of the default process group; iterate over it instead of over the loader.

    Same samples, each once: balancing changes who trains a sample. Every rank must make its Balancer and iterate over
    it alike. Without an initialised process group it is the only rank.

    Args:
        batches: this rank's batches, dataclasses derived from JaggedBatch, all of one schema; iterated over once an
            epoch. Ranks may have different numbers of them.
        cost: what a sample costs; see `evenrank.dataloader.balance.cost`.
        strategy: `lpt-swap`, `karmarkar-karp` or `identity`; see `partition`.
        exchange: `all-to-all`.
        lookahead: for how many steps sizes are gathered ahead, at least 1.
        timeout: how long a rank waits for the others before it gives up.
        on_step: called on the consumer's thread with the metrics of each step before its batch is handed out.

    """

    def __init__(
        self,
        batches: Iterable[Batch],
        *,
        cost: Cost,
        strategy: str = "lpt-swap",
        exchange: str = "all-to-all",
        lookahead: int = 2,
        timeout: timedelta = timedelta(minutes=30),
        on_step: Callable[[StepMetrics], None] | None = None,
    ) -> None:
        self._batches = batches
        self._cost = cost
        self._strategy = strategy
        self._lookahead = lookahead
        self._on_step = on_step
        self._schema: BatchSchema | None = None
        distributed = dist.is_available() and dist.is_initialized()
        self._rank, self._world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        # Made here, in this order, by all ranks: gathers and exchanges overlap, so each has a communicator of its own.
        self._gather_group = dist.new_group(backend="gloo", timeout=timeout) if distributed else None
        self._exchange_group = dist.new_group(backend="gloo", timeout=timeout) if distributed else None
        # One thread: gathers of successive steps must not overtake each other.
        self._background = ThreadPoolExecutor(1, thread_name_prefix="evenrank-balancer")
        self._closed = False
        try:
            self._settle({"strategy": strategy, "exchange": exchange, "lookahead": lookahead})
        except EvenrankError:
            self.close()
            raise
        self._exchange: Exchange | None = EXCHANGES[exchange](self._exchange_group)

    def _settle(self, settings: dict[str, Any]) -> None:
        """Check the arguments and compare them between ranks, before anybody waits for a rank that has none."""
        error: ConfigError | None = None
        for what, known in (("strategy", STRATEGIES), ("exchange", EXCHANGES)):
            if settings[what] not in known:
                error = ConfigError(f"no {what} is called {settings[what]!r}; there are {', '.join(known)}")
        if settings["lookahead"] < 1:
            error = ConfigError(f"lookahead must be at least 1, got {settings['lookahead']}")
        everybody = self._gather_objects((in_words(error), {**settings, "cost": describe_cost(self._cost)}))
        if error is not None:
            raise error
        raise_failures([words for words, _ in everybody])
        check_settings([one for _, one in everybody])

    def __len__(self) -> int:
        """Steps of an epoch, if the batches know."""
        return len(cast(Sized, self._batches))

    def __iter__(self) -> Iterator[Batch]:
        if self._closed:
            raise ConfigError("the Balancer is closed; make a new one")
        source = iter(self._batches)
        started: deque[Handle] = deque()
        launched: deque[Handle] = deque()
        try:
            started.extend(self._start_next(source) for _ in range(self._lookahead))
            launched.append(self.launch(started.popleft()))
            while launched[0].flight is not None:
                started.append(self._start_next(source))
                launched.append(self.launch(started.popleft()))
                batch = self.finish(launched.popleft())
                assert batch is not None
                yield batch
        except RankError:
            # Ranks may not have launched the same steps: what is under way ends when the groups do.
            launched.clear()
            raise
        finally:
            _drain([*launched, *started])

    def start(self, batch: Batch | None) -> Handle:
        """Begin a step: gather its sizes and plan it in the background.

        Args:
            batch: this rank's, on the CPU; None once its data have run out.

        """
        return Handle(planned=self._background.submit(self._gather_and_plan, batch, None))

    def launch(self, handle: Handle) -> Handle:
        """Wait for the plan and begin the exchange.

        Raises:
            RankError: some rank failed or ranks disagree; on every rank, with that rank's own words.

        """
        planned = handle.planned.result()
        if planned.plan is not None and planned.batch is not None and self._exchange is not None:
            handle.flight = self._exchange.launch(planned.batch, planned.plan)
        return handle

    def finish(self, handle: Handle) -> Batch | None:
        """Wait for the exchange and return the balanced batch; None if no rank had data left."""
        if handle.flight is None or self._exchange is None:
            return None
        metrics = handle.planned.result().metrics
        if self._on_step is not None and metrics is not None:
            self._on_step(metrics)
        return cast(Batch, self._exchange.finish(handle.flight))

    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the loader's position after a given batch; pass it, because batches are pulled ahead of training."""
        state: dict[str, Any] = cast(Any, self._batches).state_dict(after=after)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the loader continue, with the next iteration, where `state_dict` says."""
        cast(Any, self._batches).load_state_dict(state)

    def close(self) -> None:
        """End the background thread and the process groups; on all ranks alike. Closing twice does nothing."""
        self._closed = True
        self._exchange = None  # connections end with the last reference to their group
        self._background.shutdown()
        groups, self._gather_group, self._exchange_group = (self._gather_group, self._exchange_group), None, None
        for group in groups:
            if group is not None and dist.is_initialized():  # else they have ended with the default group
                dist.destroy_process_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_next(self, source: Iterator[Batch]) -> Handle:
        batch, error = None, None
        try:
            batch = next(source, None)
        except Exception as raised:  # the loader's own: all ranks are told of it in this step's gather
            error = raised
        return Handle(planned=self._background.submit(self._gather_and_plan, batch, error))

    def _gather_and_plan(self, batch: JaggedBatch | None, error: Exception | None) -> _Planned:
        begun = time.perf_counter()
        if self._schema is None:
            self._schema = self._agree(batch, error)
            if self._schema is None:
                return _Planned(plan=None, batch=None, metrics=None)
        schema = self._schema
        sizes = self._gather_sizes(schema, batch, error)
        gathered = time.perf_counter()
        if all(header.ended for header in sizes.headers):
            return _Planned(plan=None, batch=None, metrics=None)
        first = next(header for header in sizes.headers if not header.ended)
        if batch is None:
            batch = dataclasses.replace(
                empty_batch(schema), epoch=first.epoch, step=first.step, position=first.position
            )
        assignment = partition(sizes.costs, self._world_size, strategy=self._strategy, num_real=sizes.num_real)
        plan = make_plan(schema, sizes, assignment, self._rank)
        metrics = measure_step(
            sizes, assignment, gather_seconds=gathered - begun, plan_seconds=time.perf_counter() - gathered
        )
        return _Planned(plan=plan, batch=batch, metrics=metrics)

    def _agree(self, batch: JaggedBatch | None, error: Exception | None) -> BatchSchema | None:
        """Compare all ranks' loaders and schemas, once; None if no rank has any batch."""
        everybody = self._gather_objects((introduce(batch, error), self._identity()))
        schema = check_introductions([introduction for introduction, _ in everybody])
        check_settings([identity for _, identity in everybody])
        return schema

    def _identity(self) -> dict[str, Any]:
        """Return what the loader says of itself, if it can."""
        identity: dict[str, Any] = getattr(self._batches, "identity", dict)()
        return identity

    def _gather_sizes(self, schema: BatchSchema, batch: JaggedBatch | None, error: Exception | None) -> StepSizes:
        """Exchange this step's messages; raise on every rank if a rank has failed."""
        costs = np.zeros(schema.batch_size, dtype=np.int64)
        lengths = np.zeros((len(schema.jagged_keys), schema.batch_size), dtype=np.int64)
        if batch is not None and error is None:
            try:
                check_batch(batch, schema)
                lengths = lengths_of(batch)
                costs = batch_costs(self._cost, batch, schema.named(lengths), world_size=self._world_size)
            except Exception as raised:  # all ranks are told of it below
                error = raised
        header = Header(
            schema_hash=hash63(schema),
            status=STATUS_OK if error is None else STATUS_FAILED,
            ended=int(batch is None and error is None),
            num_real=0 if batch is None or error is not None else batch.num_real,
            epoch=0 if batch is None else batch.epoch,
            step=0 if batch is None else batch.step,
            position=0 if batch is None else batch.position,
            data=hash63({name: value for name, value in self._identity().items() if name != "rank"}),
        )
        sizes = decode(self._gather(encode(header, schema, costs, lengths)), schema)
        if any(one.status != STATUS_OK for one in sizes.headers):
            raise_failures(self._gather_objects(in_words(error)))
        if any(one.data != header.data for one in sizes.headers):
            check_settings(self._gather_objects(self._identity()))
        check_headers(sizes.headers)
        return sizes

    def _gather(self, message: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self._gather_group is None:
            return message[np.newaxis]
        messages = torch.empty((self._world_size, len(message)), dtype=torch.uint8)
        with lost_ranks_reported():
            dist.all_gather(list(messages), torch.from_numpy(message), group=self._gather_group)
        gathered: NDArray[np.uint8] = messages.numpy()
        return gathered

    def _gather_objects(self, mine: Any) -> list[Any]:
        gathered = [mine] * self._world_size
        if self._gather_group is not None:
            with lost_ranks_reported():
                dist.all_gather_object(gathered, mine, group=self._gather_group)
        return gathered


def _drain(handles: Iterable[Handle]) -> None:
    """Wait for all that is under way, so that the ranks' collectives stay in step; what it says no longer matters."""
    for handle in handles:
        with contextlib.suppress(Exception):
            handle.planned.result()
        if handle.flight is not None and handle.flight.transfer is not None:
            with contextlib.suppress(RuntimeError):
                handle.flight.transfer.wait()
