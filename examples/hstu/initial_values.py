"""`fill_rows`: the initial values of a part of an embedding table, which do not depend on how the table is divided."""

import numpy as np
import torch
from torch import Tensor
from torchrec import EmbeddingConfig

BLOCK_ROWS = 1 << 16
"""Rows that are drawn together; where a part begins or ends within a block, the rest of the block is discarded."""


@torch.no_grad()
def fill_rows(rows: Tensor, table: EmbeddingConfig, *, first_row: int, seed: int) -> None:
    """Fill rows of a table, in place, with values that depend on the seed, the table's name and the row alone.

    The table is drawn in blocks, each from a random generator of its own, so any part can be drawn without the rest.
    On CPU and GPU these are different values. The random states are left as they were.

    Args:
        rows: [n, embedding_dim], on any device.
        table: whose `init_fn` is called with blocks of up to `BLOCK_ROWS` rows.
        first_row: of the table, which is the first of `rows`.
        seed: at least 0.

    """
    assert table.init_fn is not None
    on_gpu = rows.device.type == "cuda"
    with torch.random.fork_rng([rows.device] if on_gpu else []):
        # Not torch.manual_seed, which seeds all devices, of which one is restored.
        generator = torch.cuda.default_generators[rows.device.index] if on_gpu else torch.default_generator
        for block in range(first_row // BLOCK_ROWS, -(-(first_row + len(rows)) // BLOCK_ROWS)):
            generator.manual_seed(_seed_of(seed, table.name, block))
            start = block * BLOCK_ROWS
            drawn = rows.new_empty(min(BLOCK_ROWS, table.num_embeddings - start), table.embedding_dim)
            table.init_fn(drawn)
            begin, end = max(start, first_row), min(start + len(drawn), first_row + len(rows))
            rows[begin - first_row : end - first_row] = drawn[begin - start : end - start]


def _seed_of(seed: int, name: str, block: int) -> int:
    """Return a seed of 32 bits, all that the generator of the CPU uses."""
    return int(np.random.SeedSequence((seed, block, *name.encode())).generate_state(1)[0])
