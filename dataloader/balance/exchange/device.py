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
from evenrank.dataloader.balance.exchange.cpu_copy import ByteCopies, copy_on_cpu


class ExchangeDevice:
    """The CPU: everything runs in the calling thread, and nothing is copied to a device."""

    backend = "gloo"  # of the process group that connects such devices
    async_collectives = True  # return work that the host waits for; otherwise enqueued on the current stream

    def __init__(self) -> None:
        self.device = torch.device("cpu")  # where balanced batches are
        self.hardware: str | None = None  # identifies the device among those of all hosts if ranks cannot share it

    def use_in_thread(self) -> None:
        """Make this the current device of the calling thread, before it allocates buffers."""

    def profiled(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that appears as a range of this name in a profile."""
        return contextlib.nullcontext()

    def side_stream(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that enqueues work on the side stream, as a range of this name in a profile."""
        return contextlib.nullcontext()

    def descriptors(self, copies: ByteCopies) -> NDArray[np.uint8]:
        """Return copies as bytes in the format that `copy` reads from device memory; empty if it reads none."""
        return np.empty(0, dtype=np.uint8)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Allocate a host buffer, uint8 [num_bytes], for `upload`; pinned if the device is a GPU."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def buffer(self, num_bytes: int) -> Tensor:
        """Allocate a device buffer for the side stream, uint8 [num_bytes]; on any thread."""
        return self.host_buffer(num_bytes)

    def upload_buffer(self, host_buffer: Tensor) -> Tensor:
        """Allocate an equally sized device buffer, to which `upload` copies a host buffer; on any thread."""
        return host_buffer  # itself

    def upload(self, host_buffer: Tensor, buffer: Tensor) -> None:
        """Copy a host buffer to the device buffer that `upload_buffer` returned for it."""

    def copy(self, copies: ByteCopies, descriptors: Tensor, sources: Sequence[Tensor], target: Tensor) -> None:
        """Run copies between device buffers, given their descriptors in device memory."""
        copy_on_cpu(copies, [source.numpy() for source in sources], target.numpy())

    def hand_over(self, buffers: Sequence[Tensor]) -> None:
        """Make buffers that were written on the side stream safe to use on the current stream."""

    def wait_for_training(self) -> None:
        """Make the side stream wait for the work that was enqueued before the last `hand_over`."""


class _CudaDevice(ExchangeDevice):
    """A GPU with a side stream. The host never waits: it knows all sizes, and events order the streams."""

    backend = "nccl"
    async_collectives = False

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
        self._default_stream_reached = torch.cuda.Event()

    def use_in_thread(self) -> None:
        # In a new thread it is device 0, on which a context would take memory.
        torch.cuda.set_device(self.device)

    def profiled(self, name: str) -> AbstractContextManager[Any]:
        return _NvtxRange(name, contextlib.nullcontext())

    def side_stream(self, name: str) -> AbstractContextManager[Any]:
        return _NvtxRange(name, self._side_stream)

    def descriptors(self, copies: ByteCopies) -> NDArray[np.uint8]:
        if not gpu_copy.HAS_TRITON:
            return np.empty(0, dtype=np.uint8)
        return gpu_copy.tile_descriptors(copies).reshape(-1).view(np.uint8)

    def host_buffer(self, num_bytes: int) -> Tensor:
        # PyTorch's allocator does not reuse it while a copy reads it.
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def buffer(self, num_bytes: int) -> Tensor:
        # The caching allocator reuses it in the order of the side stream. Not the stream itself as a context manager:
        # that stores the previous stream, so threads must not share it.
        with torch.cuda.stream(self._side_stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def upload_buffer(self, host_buffer: Tensor) -> Tensor:
        return self.buffer(len(host_buffer))

    def upload(self, host_buffer: Tensor, buffer: Tensor) -> None:
        buffer.copy_(host_buffer, non_blocking=True)

    def copy(self, copies: ByteCopies, descriptors: Tensor, sources: Sequence[Tensor], target: Tensor) -> None:
        if gpu_copy.HAS_TRITON:
            gpu_copy.copy_with_kernel(descriptors, sources, target)
        else:
            gpu_copy.copy_with_operators(copies, sources, target)

    def hand_over(self, buffers: Sequence[Tensor]) -> None:
        current_stream = torch.cuda.current_stream(self.device)
        current_stream.wait_event(self._side_stream.record_event(self._written))
        for buffer in buffers:
            buffer.record_stream(current_stream)  # keeps it allocated until both streams are done
        current_stream.record_event(self._handed_over)
        # Pipelines fetch batches on a stream of their own and train on the default stream.
        torch.cuda.default_stream(self.device).record_event(self._default_stream_reached)

    def wait_for_training(self) -> None:
        self._side_stream.wait_event(self._handed_over)
        self._side_stream.wait_event(self._default_stream_reached)


class _NvtxRange:
    """An NVTX range around a context, with a quarter of the overhead of torch.cuda.nvtx.range and torch.cuda.stream."""

    def __init__(self, name: str, context: AbstractContextManager[Any]) -> None:
        self._name = name
        self._context = context

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(f"evenrank {self._name}")
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        torch.cuda.nvtx.range_pop()


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
