"""Compiles what planning and exchanging call, before a step needs it."""

import threading

import numpy as np

from evenrank.dataloader.balance.exchange.byte_copy import copy_ranges
from evenrank.dataloader.balance.partition.strategies import STRATEGIES, partition

# The compiler is not to be entered by two threads at once, and holds the interpreter's lock while it works.
_LOCK = threading.Lock()


def compile_ahead() -> None:
    """Call every compiled function once, with the types that a step has.

    Afterwards planning in a background thread never holds the interpreter's lock for long. It takes seconds on the
    first run after an installation, and hardly any time once the results are on disk.
    """
    with _LOCK:
        costs, tokens = np.array([90, 50, 10, 50]), np.array([100, 50, 90, 60])
        for strategy in STRATEGIES:
            partition(costs, 2, strategy=strategy, sizes=tokens)
        # By cost alone a rank gets 190 tokens, so that the loops for limited tokens run, too.
        partition(costs, 2, strategy="karmarkar-karp", sizes=tokens, max_tokens_per_rank=160)
        nothing = np.empty(0, dtype=np.int64)
        copy_ranges(np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8), nothing, nothing, nothing)
