"""The ranks of a job: started by torchrun, or this process alone."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from evenrank.core.errors import DataError
from evenrank.dataloader.balance.ranks.agree import attempt, gather_checked, raise_reported_errors, reported

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


def on_all_ranks(function: Callable[[], Result]) -> Result:
    """Return what `function` returns; if it raises on any rank, all raise. Collective: every rank must call this."""
    result, error = attempt(function)
    if isinstance(error, OSError):  # such as a folder without permission
        error = DataError(f"{error.filename}: {error.strerror}; check the path and its permissions")
    errors = gather_checked({}, reported(error), dist.group.WORLD)
    if error is not None:
        raise error
    raise_reported_errors(errors)
    return cast(Result, result)
