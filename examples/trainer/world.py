"""The ranks of a job: started by torchrun, or this process alone."""

import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from evenrank.core.errors import ConfigError, DataError, RankError, one_line

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among the ranks of the job."""

    rank: int
    """Of this process, from 0."""
    size: int
    """Number of ranks."""
    device: torch.device
    """Where this rank trains."""
    mesh: DeviceMesh | None = None
    """Of all ranks, (dp, tp): samples are distributed along `dp`, and heads along `tp`. None: all are data-parallel."""

    @property
    def data(self) -> DeviceMesh | None:
        """The data-parallel ranks that this one belongs to, as `group=` takes them; None: all."""
        return None if self.mesh is None else self.mesh["dp"]

    @property
    def data_rank(self) -> int:
        """This rank's number among them."""
        return self.rank if self.data is None else self.data.get_local_rank()

    @property
    def data_size(self) -> int:
        """Their number."""
        return self.size if self.data is None else self.data.size()


@contextlib.contextmanager
def join_world() -> Iterator[World]:
    """Join the ranks that torchrun started; without torchrun, be the only one. On GPUs if there are any."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # Checkpoints and messages go through Gloo on any device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    # Not after an error, where other ranks may be in the middle of a collective. First what still refers to the group,
    # such as DistributedDataParallel in its cycles, or a thread of Gloo can abort the process at its end.
    gc.collect()
    dist.destroy_process_group()


def divide(world: World, tensor_parallel: int) -> World:
    """Return the world with a mesh, if its ranks divide heads. Collective: every rank must call this.

    Raises:
        ConfigError: there is no whole number of groups of `tensor_parallel` ranks.
    """
    if tensor_parallel == 1:
        return world
    if world.size % tensor_parallel:
        raise ConfigError(
            f"tensor_parallel = {tensor_parallel} cannot divide {world.size} ranks into equal groups; "
            "start a multiple of it, or choose a divisor"
        )
    shape = (world.size // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("dp", "tp"))
    return dataclasses.replace(world, mesh=mesh)


def on_all_ranks(function: Callable[[], Result]) -> Result:
    """Return what `function` returns, unless it raises on any rank. Collective: every rank must call this.

    Raises:
        DataError: it raised an OSError on this rank.
        RankError: it raised on another rank, and not on this one.
        Exception: what it raised on this rank.
    """
    result: Result | None = None
    error: Exception | None = None
    try:
        result = function()
    except OSError as raised:  # such as a folder without permission
        error = DataError(f"{raised.filename}: {raised.strerror}; check the path and its permissions")
    except Exception as raised:
        error = raised
    messages = gather(None if error is None else one_line(error))
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise RankError(f"rank {rank}: {message}")
    return cast(Result, result)


def on_first_rank(function: Callable[[], None]) -> None:
    """Call `function` on rank 0 while the others wait. Collective: every rank must call this.

    Raises:
        Exception: see `on_all_ranks`.
    """
    on_all_ranks(function if dist.get_rank() == 0 else lambda: None)


def gather(value: Result) -> list[Result]:
    """Return the picklable values of all ranks. Collective: every rank must call this."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
