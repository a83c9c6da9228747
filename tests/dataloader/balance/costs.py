"""Types and costs that several tests use."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance import HSTUCost

COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)
Ints = NDArray[np.int64]
Lengths = Mapping[str, Ints]


def one_per_sample(lengths: Lengths, num_candidates: Ints) -> Ints:
    """Cost 1, whatever the lengths."""
    return np.ones(len(num_candidates), dtype=np.int64)


def item_tokens(lengths: Lengths, num_candidates: Ints) -> Ints:
    """Count the items, for batches that have no other key."""
    return lengths["item_id"]


def rich_tokens(lengths: Lengths, num_candidates: Ints) -> Ints:
    """Count the values of a RichBatch, with different weights of its keys."""
    return lengths["a"] + lengths["b"] * 2 + lengths["weighted.a"] + lengths["c"]
