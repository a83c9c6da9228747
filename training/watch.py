"""Watchdogs of a training process.

`FiniteCheck`: a loss that is NaN or infinite on one rank raises an error on all of them. A rank that raised alone would
leave the others waiting for its gradients. So in each step ranks reduce one flag on a side stream, which each of them
reads in the next step, while the GPU runs the next forward. `StallWatch` is for steps that do not end, `MemoryWatch`
for a GPU that fills up.
"""

import atexit
import contextlib
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from evenrank.core.errors import ConfigError, RankError
from evenrank.core.rules import Bounds, Positive
from evenrank.core.settings import check_types
from evenrank.dataloader.balance.ranks.agree import gather_checked
from evenrank.dataloader.balance.ranks.process_group import Group, Members, members_of, process_group_of, within
from evenrank.dataloader.batches.batch import JaggedBatch

GIB = 2**30
STORE_TIMEOUT = timedelta(seconds=5)
_NAMED_RANKS = 16  # in a message; further ranks are counted only
_MAX_NAMED = 64  # ids and losses in a message; further ones are counted only
_PERIOD = 1.0  # seconds from one check of the heartbeats to the next, at most

_log = logging.getLogger("evenrank")


class FiniteCheck:
    """Raises on all ranks once the loss of one of them is NaN or infinite.

        check = FiniteCheck()
        for batch in balancer:
            loss_sums = model(batch)
            check.update(loss_sums, batch)
            scale_loss(loss_sums, batch).sum().backward()
            ...
        check.finish()

    The error comes one step late, when the weights of all ranks may be NaN already, because gradients are averaged. The
    message names the first such step. Call `finish` before saving a checkpoint.

    Each step costs an all-reduce of 4 bytes, on a GPU on a side stream. The device is never synchronized: in step t
    the host waits at most for the forward of step t - 1 on all ranks, so it runs less than two steps ahead of the GPU.

    `group` has all ranks of the job, tensor-parallel ones included; None: the default process group or, without one,
    this process alone.
    """

    def __init__(self, *, group: Group | None = None) -> None:
        self._group = process_group_of(group)
        self._rank = 0 if self._group is None else dist.get_rank()
        self._pending: _Pending | None = None
        self._side_stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def update(self, loss_sums: Tensor, batch: JaggedBatch) -> None:
        """Check the loss of this step, and raise if the loss of the step before was not finite. Collective.

        `loss_sums` are the argument or the result of `scale_loss`, of any shape.

        Raises:
            RankError: a loss was not finite on some rank; on every rank. The message names the first such rank, the
                epoch and step, the losses and, where batches have a field `sample_ids`, the samples.
        """
        self.finish()
        sample_ids = dict(batch.tensors()).get("sample_ids")
        # Copies, because the caller may overwrite its tensors, and a view would keep the whole batch allocated.
        losses = loss_sums.clone()
        ids = sample_ids[: batch.num_real].clone() if isinstance(sample_ids, Tensor) else None
        is_set, is_copied = self._reduce((~losses.isfinite()).any().to(torch.int32))
        place = f"rank {self._rank} in epoch {batch.epoch}, step {batch.step}"
        self._pending = _Pending(is_set, is_copied, losses, ids, batch.num_real, place)

    @torch.no_grad()
    def finish(self) -> None:
        """Check the last step too, like `update`: after training, and before a checkpoint. Collective."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.is_copied is not None:
            pending.is_copied.synchronize()
        if not pending.is_set.item():
            return
        reports = gather_checked({}, pending.report(), self._group)
        first, *others = [report for report in reports if report is not None]
        also = f"; it is one of {1 + len(others)} such ranks" if others else ""
        raise RankError(
            f"{first}{also}; load a checkpoint of an earlier step, as the weights may have been trained with it since"
        )

    def _reduce(self, flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        # Returns whether any rank's flag is 1, in host memory, and the event after which that is valid.
        if flag.is_cuda and self._side_stream is None:
            self._side_stream = torch.cuda.Stream(flag.device)
        stream = self._side_stream
        if stream is not None:
            # The training stream does not wait for ranks whose forward takes longer.
            stream.wait_stream(torch.cuda.current_stream(flag.device))
            flag.record_stream(stream)
        with torch.cuda.stream(stream):  # None changes nothing
            if self._group is not None:
                work = dist.all_reduce(flag, dist.ReduceOp.MAX, self._group, async_op=True)
                assert work is not None
                work.wait()
            on_host = torch.empty((), dtype=flag.dtype, device="cpu", pin_memory=flag.is_cuda)
            on_host.copy_(flag, non_blocking=True)
            return on_host, None if stream is None else stream.record_event()


class _Pending(NamedTuple):
    """A step of this rank whose flag has not been read."""

    is_set: Tensor  # int32 scalar in host memory: 1 if the loss of some rank is not finite
    is_copied: torch.cuda.Event | None  # after which that is valid; None: at once
    losses: Tensor
    sample_ids: Tensor | None  # without padding; None if batches have none
    num_samples: int
    place: str  # rank in the job, epoch and step

    def report(self) -> str | None:
        """Describe this rank's loss unless it is finite; synchronizes with the device."""
        num_bad = int((~self.losses.isfinite()).sum())
        if num_bad == 0:
            return None
        losses: object = self.losses.tolist()
        if (num_losses := self.losses.numel()) > _MAX_NAMED:
            losses = f"not finite in {num_bad} of {num_losses} entries"
        if self.sample_ids is None:
            samples = f"its {self.num_samples} samples have no ids"
        else:
            ids = self.sample_ids.tolist()
            more = f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
            samples = f"its samples are {', '.join(map(str, ids[:_MAX_NAMED])) or 'none'}{more}"
        return f"the loss of {self.place} is {losses}; {samples}"


