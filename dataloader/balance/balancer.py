"""`Balancer`: an iterator over batches that gives every rank an equal share of each step's work.

A step goes through three states:

    start    in a background thread, over a CPU group: all-gather the step's metadata, plan it, confirm the plan
    launch   upload the samples, and start the exchange on a communicator of its own
    finish   wait for the exchange, and fill the balanced batch

Iterating starts steps up to `lookahead` ahead, several at a time, and launches step t+1 before it hands out step t.
Every rank does this at the same points, and a rank that has no more batches, or whose loader failed, takes part in the
all-gathers like any other, so no rank waits for one that left.
"""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar, cast

import torch

from evenrank.core.errors import ConfigError, RankError
from evenrank.core.settings import check_types
from evenrank.dataloader.balance.config import MAX_STEPS, BalanceConfig, timeout_of
from evenrank.dataloader.balance.exchange.device import ExchangeDevice, make_device
from evenrank.dataloader.balance.exchange.exchange import Exchange, Handle
from evenrank.dataloader.balance.exchange.exchange import warm_up as warm_up_exchange
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics
from evenrank.dataloader.balance.packing import warm_up as warm_up_packing
from evenrank.dataloader.balance.partition.strategies import warm_up
from evenrank.dataloader.balance.ranks.agree import RankReport, handshake
from evenrank.dataloader.balance.ranks.connection import SCALING, Connection, check_process
from evenrank.dataloader.balance.ranks.process_group import Group, Members, members_of, within
from evenrank.dataloader.balance.refit import CostSchedule
from evenrank.dataloader.balance.source import LoaderAdapter
from evenrank.dataloader.balance.step_planner import StepPlanner
from evenrank.dataloader.balance.steps_ahead import StepsAhead, drain
from evenrank.dataloader.balance.steps_in_hand import MOST_IN_HAND
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.tensors import suppress_fx_tracing_warning
from evenrank.dataloader.state.node import EpochNode
from evenrank.dataloader.state.resume_point import Position, warn_of_rest

Batch = TypeVar("Batch", bound=JaggedBatch)
Observe = Callable[[StepMetrics], None]


def _check(
    batches: Iterable[Batch], config: BalanceConfig, device: torch.device | str | None, members: Members
) -> tuple[tuple[ExchangeDevice, LoaderAdapter[Batch], Observe | None, CostSchedule], RankReport]:
    """Check this rank's arguments; return what is made of them, and what ranks compare before they create groups."""
    check_types(Balancer, {"config": config})
    config.check(exchanges=True)
    warm_up(config.strategy, limits_tokens=config.max_tokens_per_rank is not None)
    warm_up_exchange()
    if config.pack:
        warm_up_packing()
    ahead = config.lookahead + MAX_STEPS + (MOST_IN_HAND if config.makes_steps else 0)
    source = LoaderAdapter(batches, config, rank=members.rank, world_size=members.world_size, ahead=ahead)
    exchange_device = make_device(device)
    costs = CostSchedule.of(config, members, members.world_size)  # for which it may take steps here
    observe = config.observer(members.rank, exchanges=True, data=source.rank_invariants)
    settings = config.rank_invariants(exchanges=True) | {"device": exchange_device.device.type}
    report = RankReport(settings=settings, hardware=exchange_device.hardware, num_batches=source.length())
    return (exchange_device, source, observe, costs), report


