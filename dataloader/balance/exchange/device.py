"""Where an exchange runs: on the CPU, or on a GPU on a side stream next to the training."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.exchange import gpu_copy
from evenrank.dataloader.balance.exchange.layout import ALIGNMENT
from evenrank.dataloader.balance.exchange.memory import addresses_of, copy_ranges
from evenrank.dataloader.balance.exchange.sections import as_bytes


class ExchangeDevice:
    """The CPU: everything runs in the calling thread, and nothing is copied to a device."""

    backend = "gloo"  # of the process group that connects such devices
    async_collectives = True  # return work that the host waits for; otherwise enqueued on the current stream
    tile_bytes = 0  # of the tiles that `copy` needs; 0: none

    def __init__(self) -> None:
        self.device = torch.device("cpu")  # where balanced batches are
        self.hardware: str | None = None  # identifies the device among those of all hosts if ranks cannot share it

    def use_in_thread(self) -> None:
        """Make this the current device of the calling thread, before it allocates buffers."""

    def side_stream(self) -> AbstractContextManager[Any]:
        """Return a context that enqueues work on the side stream, used on one thread alone."""
        return contextlib.nullcontext()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Allocate a host buffer, uint8 [num_bytes], for `upload`; pinned if the device is a GPU."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def buffer(self, num_bytes: int) -> Tensor:
        """Allocate a device buffer, uint8 [num_bytes], under `side_stream`."""
        return self.host_buffer(num_bytes)

    def upload(self, host_buffer: Tensor) -> Tensor:
        """Return a host buffer on the device, copied under `side_stream`."""
        return host_buffer

    def copy(self, copies: NDArray[np.int64], tiles: Tensor, sources: Sequence[Tensor], target: Tensor) -> None:
        """Run copies (see `memory`) between device buffers, given their tiles in device memory, if it needs any."""
        copy_ranges(copies, addresses_of(sources), target.data_ptr())

    def warm_up(self, source: Tensor, target: Tensor) -> None:
        """Compile what `copy` needs, given two buffers of at least ALIGNMENT bytes, under `side_stream`."""

    def synchronize(self) -> None:
        """Wait for all work on the device."""

    def hand_over(self, buffers: Sequence[Tensor]) -> None:
        """Make buffers that were written on the side stream safe to use on the current stream."""

    def wait_for_training(self) -> None:
        """Make the side stream wait for the work that was enqueued before the last `hand_over`."""


class _CudaDevice(ExchangeDevice):
    """A GPU with a side stream. The host never waits: it knows all sizes, and events order the streams."""

    backend = "nccl"
    async_collectives = False
    tile_bytes = gpu_copy.TILE_BYTES if gpu_copy.HAS_TRITON else 0

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(f"device is {device}, but PyTorch finds no CUDA device on this host; pass device=None")
        if device.index is not None and device.index >= (count := torch.cuda.device_count()):
            raise ConfigError(f"device is {device}, but this host has {count} CUDA devices; pass cuda:0..{count - 1}")
        super().__init__()
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        # Not the index, which is 0 on all ranks if each of them sees its own device only.
        self.hardware = str(torch.cuda.get_device_properties(self.device).uuid)
        # High priority, so that small kernels of the exchange do not queue behind large ones of the training.
        self._side_stream = torch.cuda.Stream(self.device, priority=-1)
        self._written = torch.cuda.Event()
        self._handed_over = torch.cuda.Event()
        self._default_stream = torch.cuda.default_stream(self.device)
        self._default_stream_reached = torch.cuda.Event()
        self._trains_elsewhere = False

    def use_in_thread(self) -> None:
        # In a new thread it is device 0, on which a context would take memory.
        torch.cuda.set_device(self.device)

    def side_stream(self) -> AbstractContextManager[Any]:
        # As a context manager of its own it takes a quarter of the time of torch.cuda.stream.
        return self._side_stream

    def host_buffer(self, num_bytes: int) -> Tensor:
        # PyTorch's allocator does not reuse it while a copy reads it.
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def upload(self, host_buffer: Tensor) -> Tensor:
        return host_buffer.to(self.device, non_blocking=True)

    def copy(self, copies: NDArray[np.int64], tiles: Tensor, sources: Sequence[Tensor], target: Tensor) -> None:
        if self.tile_bytes:
            gpu_copy.copy_with_kernel(tiles, sources, target)
        else:
            gpu_copy.copy_with_operators(copies, sources, target)

    def warm_up(self, source: Tensor, target: Tensor) -> None:
        one_range = np.array([[0, 0, 0, ALIGNMENT]])
        tiles = as_bytes(torch.from_numpy(one_range)).to(self.device)
        self.copy(one_range, tiles, (source,), target)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def hand_over(self, buffers: Sequence[Tensor]) -> None:
        current = torch.cuda.current_stream(self.device)
        self._side_stream.record_event(self._written)
        current.wait_event(self._written)
        for buffer in buffers:
            buffer.record_stream(current)  # keeps it allocated until both streams are done
        current.record_event(self._handed_over)
        # Pipelines fetch batches on a stream of their own and train on the default stream.
        self._trains_elsewhere = current != self._default_stream
        if self._trains_elsewhere:
            self._default_stream.record_event(self._default_stream_reached)

    def wait_for_training(self) -> None:
        self._side_stream.wait_event(self._handed_over)
        if self._trains_elsewhere:
            self._side_stream.wait_event(self._default_stream_reached)


def make_device(device: torch.device | str | None) -> ExchangeDevice:
    """Return the exchange device for a PyTorch device; None is the CPU."""
    try:
        target = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}, which PyTorch does not know; pass cpu or cuda") from error
    if target.type == "cpu":
        return ExchangeDevice()
    if target.type == "cuda":
        return _CudaDevice(target)
    raise ConfigError(f"device is {device}; batches are exchanged on cpu or cuda")
