"""Programs that end without destroying their default process group, one of each kind, given a number and a folder.

Ranks are forked from a process that has imported everything, which takes seconds, and end as any interpreter does:
unlike those of multiprocessing, which skip that. Prints the exit codes of all ranks; 3 if a thread is left.
"""

import atexit
import os
import sys
from pathlib import Path
from typing import Any

_max_workers: int | None = None  # of this process once its Balancers have ended


def _num_workers() -> int:
    """Return the threads of Gloo that run collectives, and that need the GIL when they free a tensor."""
    return sum("gloo_runloop" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


@atexit.register  # before evenrank registers anything, so that it runs after that
def _check_workers() -> None:
    if _max_workers is not None and _num_workers() > _max_workers:
        os._exit(3)


import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from evenrank.dataloader.balance import BalanceConfig, Balancer  # noqa: E402
from evenrank.dataloader.balance.partition.strategies import warm_up  # noqa: E402
from tests.dataloader.balance.costs import rich_tokens  # noqa: E402
from tests.dataloader.rich_batch import rich_batch  # noqa: E402

_kept: list[Any] = []  # until the interpreter ends


def _balance(kind: str, rank: int) -> None:
    batches = [rich_batch([[(1, 1), (1, 1)]], first_id=rank)] * 6
    balancer = Balancer(batches, BalanceConfig(cost=rich_tokens))
    if kind == "in flight":
        _kept.extend((balancer, balancer.launch(balancer.start(batches[0]))))
        return
    iterator = iter(balancer)
    next(iterator)
    if kind != "left early":
        list(iterator)
    if kind == "closed":
        balancer.close()
    else:
        _kept.append(iterator if kind == "left early" else balancer)


def _run(rank: int, store: str, kind: str) -> None:
    global _max_workers
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    _balance("closed", rank)
    _max_workers = _num_workers()
    for _ in range(3):
        _balance(kind, rank)
    if rank == 0:
        sys.exit(0)  # the other rank ends at the end of its file


def _main() -> None:
    torch.set_num_threads(1)
    warm_up("lpt-swap")
    for run in range(int(sys.argv[1])):
        processes = []
        for kind in ("closed", "unclosed", "left early", "in flight"):
            for rank in range(2):
                processes.append(os.fork())
                if processes[-1] == 0:
                    _run(rank, f"{sys.argv[2]}/{kind} {run}", kind)
                    return
        for process in processes:
            sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])} ")


if __name__ == "__main__":
    _main()
