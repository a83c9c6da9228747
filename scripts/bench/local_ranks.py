"""Processes of this host as ranks: one per GPU over NCCL, or any number of them on the CPU over Gloo."""

import argparse
import faulthandler
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

TIMEOUT = timedelta(minutes=3)
_CPU_RANKS = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run_ranks` reads."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--ranks", type=int, help=f"processes; default: one for each GPU of the host, {_CPU_RANKS} on the CPU"
    )
    parser.add_argument("--omp-threads", type=int, default=1, help="OpenMP threads of a process; default: 1")
    parser.add_argument("--timeout", type=float, default=540, help="seconds after which processes print their stacks")


def run_ranks(
    parser: argparse.ArgumentParser, options: argparse.Namespace, function: Callable[..., None], *arguments: Any
) -> None:
    """Call function(device, *arguments) in one process per rank, which are the default process group.

    Collectives of CPU tensors use Gloo, those of CUDA tensors NCCL. A process that outlasts the timeout prints the
    stacks of its threads and ends, and with it all others.

    Args:
        parser: reports mistakes.
        options: those of `add_options`.
        function: to call; importable.
        arguments: its further arguments, pickled.
    """
    there = torch.cuda.device_count()
    ranks = (there if options.device == "cuda" else _CPU_RANKS) if options.ranks is None else options.ranks
    if options.device == "cuda" and not there:
        parser.error("--device is cuda, but PyTorch finds no CUDA device on this host; pass --device cpu")
    if ranks < 1 or (options.device == "cuda" and ranks > there):
        limit = f"1 to {there}, the GPUs of this host" if options.device == "cuda" else "at least 1"
        parser.error(f"--ranks must be {limit}, got {ranks}")
    if options.omp_threads < 1:
        parser.error(f"--omp-threads must be at least 1, got {options.omp_threads}")
    os.environ["OMP_NUM_THREADS"] = str(options.omp_threads)  # of the processes, where libraries read it when loaded
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _run, (ranks, f"file://{folder}/store", options, function, arguments), nprocs=ranks
        )


def _run(
    rank: int,
    ranks: int,
    store: str,
    options: argparse.Namespace,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    torch.set_num_threads(options.omp_threads)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    function(device, *arguments)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
