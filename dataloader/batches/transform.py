"""Transforms of batches, and the random generators that are passed to them."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batches.batch import JaggedBatch

Batch = TypeVar("Batch", bound=JaggedBatch)
Transform = Callable[[Batch, np.random.Generator], Batch]
"""Returns the batch to yield. The generator's numbers depend on seed, epoch and position, not on the workers."""


def apply(transform: Transform[Batch], batch: Batch, rng: np.random.Generator) -> Batch:
    """Return what a transform makes of a batch, at its position, from which states follow; check that it is a batch."""
    epoch, step, position = batch.epoch, batch.step, batch.position
    try:
        result = transform(batch, rng)
    except StopIteration as error:  # would be taken for the end of the epoch
        raise RuntimeError(
            f"the transform raised StopIteration in step {batch.step} of epoch {batch.epoch}; pass next() a default, "
            "or raise another error"
        ) from error
    if not isinstance(result, JaggedBatch):
        raise ConfigError(f"the transform returned a {type(result).__name__}; return the batch to yield")
    result.epoch, result.step, result.position = epoch, step, position
    return result


def make_rng(seed: int, *counters: int) -> np.random.Generator:
    """Return the random generator for a seed, which may be negative, and counters such as epoch and position."""
    return np.random.default_rng([seed & 0xFFFFFFFFFFFFFFFF, *counters])
