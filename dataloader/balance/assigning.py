"""Assigning the samples of a step to ranks, and what that achieves: one rank's view of all, from costs and lengths."""

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.exchange.plan import sample_bytes
from evenrank.dataloader.balance.metrics import StepMetrics, measure_step
from evenrank.dataloader.balance.partition.strategies import Assignment, assign, real_rows
from evenrank.dataloader.balance.partition.two_level import assign_by_host
from evenrank.dataloader.balance.settings import BalancerSettings
from evenrank.dataloader.batch_schema import BatchSchema


def assign_step(
    settings: BalancerSettings,
    *,
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    num_real: NDArray[np.int64] | None,
) -> Assignment:
    """Decide which rank trains which sample.

    Args:
        settings: the partition and the topology.
        costs: int64 [W, B], 0 for padding.
        tokens: int64 [W, B], 0 for padding.
        num_real: int64 [W], how many of each rank's first rows are samples; None: all.

    Raises:
        ConfigError: the strategy returns what it must not, or `max_tokens_per_rank` cannot be kept.

    """
    if settings.topology is None:
        return assign(costs, len(costs), settings.partition, tokens=tokens, num_real=num_real)
    return assign_by_host(costs, settings.topology, settings.partition, tokens=tokens, num_real=num_real)


def measure_assignment(
    assignment: Assignment,
    settings: BalancerSettings,
    schema: BatchSchema,
    *,
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    lengths: NDArray[np.int64],
    num_real: NDArray[np.int64] | None,
    epoch: int,
    step: int,
) -> StepMetrics:
    """Return what an assignment achieves; the times remain 0.

    Args:
        assignment: from `assign_step`, with these settings, costs, tokens and numbers of samples.
        settings: as there.
        schema: of the batches.
        costs: as there.
        tokens: as there.
        lengths: int64 [K, W * B], of all ranks' rows.
        num_real: as there.
        epoch: of the step.
        step: its number.

    """
    is_real = real_rows(schema.batch_size, len(costs), num_real)
    return measure_step(
        assignment,
        costs=costs,
        tokens=tokens,
        sample_bytes=np.where(is_real, sample_bytes(schema, lengths).reshape(is_real.shape), 0),
        ranks_per_host=None if settings.topology is None else settings.topology[1],
        epoch=epoch,
        step=step,
    )
