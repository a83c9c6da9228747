"""Where an exchange takes place: on the CPU, or on a GPU beside the training, on a stream of its own."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.balance.copying import Moves, copy_on_cpu
from evenrank.dataloader.balance.kernels import copy_on_gpu
from evenrank.dataloader.batch import JaggedBatch
from evenrank.datasets.errors import ConfigError


class Carrier(Protocol):
    """A device, and how bytes are moved there."""

    device: torch.device
    backend: str  # of the process group that connects such devices

    def beside(self, what: str) -> AbstractContextManager[Any]:
        """Let what follows run beside the training; `what` is its name in a profile."""
        ...

    def bring(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Bring tensors of the CPU to the device."""
        ...

    def copy(self, moves: Sequence[Moves]) -> None:
        """Carry out moves between tensors there."""
        ...

    def hand_over(self, batch: JaggedBatch) -> JaggedBatch:
        """Make a batch that was built beside the training safe to use from here on."""
        ...


class CpuCarrier:
    """Everything in the caller's thread."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.backend = "gloo"

    def beside(self, what: str) -> AbstractContextManager[Any]:
        """Run where the caller does."""
        return contextlib.nullcontext()

    def bring(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Return them as they are."""
        return dict(tensors)

    def copy(self, moves: Sequence[Moves]) -> None:
        """Copy ranges one after the other."""
        copy_on_cpu(moves)

    def hand_over(self, batch: JaggedBatch) -> JaggedBatch:
        """Return it as it is."""
        return batch


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
        self._stream = torch.cuda.Stream(self.device)

    @contextlib.contextmanager
    def beside(self, what: str) -> Any:
        """Enqueue on the side stream."""
        with torch.cuda.stream(self._stream), torch.cuda.nvtx.range(f"evenrank {what}"):
            yield

    def bring(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Copy without waiting, from page-locked memory (of which PyTorch keeps what is still being read)."""
        return {
            name: (tensor if tensor.is_pinned() else tensor.pin_memory()).to(self.device, non_blocking=True)
            for name, tensor in tensors.items()
        }

    def copy(self, moves: Sequence[Moves]) -> None:
        """Copy all ranges in one launch."""
        copy_on_gpu(moves)

    def hand_over(self, batch: JaggedBatch) -> JaggedBatch:
        """Bring lengths, and let the current stream wait for the side stream; memory is kept until both are done."""
        with torch.cuda.stream(self._stream):
            batch = _with_lengths_on(batch, self)
            done = self._stream.record_event()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        batch.record_stream(current)
        return batch


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


def _with_lengths_on(batch: JaggedBatch, carrier: CudaCarrier) -> JaggedBatch:
    """Give the KeyedJaggedTensors of a batch, whose values are on the device, their lengths and offsets there."""
    changed: dict[str, Any] = {}
    for name, value in batch.tensors():
        if isinstance(value, KeyedJaggedTensor):
            lengths = value.lengths()
            offsets = torch.zeros(len(lengths) + 1, dtype=lengths.dtype)
            torch.cumsum(lengths, 0, out=offsets[1:])
            there = carrier.bring({"lengths": lengths, "offsets": offsets})
            changed[name] = KeyedJaggedTensor(
                keys=value.keys(),
                values=value.values(),
                weights=value.weights_or_none(),
                stride=value.stride(),
                length_per_key=value.length_per_key(),
                offset_per_key=value.offset_per_key(),
                **there,
            )
    return dataclasses.replace(batch, **changed)
