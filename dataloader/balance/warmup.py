"""Compile what planning and exchanging call, before a step needs it."""

import functools
import threading

import numpy as np

from evenrank.dataloader.balance.exchange.cpu_copy import copy_ranges
from evenrank.dataloader.balance.partition.strategies import partition

# Ours. What a user's strategy raises is left to a step, where ranks are known to have the same one.
_STRATEGIES = ("karmarkar-karp", "lpt-swap", "min-move")

# Just below the 32 MiB up to which glibc raises its thresholds; see mallopt(3), M_MMAP_THRESHOLD.
_LARGE_BLOCK = 31 << 20

# Numba's compiler must not be entered by two threads at once, and holds the GIL while it works.
_LOCK = threading.Lock()


def warm_up() -> None:
    """Call every compiled function once, with the dtypes that a step has.

    Afterwards planning in a background thread never holds the GIL for long. It takes seconds on the first run after an
    installation, and milliseconds once the compiled functions are cached on disk.
    """
    costs, tokens = np.array([90, 50, 10, 50]), np.array([100, 50, 90, 60])
    plans = [functools.partial(partition, costs, 2, strategy=strategy, tokens=tokens) for strategy in _STRATEGIES]
    # Balanced by cost alone, a rank has 190 tokens, so this runs the loops for limited tokens, too.
    plans.append(functools.partial(plans[0], max_tokens_per_rank=160))
    with _LOCK:
        for plan in plans:
            plan()
        # glibc returns freed memory to the system above thresholds that grow with the largest block freed so far. With
        # low ones, the arrays of a plan cause page faults in every step: a third of its time for 1,024 ranks.
        large_block = np.empty(_LARGE_BLOCK, dtype=np.uint8)
        del large_block
        no_ranges = np.empty(0, dtype=np.int64)
        copy_ranges(np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8), no_ranges, no_ranges, no_ranges)
