"""Processes of this host as ranks: one per GPU over NCCL, or any number of them on the CPU over Gloo."""

import argparse
import faulthandler
import gc
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

TIMEOUT = timedelta(minutes=10)
_CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRanks:
    """How processes are started."""

    device: str
    """cuda or cpu."""
    count: int
    """Processes."""
    seconds: float = 540
    """After which a process that still runs prints the stacks of its threads and ends, and with it all others."""
    omp_threads: int = 1
    """OpenMP threads of a process."""
    log: Path | None = None
    """File of the output of all processes; None: that of this process."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call function(device, *arguments) in each process of a default process group, and return what rank 0 returns.

        Collectives of CPU tensors use Gloo, those of CUDA tensors NCCL.

        The function is importable, its arguments and its result are pickled.

        Raises:
            torch.multiprocessing.ProcessException: a process has failed; the others are ended.
        """
        os.environ["OMP_NUM_THREADS"] = str(self.omp_threads)  # libraries read it when they are loaded
        with tempfile.TemporaryDirectory() as folder:
            arguments = (self, Path(folder), function, arguments)
            multiprocessing.spawn(_run, arguments, nprocs=self.count)  # type: ignore[attr-defined,no-untyped-call]
            return pickle.loads((Path(folder) / "result").read_bytes())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `ranks_of` reads."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, help=f"processes; default: all GPUs, or {_CPU_RANKS} on the CPU")
    parser.add_argument("--omp-threads", type=int, default=1, help="OpenMP threads of a process; default: 1")
    parser.add_argument("--timeout", type=float, default=540, help="seconds after which processes print their stacks")


def ranks_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> LocalRanks:
    """Return the ranks of the options of `add_options`; the parser reports mistakes."""
    there = torch.cuda.device_count()
    count = (there if options.device == "cuda" else _CPU_RANKS) if options.ranks is None else options.ranks
    if count < 1 or (options.device == "cuda" and count > there):
        parser.error(
            f"--ranks is {count}, this host has {there} GPUs; choose 1 or more, and with --device cuda no more"
        )
    return LocalRanks(device=options.device, count=count, seconds=options.timeout, omp_threads=options.omp_threads)


def gather(mine: Any) -> list[Any]:
    """Return a picklable value of each rank. Collective: every rank must call."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meet(device: torch.device) -> None:
    """Wait for the device and for all ranks. Collective: every rank must call."""
    synchronize(device)
    dist.all_reduce(torch.zeros(1))  # of CPU tensors, over Gloo


def _run(rank: int, ranks: LocalRanks, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if ranks.log is not None:
        file = os.open(ranks.log, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    faulthandler.dump_traceback_later(ranks.seconds, exit=True)
    torch.set_num_threads(ranks.omp_threads)
    device = torch.device("cpu")
    if ranks.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    # As torchrun sets them, for libraries that read them.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks.count), "LOCAL_WORLD_SIZE": str(ranks.count)}
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks.count, timeout=TIMEOUT
    )
    try:
        result = function(device, *arguments)
    except Exception:
        traceback.print_exc()  # of every rank, where the caller is told of one
        raise
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))
    del result
    gc.collect()  # DistributedDataParallel refers to the process group, in cycles
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
