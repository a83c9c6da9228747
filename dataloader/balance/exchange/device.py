"""Where an exchange takes place: on the CPU, or on a GPU beside the training, on a stream of its own."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.exchange import triton_copy
from evenrank.dataloader.balance.exchange.byte_copy import Copies, copy_on_cpu


class Carrier(Protocol):
    """A device, and how bytes are moved there."""

    device: torch.device
    backend: str  # of the process group that connects such devices
    waits: bool  # whether the host has to wait for a collective; if not, the stream does on which it is started

    def adopt_thread(self) -> None:
        """Prepare a thread of ours, once, to make memory of the device."""
        ...

    def marked(self, what: str) -> AbstractContextManager[Any]:
        """Give what follows a name in a profile."""
        ...

    def beside(self, what: str) -> AbstractContextManager[Any]:
        """Let what follows run beside the training, on the consumer's thread; `what` is its name in a profile."""
        ...

    def instructions(self, copies: Copies) -> NDArray[np.uint8]:
        """Write copies down as the device reads them; they travel with the batch."""
        ...

    def host_memory(self, size: int) -> Tensor:
        """Make memory of the host, uint8 [size], that `bring` can read quickly."""
        ...

    def empty(self, size: int) -> Tensor:
        """Make memory of the device for what runs beside the training: uint8 [size]; on any thread."""
        ...

    def room_for(self, host: Tensor) -> Tensor:
        """Make memory of the device that `bring` can fill with memory of the host; on any thread."""
        ...

    def bring(self, host: Tensor, memory: Tensor) -> None:
        """Fill memory of the device."""
        ...

    def copy(self, copies: Copies, instructions: Tensor, sources: Sequence[Tensor], target: Tensor) -> None:
        """Carry copies out between memories of the device, to which their instructions were brought."""
        ...

    def hand_over(self, memories: Sequence[Tensor]) -> None:
        """Make memories that were written beside the training safe to use from here on."""
        ...

    def await_training(self) -> None:
        """Let what follows beside the training wait until that has come to the last memories handed over."""
        ...


class CpuCarrier:
    """Everything in the caller's thread."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.backend = "gloo"
        self.waits = True

    def adopt_thread(self) -> None:
        """Do nothing."""

    def marked(self, what: str) -> AbstractContextManager[Any]:
        """Do nothing."""
        return contextlib.nullcontext()

    def beside(self, what: str) -> AbstractContextManager[Any]:
        """Run where the caller does."""
        return contextlib.nullcontext()

    def instructions(self, copies: Copies) -> NDArray[np.uint8]:
        """Write nothing: copies are read as they are."""
        return np.empty(0, dtype=np.uint8)

    def host_memory(self, size: int) -> Tensor:
        """Make ordinary memory."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def empty(self, size: int) -> Tensor:
        """Make ordinary memory."""
        return self.host_memory(size)

    def room_for(self, host: Tensor) -> Tensor:
        """Use the memory itself."""
        return host

    def bring(self, host: Tensor, memory: Tensor) -> None:
        """Do nothing: it is there."""

    def copy(self, copies: Copies, instructions: Tensor, sources: Sequence[Tensor], target: Tensor) -> None:
        """Copy one range after the other."""
        copy_on_cpu(copies, sources, target)

    def hand_over(self, memories: Sequence[Tensor]) -> None:
        """Do nothing."""

    def await_training(self) -> None:
        """Do nothing."""


class CudaCarrier:
    """A side stream of one GPU. The host waits for nothing: sizes are known to it, and events order the streams.

    Args:
        device: a CUDA device.

    Raises:
        ConfigError: there is none.

    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(f"device is {device}, but PyTorch finds no CUDA device here")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.backend = "nccl"
        self.waits = False
        # Small kernels of the exchange are not to wait behind large ones of the training.
        self._stream = torch.cuda.Stream(self.device, priority=-1)
        self._written = torch.cuda.Event()
        self._handed_over = torch.cuda.Event()
        self._trained = torch.cuda.Event()

    def adopt_thread(self) -> None:
        """Make the device the thread's current one: it is the first of the host, where a context would cost memory."""
        torch.cuda.set_device(self.device)

    def marked(self, what: str) -> AbstractContextManager[Any]:
        """Open an NVTX range."""
        return _Marked(what, contextlib.nullcontext())

    def beside(self, what: str) -> AbstractContextManager[Any]:
        """Enqueue on the side stream."""
        return _Marked(what, self._stream)

    def instructions(self, copies: Copies) -> NDArray[np.uint8]:
        """Write tiles, for the kernel."""
        if not triton_copy.HAS_TRITON:
            return np.empty(0, dtype=np.uint8)
        return triton_copy.tiles_of(copies).reshape(-1).view(np.uint8)

    def host_memory(self, size: int) -> Tensor:
        """Make page-locked memory; PyTorch keeps it as long as a copy reads it."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def empty(self, size: int) -> Tensor:
        """Make memory that is used again in the order of the side stream."""
        # A stream as a context manager keeps in itself what was there before, so that threads may not share it.
        with torch.cuda.stream(self._stream):
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def room_for(self, host: Tensor) -> Tensor:
        """Make as much."""
        return self.empty(len(host))

    def bring(self, host: Tensor, memory: Tensor) -> None:
        """Copy without waiting."""
        memory.copy_(host, non_blocking=True)

    def copy(self, copies: Copies, instructions: Tensor, sources: Sequence[Tensor], target: Tensor) -> None:
        """Copy all ranges in one launch."""
        if triton_copy.HAS_TRITON:
            triton_copy.copy_by_kernel(instructions, sources, target)
        else:
            triton_copy.copy_by_operators(copies, sources, target)

    def hand_over(self, memories: Sequence[Tensor]) -> None:
        """Let the current stream wait for the side stream, and keep the memories until both are done with them."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self._stream.record_event(self._written))
        for memory in memories:
            memory.record_stream(current)
        current.record_event(self._handed_over)
        # Pipelines fetch batches on a stream of their own, and train on the default one.
        torch.cuda.default_stream(self.device).record_event(self._trained)

    def await_training(self) -> None:
        """Let the side stream wait; in no host's time."""
        self._stream.wait_event(self._handed_over)
        self._stream.wait_event(self._trained)


class _Marked:
    """An NVTX range around a context: what torch.cuda.nvtx.range and torch.cuda.stream do, in a quarter of the time."""

    __slots__ = ("_context", "_what")

    def __init__(self, what: str, context: AbstractContextManager[Any]) -> None:
        self._what = what
        self._context = context

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(f"evenrank {self._what}")
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        torch.cuda.nvtx.range_pop()


def make_carrier(device: torch.device | str | None) -> Carrier:
    """Choose a carrier for a device; None is the CPU.

    Raises:
        ConfigError: there is no such device, or batches cannot be exchanged on it.

    """
    if device is None:
        return CpuCarrier()
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}, which PyTorch does not know") from error
    if target.type == "cpu":
        return CpuCarrier()
    if target.type == "cuda":
        return CudaCarrier(target)
    raise ConfigError(f"batches are exchanged on cpu or cuda, device is {device}")
