"""Compile the loops of planning and exchanging before a step needs them."""

import threading

import numpy as np

from evenrank.dataloader.balance.partition.strategies import partition

_COMPILED = ("karmarkar-karp", "lpt-swap", "min-move")

# Just below the 32 MiB up to which glibc raises its thresholds; see mallopt(3), M_MMAP_THRESHOLD.
_LARGE_BLOCK = 31 << 20

# Numba's compiler must not be entered by two threads at once, and holds the GIL while it works.
_LOCK = threading.Lock()


def warm_up(strategy: str, *, limits_tokens: bool = False, exchanges: bool = False) -> None:
    """Call the compiled functions of a step once, with its dtypes, so that a background thread compiles nothing.

    Seconds on the first run after an installation; milliseconds once the functions are cached on disk. A user's own
    strategy is not called: it may raise, which a step reports on all ranks. `limits_tokens`: the steps have a limit;
    `exchanges`: their samples are exchanged.
    """
    costs, tokens = np.array([90, 50, 10, 50]), np.array([100, 50, 90, 60])
    with _LOCK:
        partition(costs, 2, strategy=strategy if strategy in _COMPILED else "none", tokens=tokens)
        if limits_tokens:  # balanced by cost alone, a rank has 190
            partition(costs, 2, tokens=tokens, max_tokens_per_rank=160)
        # glibc returns freed memory to the system above thresholds that grow with the largest block freed so far. With
        # low ones, the arrays of a plan cause page faults in every step: a third of its time for 1,024 ranks.
        large_block = np.empty(_LARGE_BLOCK, dtype=np.uint8)
        del large_block
        if exchanges:
            _warm_up_exchange()


def _warm_up_exchange() -> None:
    # They import torch, or compile themselves, and costs are simulated without.
    from evenrank.dataloader.balance.exchange.device import copy_ranges
    from evenrank.dataloader.balance.exchange.layout import Sections, lay_out, write_host_buffer
    from evenrank.dataloader.batches.schema import describe_lengths

    none, one, rows = np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64), np.full((1, 1), -1, dtype=np.int32)
    no_bytes, no_fields = np.empty(0, dtype=np.uint8), np.empty((0, 3), dtype=np.int64)
    sections = Sections(none, none, none, one, no_bytes, no_fields, none, none, -1, 0)
    lengths = np.zeros((1, 1, 1), dtype=np.int64)
    describe_lengths(lengths[0], 0)
    layout = lay_out(sections, rows, lengths, 0, False, 0)
    write_host_buffer(layout, sections, none, lengths[0], rows[0], 0, np.empty(layout.host_bytes, dtype=np.uint8))
    copy_ranges(np.empty((0, 4), dtype=np.int64), one, 0)
