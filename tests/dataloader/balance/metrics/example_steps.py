"""Metrics of a few steps, and logs of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics
from evenrank.dataloader.balance.metrics.writers import JsonLines


def step(
    number: int, *, epoch: int = 0, before: Sequence[int] = (6, 2), after: Sequence[int] = (4, 4), **others: Any
) -> StepMetrics:
    """Return a step with a lower bound of 4, in which 1 of 4 samples, 10 of 40 tokens and 80 of 320 bytes move."""
    values: dict[str, Any] = {"lower_bound": 4, "samples": 4, "moved_samples": 1, "tokens": 40, "moved_tokens": 10}
    values |= {"sample_bytes": 320, "moved_bytes": 80, "gather_seconds": 0.25, "plan_seconds": 0.5 * number}
    values |= {"exchange_seconds": 0.125, "before": np.array(before), "after": np.array(after), "longest": 16}
    values |= {"rank_tokens": np.array([24, 16]), "rank_squares": np.array([320.0, 160.0])}
    if len(before) != 2:
        values |= {"rank_tokens": np.ones(len(before), dtype=np.int64), "rank_squares": np.ones(len(before))}
    return StepMetrics(epoch=epoch, step=number, **{**values, "loaded_tokens": np.array([16, 4]), **others})


def timed(number: int, *, compute: Sequence[float], wait: Sequence[float], **others: Any) -> StepMetrics:
    """Return a step with measured seconds of each rank."""
    return step(number, compute_seconds=np.array(compute), wait_seconds=np.array(wait), **others)


# Heaviest loads 6, 8, 10, 8, 6 before balancing and 4, 4, 5, 4, 6 after.
STEPS = [
    step(0),
    step(1, before=(8, 0)),
    step(2, before=(0, 10), after=(5, 5)),
    step(0, epoch=1, before=(8, 0)),
    step(1, epoch=1, after=(6, 2)),
]

# Balanced ones take 1 s, of which ranks wait for 1/16 on average; unbalanced ones 2 s, and 5/8.
TIMED_STEPS = [
    step(0),
    timed(1, compute=(0.875, 0.75), wait=(0.125, 0.25)),
    timed(2, compute=(0.25, 1.5), wait=(1.75, 0.5), is_balanced=False),
    timed(3, compute=(0.75, 0.875), wait=(0.25, 0.125)),
]


def write(path: Path, *steps: StepMetrics, **options: Any) -> None:
    with JsonLines(path, **options) as log:
        for metrics in steps:
            log(metrics)
