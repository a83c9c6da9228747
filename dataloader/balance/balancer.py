"""`Balancer`: an iterator over batches that gives every rank an equal share of each step's work.

A step passes through three states:

    start    this rank's sizes are gathered with the others', and a plan is made: in a background thread, on a CPU group
    launch   the batch is packed and its exchange begins, on a communicator of its own
    finish   the exchange is waited for; the balanced batch is there

Iterating starts steps up to `lookahead` ahead and launches step t+1 before it hands out step t. Every rank does so at
the same points: step t+lookahead is started exactly when step t is handed out, and a rank whose data have run out, or
whose loader has failed, takes part in the gathers like any other, so that nobody waits for it in vain.
"""

import contextlib
import dataclasses
import enum
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import torch

from evenrank.core.errors import ConfigError, EvenrankError, RankError
from evenrank.dataloader.balance.control.all_gather import make_gather
from evenrank.dataloader.balance.control.process_group import Channel, is_distributed, rank_and_world_size
from evenrank.dataloader.balance.cost import Cost
from evenrank.dataloader.balance.exchange.device import make_carrier
from evenrank.dataloader.balance.exchange.exchange import EXCHANGES, Exchange, InFlight, Prepared
from evenrank.dataloader.balance.metrics import StepMetrics
from evenrank.dataloader.balance.step_planner import Planned, Planner, Settings
from evenrank.dataloader.balance.warmup import compile_ahead
from evenrank.dataloader.batch import JaggedBatch

Batch = TypeVar("Batch", bound=JaggedBatch)


class State(enum.StrEnum):
    """What was done to a step last."""

    STARTED = "started"
    LAUNCHED = "launched"
    FINISHED = "finished"


@dataclass(kw_only=True, slots=True)
class Handle:
    """A step on its way through `start`, `launch` and `finish`."""

    state: State = State.STARTED
    planned: "Future[tuple[Planned, Prepared | None]]"
    flight: InFlight | None = None
    waited_seconds: float = 0.0  # for a plan that was not ready
    exchange_seconds: float = 0.0  # to pack, to wait for the collective, to unpack