class Arrivals:
    """The number of heartbeats of each rank, published in the store of their group; for one thread."""

    def __init__(self, members: Members) -> None:
        self.rank = members.rank
        self._world_size = members.world_size
        self._shared = None if members.store is None else members.substore("heartbeats")
        self._store: Store | None = None
        self._published = 0

    def publish(self, count: int) -> None:
        """Publish the heartbeats of this rank, if there are new ones."""
        if (shared := self._shared) is None or count == self._published:
            return
        try:
            if self._store is None:
                # A connection of its own: training may wait in the other one, which serves one thread at a time.
                self._store = within(STORE_TIMEOUT, lambda: shared.clone())  # type: ignore[attr-defined]
            store = self._store
            within(STORE_TIMEOUT, lambda: store.set(str(self.rank), str(count)))
            self._published = count
        except RuntimeError:  # the store is lost with the process that serves it
            self._shared = self._store = None

    def line(self, count: int) -> str | None:
        """Describe the ranks that are behind, given the heartbeats of this one; None if the store is not available."""
        if (store := self._store) is None:
            return None
        with contextlib.suppress(RuntimeError):
            # Adding nothing reads a number without waiting for a rank that has not published one.
            counts = within(STORE_TIMEOUT, lambda: [store.add(str(rank), 0) for rank in range(self._world_size)])
            counts[self.rank] = count
            return arrivals_line(counts)
        return None


def arrivals_line(counts: Sequence[int]) -> str:
    """Describe the ranks that have not arrived at the latest heartbeat, given the heartbeats of each rank."""
    latest = max(counts)
    behind = [f"{rank} (at {count:,})" for rank, count in enumerate(counts) if count < latest]
    if not behind:
        return f"all {len(counts)} ranks have arrived at heartbeat {latest:,}"
    more = f" and {len(behind) - _NAMED_RANKS} more" if len(behind) > _NAMED_RANKS else ""
    named = ", ".join(behind[:_NAMED_RANKS])
    return f"{len(behind)} of {len(counts)} ranks have not arrived at heartbeat {latest:,}: {named}{more}"


