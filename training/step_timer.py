"""`StepTimer`: how long each rank computes in a step, and how long it then waits for the others.

Ranks leave the collective that ends a step together. So a step has two spans: until a rank has done its own part, and
from there until the next such collective ends. The rank that waits least is the slowest one.
"""

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Count
from evenrank.core.settings import check_types
from evenrank.dataloader.balance.costs.measured_cost import MeasuredCost
from evenrank.dataloader.balance.metrics.step_metrics import RankTimes, StepMetrics
from evenrank.dataloader.balance.metrics.writers import BeginsRun
from evenrank.dataloader.balance.ranks.process_group import Group, members_of, within

_STORE_TIMEOUT = timedelta(seconds=60)
_MAX_UNTRAINED = 1000  # steps: more than any pipeline has in flight


class Clock:
    """Marks points in time on a device.

    Marks are CUDA events in the current stream, which in a backward pass is that of the forward pass; on the CPU, whose
    work is done when a call returns, they are times of the host.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def mark(self) -> Any:
        """Return a mark that the device passes after all work so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, mark: Any) -> bool:
        """Return whether the device has passed a mark, without waiting for it."""
        return self._device.type != "cuda" or bool(mark.query())

    def milliseconds(self, start: Any, stop: Any) -> float:
        """Return the time between two marks that have been passed."""
        return float(start.elapsed_time(stop) if self._device.type == "cuda" else 1e3 * (stop - start))

    def wait(self) -> None:
        """Wait until all marks have been passed."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class StepTimer:
    """Measures each rank's time to compute and to wait, and passes steps on to writers with these times.

        timer = StepTimer(*writers, device=device)      # writers on rank 0, none on the others
        loader = build_loader(..., balance=BalanceConfig(cost=cost, on_step=timer))
        for batch in loader:
            loss = scale_loss(model(batch), batch)
            timer.watch(loss)
            loss.backward()                             # in which DistributedDataParallel waits for the other ranks
            optimizer.step()
        timer.close()

    Times are of CUDA events, which are read when the device has passed them, or of the host's clock: nothing waits for
    the device. Collectives of the forward and backward pass count as computing, unless `watch` is told otherwise. Ranks
    exchange times through the store of their group every few steps, without a collective. The first step is not
    measured, nor the first one after `restart`. Each batch is a step: train on every batch that is handed out, or call
    `drop_untrained` where the loop leaves an iteration before it has.

    With `BalanceConfig(refit_every=N)`, the cost is fitted to these times: `timer.cost` is the MeasuredCost fitted
    last, the same on all ranks; None before.

    Args:
        writers: called on rank 0 with the metrics of each step, in their order, up to two intervals late: an `on_step`
            of any kind, such as `JsonLines`.
        device: where steps are trained.
        every: steps from one exchange of times to the next; the value on rank 0 counts.
        group: the ranks that wait for one another; None: the default process group or, without one, this process alone.

    Raises:
        ConfigError: `every` is below 1.
        RankLostError: the store of the group does not respond.
    """

    def __init__(
        self,
        *writers: Callable[[StepMetrics], None],
        device: torch.device | str = "cpu",
        every: Count = 50,
        group: Group | None = None,
    ) -> None:
        check_types(StepTimer, {"every": every})
        for writer in writers:
            check_types(StepTimer, {"writers": writer})
        self._clock = Clock(device)
        self._members = members_of(group, _STORE_TIMEOUT, "step-timer")
        self._writers = writers if self._members.rank == 0 else ()
        self._store = HashStore() if self._members.store is None else self._members.substore("times")
        self._every = every if self._members.rank == 0 else 0  # until that of rank 0 is known
        if self._every:
            within(_STORE_TIMEOUT, partial(self._store.set, "every", str(every)))
        self._last_release: Any = None
        self._arrival: Any = None
        self._marks: deque[tuple[Any, Any, Any]] = deque()  # release before, arrival and release of each step
        self._planned: deque[StepMetrics] = deque()
        self._untrained = 0  # of these
        self._closed = False
        self._kept: deque[NDArray[np.float64]] | None = None  # [4, W] of each step, as RankTimes has them
        self.cost: MeasuredCost | None = None
        # Blocks of `every` steps; a rank's last block, which may be empty, has fewer.
        self._published = 0
        self._merged: float = 0  # infinity after a last block

    def begin(self, options: Mapping[str, Any]) -> None:
        """Take the options of the run; see `metrics.writers.BeginsRun`."""
        for writer in self._writers:
            if isinstance(writer, BeginsRun):
                writer.begin(options)

    def keep(self, steps: int, *, world_size: int) -> None:
        """Keep the times of the last steps from now on, at most so many, to which the cost is fitted.

        A ConfigError if the timer measures other ranks, or has measured steps that nobody took.
        """
        if world_size != self._members.world_size:
            raise ConfigError(
                f"steps are balanced over {world_size} ranks, but the StepTimer measures {self._members.world_size}; "
                "pass both the same group"
            )
        if self._kept is None and self._members.rank == 0:
            if not self._writers and (self._published or self._marks):
                raise ConfigError("the StepTimer was used before, without writers; create another one for this loader")
            self._writers = (*self._writers, self._keep)
        self._kept, self.cost = deque(maxlen=steps), None

    def kept(self) -> RankTimes:
        """Return the times of all ranks in the measured steps that are kept, on rank 0. Any thread may call it."""
        assert self._kept is not None
        return RankTimes(*np.array(tuple(self._kept)).reshape(-1, 4, self._members.world_size).transpose(1, 0, 2))

    @property
    def takes_steps(self) -> bool:
        """Whether the metrics of steps are taken on this rank: on rank 0, if anybody reads them."""
        return bool(self._writers)

    def _keep(self, metrics: StepMetrics) -> None:
        if self._kept is not None and metrics.compute_seconds is not None:
            of_ranks = metrics.after, metrics.rank_tokens, metrics.rank_squares, metrics.compute_seconds
            self._kept.append(np.array(of_ranks, dtype=np.float64))

    def __call__(self, metrics: StepMetrics) -> None:
        """Take the metrics of the next step, before it is trained.

        A ConfigError if many steps are taken and none is measured.
        """
        if not self.takes_steps:
            return
        self._planned.append(metrics)
        self._untrained += 1
        if self._untrained > _MAX_UNTRAINED:
            raise ConfigError(
                f"{self._untrained} steps were taken and not measured; call watch(loss) or waiting() in each step"
            )

    def watch(self, loss: Tensor, *, until: Tensor | None = None) -> None:
        """Measure the step whose gradients `loss.backward()` computes; the wait is that after its last gradient.

        Where ranks wait for one another within the backward pass, as in the exchange of sharded embeddings, pass as
        `until` the tensor whose gradient a rank computes last by itself, such as the embeddings.

        A ConfigError if the loss needs no gradient.
        """
        if not loss.requires_grad:
            raise ConfigError(
                "the loss requires no gradient, so it has no backward pass to watch; use waiting() instead"
            )
        if until is None:
            loss.register_hook(lambda _: _after_backward(self._arrive))
        else:
            until.register_hook(lambda _: self._mark_arrival())
            # After those of DistributedDataParallel, which are added while the backward pass runs.
            loss.register_hook(lambda _: _after_backward(partial(_after_backward, self._release)))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a step whose ranks wait for one another within this context, such as in an all-reduce."""
        self._mark_arrival()
        yield
        self._release()

    def restart(self) -> None:
        """Do not count the time until the next step, for example of an evaluation or a checkpoint."""
        self._last_release = None

    def drop_untrained(self) -> None:
        """Forget the steps whose batches were handed out and will not be trained on."""
        for _ in range(self._untrained):
            self._planned.pop()
        self._untrained = 0

    def close(self) -> None:
        """Write the steps that are left. Waits for the device and, on rank 0, for the times of all ranks.

        Steps that other ranks have not trained are left out. Closing twice does nothing.
        """
        if not self._closed:
            self._closed = True
            self._clock.wait()
            self._every = self._every or int(within(_STORE_TIMEOUT, partial(self._store.get, "every")))
            self._publish(final=True)
            self._merge(final=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()

    def _mark_arrival(self) -> None:
        self._arrival = self._clock.mark()

    def _arrive(self) -> None:
        self._mark_arrival()
        _after_backward(self._release)  # after those of DistributedDataParallel, which wait for the gradients

    def _release(self) -> None:
        release = self._clock.mark()
        self._untrained = max(self._untrained - 1, 0)
        self._marks.append((self._last_release, self._arrival, release))
        self._last_release = release
        if not self._every and within(_STORE_TIMEOUT, partial(self._store.check, ["every"])):
            self._every = int(self._store.get("every"))  # rank 0 has created its timer
        if 0 < self._every <= len(self._marks):
            self._publish()
            self._merge()

    def _publish(self, *, final: bool = False) -> None:
        """Publish the times of blocks of steps, milliseconds [steps, 2]; NaN where a step was not measured."""
        while final or (len(self._marks) >= self._every and self._clock.has_passed(self._marks[self._every - 1][-1])):
            marks = [self._marks.popleft() for _ in range(min(self._every, len(self._marks)))]
            times = np.array([self._times(*of_step) for of_step in marks])
            key, value = f"{self._published}/{self._members.rank}", times.tobytes().hex()
            within(_STORE_TIMEOUT, partial(self._store.set, key, value))
            self._published += 1
            final = final and len(marks) == self._every

    def _times(self, before: Any, arrival: Any, release: Any) -> tuple[float, float]:
        computing = math.nan if before is None else self._clock.milliseconds(before, arrival)
        return computing, self._clock.milliseconds(arrival, release)

    def _merge(self, *, final: bool = False) -> None:
        """Pass on the steps of the blocks that all ranks have published; in the end, wait for them."""
        while self._merged < self._published and self._members.rank == 0:
            keys = [f"{self._merged}/{rank}" for rank in range(self._members.world_size)]
            if not final and not within(_STORE_TIMEOUT, partial(self._store.check, keys)):
                return
            blocks = within(_STORE_TIMEOUT, partial(self._take, keys))
            times = [np.frombuffer(bytes.fromhex(block.decode())).reshape(-1, 2) / 1e3 for block in blocks]
            steps = min(map(len, times))
            for compute, wait in np.array([of_rank[:steps] for of_rank in times]).transpose(1, 2, 0):
                if self._planned:
                    self._write(self._planned.popleft(), compute, wait)
            self._merged = self._merged + 1 if steps == self._every else math.inf

    def _take(self, keys: list[str]) -> list[bytes]:
        """Remove values from the store, and return them. Waits for keys that are missing."""
        values: list[bytes] = self._store.multi_get(keys)
        for key in keys:
            self._store.delete_key(key)
        return values

    def _write(self, metrics: StepMetrics, compute: NDArray[np.float64], wait: NDArray[np.float64]) -> None:
        if not np.isnan(compute).any():
            metrics = dataclasses.replace(metrics, compute_seconds=compute, wait_seconds=wait)
        for writer in self._writers:
            writer(metrics)


def _after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that runs, after those that were added before."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
