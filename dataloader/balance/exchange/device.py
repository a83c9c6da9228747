"""Where an exchange runs: on the CPU, or on a GPU on a side stream next to the training; and its copies of byte ranges.

Copies are int64 [n, 4]: the number of the source buffer, where the range begins in it, where it goes in the target, and
its bytes. The buffers of a batch have any number and dtypes, so compiled code gets their addresses. On the CPU a loop
runs them; on a GPU one Triton kernel runs all, given as tiles: copies of at most TILE_BYTES.
"""

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError
from evenrank.dataloader.batches.memory import resolve_device

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:  # CPU builds of PyTorch come without Triton
    triton = None

ALIGNMENT = 16  # bytes: the widest load and store of a GPU
TILE_BYTES = 8192  # copied by one program
_BYTES_OF_TILE = 4 * 8  # of its description
_NUM_WARPS = 4


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
        """Run copies between device buffers, given their tiles in device memory, if it needs any."""
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
    tile_bytes = TILE_BYTES

    def __init__(self, device: torch.device) -> None:
        if triton is None:
            raise ConfigError(
                f"device is {device}, but Triton, which comes with CUDA builds of PyTorch, is not installed; install "
                "it, or pass device=None"
            )
        super().__init__()
        self.device = device
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
        copy_with_kernel(tiles, sources, target)

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
    """Return the exchange device for a PyTorch device; None is the CPU. A ConfigError if there is none."""
    target = resolve_device(device)
    return _CudaDevice(target) if target.type == "cuda" else ExchangeDevice()


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor of any dtype and shape as uint8 [bytes]."""
    if tensor.numel() == 0:  # empty tensors can have strides that `view` rejects
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Copy bytes from an address to another one, in compiled code; the ranges do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        to, of = (builder.inttoptr(argument, pointer) for argument in arguments[:2])
        cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def addresses_of(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    """Return the addresses of the first elements of tensors, which must be kept meanwhile: int64 [n]."""
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


@compiled
def copy_ranges(copies: NDArray[np.int64], sources: NDArray[np.int64], target: int) -> None:
    """Run copies, given the addresses of their source buffers and of their target."""
    for i in range(len(copies)):
        copy_bytes(target + copies[i, 2], sources[copies[i, 0]] + copies[i, 1], copies[i, 3])


@compiled
def count_tiles(copies: NDArray[np.int64], tile_bytes: int) -> int:
    """Return how many tiles of at most `tile_bytes` copies consist of."""
    count = 0
    for i in range(len(copies)):
        count += -(-copies[i, 3] // tile_bytes)
    return count


@compiled
def write_tiles(copies: NDArray[np.int64], tile_bytes: int, tiles: NDArray[np.int64]) -> None:
    """Split copies into tiles, int64 [num_tiles, 4], which are copies themselves."""
    tile = 0
    for i in range(len(copies)):
        for start in range(0, copies[i, 3], tile_bytes):
            tiles[tile, 0] = copies[i, 0]
            tiles[tile, 1] = copies[i, 1] + start
            tiles[tile, 2] = copies[i, 2] + start
            tiles[tile, 3] = min(tile_bytes, copies[i, 3] - start)
            tile += 1


def copy_with_kernel(tiles: Tensor, sources: Sequence[Tensor], target: Tensor) -> None:
    """Copy tiles in one kernel launch, given their bytes (`write_tiles`) and one or two sources; on a GPU."""
    if num_tiles := tiles.numel() // _BYTES_OF_TILE:
        buffers = (tiles, sources[0], sources[-1], target)
        _compiled_kernel(target.device.index)[(num_tiles, 1, 1)](*[buffer.data_ptr() for buffer in buffers])


if triton is not None:
    _TILE_WORDS = tl.constexpr(TILE_BYTES // 8)

    @functools.cache
    def _compiled_kernel(device: int) -> Any:
        # Launching the result with addresses takes half the host time that Triton needs to look it up by its tensors.
        with torch.cuda.device(device):
            address = 1 << 40  # any value beyond 32 bits, so that Triton types it as int64
            return _copy_tile.warmup(address, address, address, address, grid=(1,), num_warps=_NUM_WARPS)

    @triton.jit
    def _copy_words(source, target, count, dtype: tl.constexpr):
        source = source.to(tl.pointer_type(dtype))
        target = target.to(tl.pointer_type(dtype))
        for begin in range(0, count, _TILE_WORDS):
            offsets = begin + tl.arange(0, _TILE_WORDS)
            mask = offsets < count
            tl.store(target + offsets, tl.load(source + offsets, mask=mask), mask=mask)

    @triton.jit(do_not_specialize=["tiles", "first", "second", "target"])
    def _copy_tile(tiles, first, second, target):
        """Copy one tile, in the widest words to which its addresses and its size are aligned."""
        tile = tiles.to(tl.pointer_type(tl.int64)) + 4 * tl.program_id(0)
        source = tl.load(tile + 1) + tl.where(tl.load(tile) == 0, first, second)
        target = tl.load(tile + 2) + target
        size = tl.load(tile + 3)
        combined = source | target | size
        if combined % 16 == 0:
            # The hints let the compiler load and store two words at a time.
            source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
            _copy_words(source, target, tl.multiple_of(size // 8, 2), tl.int64)
        elif combined % 8 == 0:
            _copy_words(source, target, size // 8, tl.int64)
        elif combined % 4 == 0:
            _copy_words(source, target, size // 4, tl.int32)
        else:
            _copy_words(source, target, size, tl.uint8)