class StallWatch(contextlib.AbstractContextManager["StallWatch"]):
    """Reports the stacks of a process and the ranks that others wait for when heartbeats stop.

        with StallWatch(seconds=300) as watch:
            for batch in balancer:
                loss = model(batch)
                watch.beat()  # before this rank waits for the others
                loss.backward()

    The first heartbeat arms it. If none follows for `seconds`, a background thread writes the stacks of all Python
    threads to standard error, and the ranks that are behind the furthest one. The next heartbeat arms it again.

    Call `beat` equally often on all ranks, where each has done its own part of a step and is about to wait: after the
    step, in which all wait for one another, no rank is behind. The background thread publishes heartbeats in the store
    of the group, about once a second; a heartbeat itself takes less than a microsecond and waits for nothing. A rank
    without a watch, or whose background thread is stopped by an extension that keeps the GIL, counts as behind.

    Args:
        seconds: longer than any step, evaluation or checkpoint between two heartbeats; see `disarm`.
        group: the ranks that wait for one another; None: the default process group or, without one, this process alone.
        file: written to instead of standard error, as long as it has a file descriptor.

    Raises:
        RankLostError: the store of the group does not respond.
    """

    def __init__(self, seconds: Positive = 300.0, *, group: Group | None = None, file: TextIO | None = None) -> None:
        check_types(StallWatch, {"seconds": seconds})
        self._alarm = Alarm(seconds)
        self._arrivals = Arrivals(members_of(group, STORE_TIMEOUT, "stall-watch"))
        self._file = file
        self._period = min(_PERIOD, seconds / 4)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self) -> None:
        """Record that this rank makes progress."""
        self._alarm.beat(time.monotonic())
        if self._thread is None:
            if self._closing.is_set():
                raise ConfigError("the StallWatch is closed; create another one")
            self._thread = threading.Thread(target=self._watch, name="evenrank-stall-watch", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def disarm(self) -> None:
        """Expect no heartbeat until the next one comes, as during an evaluation of unknown length."""
        self._alarm.disarm()

    def close(self) -> None:
        """End the background thread. Closing twice does nothing."""
        self._closing.set()
        atexit.unregister(self.close)
        if self._thread is not None:
            # It may be waiting for a store whose server is lost; it is a daemon, so it ends with the process.
            self._thread.join(timeout=2 * _PERIOD)
            self._thread = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._closing.wait(self._period):
            self._arrivals.publish(self._alarm.count)
            if self._alarm.rings(time.monotonic()):
                # On a full disk or a closed pipe, heartbeats of this rank still count for the others.
                with contextlib.suppress(OSError, ValueError):
                    self._report()

    def _report(self) -> None:
        if (file := _with_descriptor(self._file) or _with_descriptor(sys.stderr) or sys.__stderr__) is None:
            return
        rank, count = self._arrivals.rank, self._alarm.count
        file.write(
            f"evenrank: rank {rank} has had no heartbeat for {self._alarm.seconds:g} s, since heartbeat {count:,}; "
            "the stacks of its threads:\n"
        )
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        # After the stacks, because the process that serves the store may hang as well.
        if (line := self._arrivals.line(count)) is not None:
            file.write(f"evenrank: rank {rank}: {line}\n")
        file.flush()


class Alarm:
    """Rings once if there is no heartbeat for `seconds`, and again only after another heartbeat."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._beat: tuple[int, float | None] = (0, None)  # one object, which threads exchange without a lock
        self._rung_at = 0

    @property
    def count(self) -> int:
        """Heartbeats so far."""
        return self._beat[0]

    def beat(self, now: float) -> None:
        """Record a heartbeat; times are in seconds."""
        self._beat = (self._beat[0] + 1, now)

    def disarm(self) -> None:
        """Do not ring before the next heartbeat."""
        self._beat = (self._beat[0], None)

    def rings(self, now: float) -> bool:
        """Return whether a stall is noticed."""
        count, last = self._beat
        if last is None or now - last < self.seconds or count == self._rung_at:
            return False
        self._rung_at = count
        return True


def _with_descriptor(file: TextIO | None) -> TextIO | None:
    # faulthandler cannot write to a closed file, nor to the stderr of a notebook.
    try:
        return file if file is not None and file.fileno() >= 0 else None
    except (OSError, ValueError, AttributeError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUsage:
    """Memory of a GPU, in bytes, as seen by this process."""

    allocated: int
    """By tensors."""
    reserved: int
    """By the caching allocator: allocated, or kept for later."""
    free: int
    """On the device, for any process."""
    total: int
    """Of the device."""

    @property
    def unallocated(self) -> int:
        """Memory that the caching allocator keeps for later."""
        return self.reserved - self.allocated

    def reason_to_release(self, *, min_free_gib: float, max_unallocated: float) -> str | None:
        """Return the reason to release the cache, by the limits of a `MemoryWatch`; None: no reason, or no cache."""
        if self.unallocated > max_unallocated * self.total:
            return f"more than {max_unallocated:.0%} of the device is reserved but unallocated"
        if self.free < min_free_gib * GIB and self.unallocated > 0:
            return f"less than {min_free_gib:g} GiB is free"
        return None

    def line(self) -> str:
        """Return it as a line of a log."""
        sizes = (self.allocated, self.reserved, self.free, self.total)
        return "memory: {:.1f} GiB allocated, {:.1f} reserved, {:.1f} free of {:.1f}".format(*(n / GIB for n in sizes))


class MemoryWatch:
    """Reports the memory of a GPU, and releases the caching allocator's cache before others run out of memory.

    Reserved but unallocated memory is not available to NCCL, and may be in pieces too small for the next step.
    It is released if less than `min_free_gib` GiB is free on the device, or more than the share `max_unallocated` of it
    is reserved but unallocated; with 0 and 1, never. A ConfigError: no GPU, or a limit out of range.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        min_free_gib: Annotated[float, Bounds(at_least=0)] = 2.0,
        max_unallocated: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.5,
    ) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda":
            raise ConfigError(f"device is {device}; memory is watched on cuda")
        limits = {"min_free_gib": min_free_gib, "max_unallocated": max_unallocated}
        self._limits = check_types(MemoryWatch, limits)

    def usage(self) -> MemoryUsage:
        """Return the current usage, without waiting for the device."""
        free, total = torch.cuda.mem_get_info(self._device)
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        return MemoryUsage(allocated=allocated, reserved=reserved, free=free, total=total)

    def check(self) -> MemoryUsage:
        """Return the usage, after releasing the cache if necessary, which waits for the device and logs a warning."""
        before = self.usage()
        if (reason := before.reason_to_release(**self._limits)) is None:
            return before
        torch.cuda.empty_cache()
        after = self.usage()
        released = (before.reserved - after.reserved) / GIB
        _log.warning("%s; %s, so %.1f GiB of cache were released", before.line(), reason, released)
        return after