class Balancer(Generic[Batch]):
    """Balances every step over all ranks of the default process group; iterate over it instead of over the loader.

    Same samples, each once: balancing changes who trains a sample. Every rank must make its Balancer and iterate over
    it alike. Without an initialised process group it is the only rank.

    Args:
        batches: this rank's batches, dataclasses derived from JaggedBatch, all of one schema; iterated over once an
            epoch. Ranks may have different numbers of them.
        cost: what a sample costs; see `evenrank.dataloader.balance.cost`.
        strategy: `lpt-swap` balances best; `min-move` moves the least to come within `tolerance`; `karmarkar-karp` is
            the usual way; `identity` moves nothing. See `partition`.
        tolerance: how far above the lower bound the heaviest rank is good enough, as a part of it.
        max_tokens_per_rank: a limit to the tokens of a rank in a step, for the sake of memory. A sample's tokens are
            what `cost.tokens(lengths)` says, if the cost has that, else the sum of its lengths over all keys.
        on_overflow: where that limit cannot be kept: `raise` on all ranks, or `warn`.
        topology: hosts and ranks per host, for ranks that are numbered host after host: samples then go from host to
            host only where the hosts are uneven, and `strategy` is for the ranks of each. None: all ranks are alike.
        exchange: `all-to-all`, or `all-gather`, which moves more and gives the same.
        device: where batches are exchanged, and where those that it yields are: None and `cpu`, over Gloo, or a CUDA
            device, over NCCL. Batches that it gets are on the CPU all the same, in any memory. The exchange of the next
            step begins when the current stream, and the device's default one, have done what they were given before.
            Memory is made on a thread of its own, so CUDA graphs are to be captured with `thread_local` errors.
        lookahead: for how many steps sizes are gathered ahead, at least 1. On a GPU each of them takes memory of four
            times its batch; with `all-gather`, of three batches and those of all ranks.
        timeout: how long a rank waits for the others before it gives up.
        on_step: called on the consumer's thread with the metrics of each step before its batch is handed out; see
            `evenrank.dataloader.balance.writers`.

    Raises:
        ConfigError: an argument is out of its range.
        RankError: an argument is out of its range on another rank, or differs between ranks.

    """

    def __init__(
        self,
        batches: Iterable[Batch],
        *,
        cost: Cost,
        strategy: str = "lpt-swap",
        tolerance: float = 0.001,
        max_tokens_per_rank: int | None = None,
        on_overflow: str = "raise",
        topology: tuple[int, int] | None = None,
        exchange: str = "all-to-all",
        device: torch.device | str | None = None,
        lookahead: int = 2,
        timeout: timedelta = timedelta(minutes=30),
        on_step: Callable[[StepMetrics], None] | None = None,
    ) -> None:
        self._batches = batches
        self._lookahead = lookahead
        self._on_step = on_step
        compile_ahead()
        rank, world_size = rank_and_world_size()
        # Made here, in this order, by all ranks: gathers and exchanges overlap, so each has a communicator of its own.
        self._gather = make_gather(timeout)
        self._carrier = make_carrier(device)
        self._channel = Channel(timeout, backend=self._carrier.backend) if is_distributed() else None
        # One thread: gathers of successive steps must not overtake each other.
        self._background = ThreadPoolExecutor(
            1, thread_name_prefix="evenrank-balancer", initializer=self._carrier.adopt_thread
        )
        self._exchange: Exchange | None = None
        self._closed = False
        settings = Settings(
            strategy=strategy,
            tolerance=tolerance,
            max_tokens_per_rank=max_tokens_per_rank,
            on_overflow=on_overflow,
            topology=topology,
            exchange=exchange,
            lookahead=lookahead,
        )
        self._planner = Planner(
            batches, cost=cost, settings=settings, gather=self._gather, rank=rank, world_size=world_size
        )
        try:
            self._planner.settle(EXCHANGES)
        except EvenrankError:
            self.close()
            raise
        self._exchange = EXCHANGES[exchange](self._channel, self._carrier)
        self._exchange.connect()

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
                # All ranks learn here that one has failed, before any of them waits for what another has sent.
                self._await_plan(started[0])
                self._unpack(launched[0])
                launched.append(self.launch(started.popleft()))
                # What is the user's may raise on one rank alone, so it comes after the collective.
                yield self._hand_out(launched.popleft())
        except RankError as error:
            # Ranks may not have launched the same steps: what is under way ends with the groups, and those end with
            # the last reference to them, some of which are in frames that the traceback keeps.
            launched.clear()
            traceback.clear_frames(error.__traceback__)
            self.close()
            raise
        finally:
            _drain([*launched, *started])

    def start(self, batch: Batch | None) -> Handle:
        """Begin a step: gather its sizes and plan it in the background.

        Args:
            batch: this rank's, on the CPU; None once its data have run out.

        """
        return Handle(planned=self._background.submit(self._plan, batch, None))

    def launch(self, handle: Handle) -> Handle:
        """Wait for the plan and begin the exchange.

        Finish step t before step t+1 is launched: on a GPU, step t is unpacked after what was launched before that.

        Raises:
            RankError: some rank failed or ranks disagree; on every rank, with that rank's own words.
            ConfigError: it has been launched already.

        """
        _expect(handle, State.STARTED, "launched once, after it is started")
        prepared = self._await_plan(handle)
        handle.state = State.LAUNCHED
        if prepared is not None and self._exchange is not None:
            begun = time.perf_counter()
            handle.flight = self._exchange.launch(prepared)
            handle.exchange_seconds = time.perf_counter() - begun
        return handle

    def finish(self, handle: Handle) -> Batch | None:
        """Wait for the exchange and return the balanced batch; None if no rank had data left.

        Raises:
            ConfigError: it has not been launched, or has been finished already.

        """
        _expect(handle, State.LAUNCHED, "finished once, after it is launched")
        self._unpack(handle)
        return None if handle.flight is None else self._hand_out(handle)

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
        self._background.shutdown()
        self._gather.close()
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_plan(self, handle: Handle) -> Prepared | None:
        begun = time.perf_counter()
        _, prepared = handle.planned.result()
        handle.waited_seconds += time.perf_counter() - begun
        return prepared

    def _unpack(self, handle: Handle) -> None:
        handle.state = State.FINISHED
        if handle.flight is not None and self._exchange is not None:
            begun = time.perf_counter()
            self._exchange.finish(handle.flight)
            handle.exchange_seconds += time.perf_counter() - begun

    def _hand_out(self, handle: Handle) -> Batch:
        assert handle.flight is not None
        batch = handle.flight.prepared.balanced()
        metrics = handle.planned.result()[0].metrics
        if self._on_step is not None and metrics is not None:
            self._on_step(
                dataclasses.replace(
                    metrics, exchange_seconds=handle.exchange_seconds, waited_seconds=handle.waited_seconds
                )
            )
        return cast(Batch, batch)

    def _start_next(self, source: Iterator[Batch]) -> Handle:
        batch, error = None, None
        try:
            batch = next(source, None)
        except Exception as raised:  # the loader's own: all ranks are told of it in this step's gather
            error = raised
        return Handle(planned=self._background.submit(self._plan, batch, error))

    def _plan(self, batch: JaggedBatch | None, error: Exception | None) -> tuple[Planned, Prepared | None]:
        with self._carrier.marked("start"):
            planned = self._planner.plan(batch, error)
            if planned.plan is None or planned.batch is None or self._exchange is None:
                return planned, None
            return planned, self._exchange.prepare(planned.batch, planned.plan)


def _expect(handle: Handle, state: State, rule: str) -> None:
    if handle.state != state:
        raise ConfigError(f"a step is {rule}; this one is {handle.state}")


def _drain(handles: Iterable[Handle]) -> None:
    """Wait for plans, and for transfers on the CPU, so that the ranks' collectives stay in step.

    What they say no longer matters. On a GPU collectives follow each other on their stream, without the host.
    """
    for handle in handles:
        with contextlib.suppress(Exception):
            handle.planned.result()
        if handle.flight is not None and handle.flight.transfer is not None:
            with contextlib.suppress(RuntimeError):
                handle.flight.transfer.wait()
