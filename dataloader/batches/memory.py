"""`Memory`: where the tensors of a loader's batches are: on the CPU, pinned there, or on a CUDA device.

A training thread that is bound by the host waits for every call between two steps, also for those that only enqueue
work: to upload a batch takes it several times as long as a thread that makes one batch after another, whose code and
data stay in its core's caches. So the thread that makes batches uploads them too: all that it makes together in one
copy, on a stream of its own, and it waits until they are there. Nothing is left to the training thread.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batches.batch import Batch

_ALIGNMENT = 16  # bytes, of each array in a buffer


class Memory:
    """Where batches are handed out. Any thread may place them.

    Args:
        device: None or `cpu`, or a CUDA device.
        pins: whether tensors on the CPU are in pinned memory.

    Raises:
        ConfigError: there is no such device, or none to pin memory for.
    """

    def __init__(self, device: torch.device | str | None = None, *, pins: bool = False) -> None:
        self._device = resolve_device(device)
        if pins and not torch.accelerator.is_available():
            raise ConfigError("pin_memory=True, but PyTorch finds no device on this host; leave pin_memory out")
        self._pins = pins
        self._stream = torch.cuda.Stream(self._device) if self.is_device else None
        self._consumer: torch.Stream | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Memory, self._device, pins=self._pins), ()  # a stream is of one process

    @property
    def is_device(self) -> bool:
        """Whether it is that of a CUDA device."""
        return self._device.type == "cuda"

    def begin(self) -> None:
        """Take the current stream for the one that uses what is placed from now on."""
        if self.is_device:
            self._consumer = torch.cuda.current_stream(self._device)

    def place(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Return contiguous arrays as tensors, once they are there. Pinned or on a device, they share one buffer."""
        if not self.is_device and not self._pins:
            return [torch.from_numpy(array) for array in arrays]
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=True)
        for part, array in zip(_split(buffer, sizes, arrays), arrays, strict=True):
            part.numpy()[...] = array
        if self._stream is None:
            return _split(buffer, sizes, arrays)
        with torch.cuda.stream(self._stream):  # a stream is a context manager of one thread alone
            placed = buffer.to(self._device, non_blocking=True)
            if self._consumer is not None:
                placed.record_stream(self._consumer)
            tensors = _split(placed, sizes, arrays)
            self._stream.synchronize()
        return tensors

    def move(self, batch: Batch) -> Batch:
        """Return a batch that a transform has made, once it is there."""
        if self._stream is None:
            return batch.pin_memory() if self._pins else batch
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # on which the transform computes
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._device)
            if self._consumer is not None:
                moved.record_stream(self._consumer)
            self._stream.synchronize()
        return moved

    def hand_out(self, batch: Batch) -> Batch:
        """Return a placed batch, which the current stream uses."""
        if self.is_device and (stream := torch.cuda.current_stream(self._device)) != self._consumer:
            batch.record_stream(stream)
        return batch


def _split(buffer: Tensor, sizes: Sequence[int], arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Return the parts of a buffer, uint8 [sum(sizes)], with the dtypes and shapes of these arrays."""
    parts = zip(buffer.split(list(sizes)), arrays, strict=True)
    return [part[: array.nbytes].view(_dtype_of(array)).view(array.shape) for part, array in parts]


def _dtype_of(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return a device, the CPU for None and with an index for CUDA; a ConfigError if this host has no such device."""
    try:
        target = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}, which PyTorch does not know; pass cpu or cuda") from error
    if target.type == "cpu":
        return target
    if target.type != "cuda":
        raise ConfigError(f"device is {device}; batches can be on cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {device}, but PyTorch finds no CUDA device on this host; pass device=None")
    if target.index is not None and target.index >= (count := torch.cuda.device_count()):
        raise ConfigError(f"device is {device}, but this host has {count} CUDA devices; pass cuda:0..{count - 1}")
    return torch.device("cuda", torch.cuda.current_device() if target.index is None else target.index)


HOST = Memory()
"""The CPU."""