class Balancer(EpochNode[Batch], Generic[Batch]):
    """Balances every step over the ranks of a process group; iterate over it instead of over the loader.

    A step has the same samples as before balancing, each once; only the ranks that train on them change. With `window`
    or `pack`, samples may change steps too. Every rank of the group must create its Balancer and iterate over it in the
    same way.

    Args:
        batches: this rank's batches on the CPU, pinned or not: dataclasses derived from JaggedBatch, with one schema;
            iterated over once per epoch. Ranks may have different numbers of batches.
        config: how steps are balanced.
        device: where batches are exchanged and the balanced batches are: None or `cpu`, over Gloo, or a CUDA device,
            over NCCL. The exchange of the next step starts once the current stream and the device's default stream
            have completed the work enqueued so far. Buffers are allocated on a background thread, so capture CUDA
            graphs with `capture_error_mode="thread_local"`.
        group: the data-parallel ranks: a process group, or a device mesh of one dimension such as `mesh["dp"]`. Its
            members get communicators of their own. None: the default process group or, without one, this process
            alone. Ranks in messages and logs are those of this group. If a rank passes another group, the others wait
            for it until `timeout`.

    Raises:
        ConfigError: an option or the loader is invalid.
        RankError: an option or a loader is invalid on another rank, or an option differs between ranks.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        config: BalanceConfig,
        *,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        suppress_fx_tracing_warning()  # before the batches of any other loader
        members = members_of(group, timeout := timeout_of(config))
        made, num_steps = handshake(lambda: _check(batches, config, device, members), members, timeout)
        self._device, self._source, self._observe, costs = made
        self._current = self._source.current
        # The rank with the most batches has so many more than this one, in epochs of other lengths too.
        self._num_more = None if num_steps is None else num_steps - (self._source.length() or 0)
        backend, use_in_thread = self._device.backend, self._device.use_in_thread
        self._connection = Connection(members, config.timeout, backend, use_in_thread)
        with self._connection.aborting():
            group_of_exchange = self._connection.exchange_group
            self._exchange = Exchange(config.exchange, group_of_exchange, self._device, rank=members.rank)
            within(config.timeout, self._exchange.connect)  # NCCL connects through the store, in its first collective
        self._planner = StepPlanner(
            self._source.rank_invariants,
            config=config,
            group=self._connection.metadata_group,
            prepare=self._exchange.prepare,
            batch_size=self._source.batch_size,
            is_measured=self._observe is not None,
            costs=costs,
        )

    def __len__(self) -> int:
        """Return the steps of the next epoch: the batches of the rank with the most. A TypeError without a length.

        Packed steps are not counted, because their number follows from samples that are not loaded.
        """
        self._source.check_counted()
        if self._num_more is None:
            raise TypeError("the loader has no length, on this rank or on another one")
        return (self._source.length() or 0) + self._num_more

    def remaining_batches(self) -> int:
        """Return the steps of the next iteration of this rank's loader: fewer than `len` after `load_state_dict`.

        Raises a TypeError if the loader does not know its length.
        """
        if (remaining := self._source.remaining_batches()) is None:
            raise TypeError("the loader has no remaining_batches")
        return remaining

    def rank_invariants(self) -> dict[str, Any]:
        """Return the settings of the loader, as the loader describes them."""
        return self._source.rank_invariants()

    def __iter__(self) -> Iterator[Batch]:
        self._connection.check_open()
        if self._source.is_left():
            warn_of_rest(self._current.after_last)
        if self._config.makes_steps:
            self._connection.submit(self._planner.begin, self._source.begin())
        source = iter(self._source)
        ahead = StepsAhead(lambda: self._load(source), self._start, self._config, self._await_steps)
        launched: deque[Handle] = deque()
        try:
            launched.append(self.launch(ahead.take()))
            while launched[0].layout is not None:
                following = ahead.take()
                # All ranks learn of a failure here, before any of them waits for samples that were never sent.
                self._await_plan(following)
                self._unpack(launched[0])
                launched.append(self._launch(following))
                # User code can raise on one rank alone, so it runs after the collective was launched on all ranks.
                yield self._hand_out(launched.popleft(), is_last=launched[-1].layout is None)
        except GeneratorExit:
            # Other ranks may go on, and wait for samples, up to the next all-gather, which tells them.
            with contextlib.suppress(Exception):
                while ahead.await_group():
                    pass
                for handle in ahead.started:
                    handle.await_plan()
                for handle in ahead.started:
                    if handle.layout is not None:
                        self._exchange.launch(handle)
                        handle.work = None  # not awaited, because a rank may be in another collective
            raise
        except RankError as error:
            # Ranks may have launched different steps, so nothing is awaited; what is in flight ends with the groups.
            launched.clear()
            self._connection.close_after(error)
            raise
        except Exception as error:  # possibly on this rank alone
            # All ranks have launched the same steps, so these can complete.
            drain([*launched, *ahead.started])
            self._connection.fail(error)
            raise
        finally:
            drain([*launched, *ahead.started])

    def start(self, batch: Batch | None) -> Handle:
        """Start a step: all-gather its metadata and plan it in the background. Collective: every rank must call this.

        `batch` is this rank's, on the CPU; None once it has no more. A ConfigError if the Balancer is closed, or makes
        steps of several batches.
        """
        self._connection.check_open()
        if self._config.makes_steps:
            raise ConfigError("start() plans one step alone; iterate over the Balancer, or leave out window and pack")
        if batch is not None:
            self._source.is_bypassed = True
            batch = batch.clone()  # the caller may fill its buffers again before the background reads them
        self._start([handle := Handle(batch)])
        return handle

    def launch(self, handle: Handle) -> Handle:
        """Wait for the plan and start the exchange. Collective: every rank must call this.

        Finish step t before launching step t+1: on a GPU, finishing a step waits for everything launched before.

        Raises:
            RankError: a rank failed, or ranks are inconsistent; on every rank, with the failed rank's message.
        """
        handle.check("launch", "started")
        self._await_plan(handle)
        return self._launch(handle)

    def finish(self, handle: Handle) -> Batch | None:
        """Wait for the exchange of a launched step and return the balanced batch; None if no rank had batches left."""
        handle.check("finish", "launched")
        self._unpack(handle)
        if handle.batch is None:
            return None
        try:
            return self._hand_out(handle, is_last=False)
        except Exception as error:
            self._connection.fail(error)
            raise

    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the position after a batch that was handed out.

        If the loader's `state_dict` takes `after` as well, as a Loader's does, this is its state, which resumes on any
        number of ranks. Otherwise it is the state that the loader had when the batch was pulled; every rank saves and
        loads its own, on the same number of ranks. So it is in the middle of a window, or within a batch that packed
        steps divide, unless samples are those of `build_loader` or of an ElasticSampler.

        Args:
            after: the batch, of which only `epoch` and `position` are used; the one trained last if something pulls
                batches ahead of training. None: the one handed out last.

        Raises:
            ConfigError: the loader has no state.
            StateError: the batch was handed out too long ago.
        """
        return self._source.state_after(after)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue from a state that `state_dict` returned; a StateError if it is invalid."""
        self._source.load_state(state)

    def _start_next(self, *, skip_rest: bool) -> None:
        self._source.start_next(skip_rest=skip_rest)

    def close(self) -> None:
        """End the background thread and the process groups; on every rank. Closing twice does nothing."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._connection.close()
        else:
            self._connection.abort()

    def _await_steps(self, loaded: Handle) -> Sequence[Handle]:
        """Wait for the steps that those which were started with a loaded one have become."""
        started = time.perf_counter()
        with self._connection.watching():
            check_process(loaded.process)
            assert loaded.group is not None
            made = loaded.group.result()
        for step in made[:1]:
            step.waited_seconds += time.perf_counter() - started
        return made

    def _await_plan(self, handle: Handle) -> None:
        started = time.perf_counter()
        with self._connection.watching():
            handle.await_plan()
        handle.waited_seconds += time.perf_counter() - started

    def _launch(self, handle: Handle) -> Handle:
        handle.state = "launched"
        if handle.layout is not None:
            started = time.perf_counter()
            with self._connection.watching():
                self._exchange.launch(handle)
            handle.exchange_seconds = time.perf_counter() - started
        return handle

    def _unpack(self, handle: Handle) -> None:
        handle.state = "finished"
        if handle.layout is not None:
            started = time.perf_counter()
            with self._connection.watching():
                self._exchange.finish(handle)
            handle.exchange_seconds += time.perf_counter() - started

    def _hand_out(self, handle: Handle, *, is_last: bool) -> Batch:
        """Return the batch of a step, after which `state_dict` returns the position after it."""
        batch, metrics = cast(Batch, handle.batch), handle.metrics
        handle.batch = None  # others of its group refer to it until they are launched
        SCALING.watch()
        self._source.hand_out(Position(batch.epoch, batch.position), handle.left)
        if is_last:
            self._source.end_epoch()
        if self._observe is not None and metrics is not None:
            exchanged, waited = handle.exchange_seconds, handle.waited_seconds
            self._observe(dataclasses.replace(metrics, exchange_seconds=exchanged, waited_seconds=waited))
        return batch

    def _load(self, source: Iterator[Batch]) -> Handle:
        self._connection.check_open()  # before a batch is pulled
        try:
            return Handle(next(source, None))
        except Exception as error:  # the loader's own error, which this step's all-gather reports to all ranks
            return Handle(None, error)

    def _start(self, steps: Sequence[Handle]) -> None:
        """Start steps whose metadata is gathered at once."""
        group = self._connection.submit(self._planner.plan, steps)
        for step in steps:
            step.group = group
