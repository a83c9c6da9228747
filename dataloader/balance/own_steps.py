"""What a rank tells the others of its steps: checked batches, and the costs, tokens and lengths of samples."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.costs.cost import count_tokens, scaled_costs
from evenrank.dataloader.balance.ranks.consistency import check_batch
from evenrank.dataloader.balance.ranks.metadata import Header
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.schema import BatchSchema


class LoadedStep(NamedTuple):
    """A step as a rank has loaded it."""

    batch: JaggedBatch | None  # on the CPU; None once the rank has no more
    error: Exception | None = None  # what its loader has raised instead


class OwnSteps(NamedTuple):
    """The metadata of n steps of one rank; zeros where there are no samples."""

    headers: list[Header]
    costs: NDArray[np.int64]  # [n, B]
    tokens: NDArray[np.int64]  # [n, B]
    lengths: NDArray[np.int64]  # [n, K, B]
    errors: list[Exception | None]


def read_steps(
    loaded: Sequence[LoadedStep],
    schema: BatchSchema,
    config: BalanceConfig,
    *,
    world_size: int,
    common: Header,
    error: Exception | None,
) -> OwnSteps:
    """Return the metadata of steps; what is wrong with a batch or its costs becomes the error of its step.

    `common` has the words of the headers that all steps share, and `error` is one of all steps.
    """
    num_steps, size = len(loaded), schema.batch_size
    costs, tokens = np.zeros((2, num_steps, size), dtype=np.int64)
    lengths = np.zeros((num_steps, len(schema.jagged_keys), size), dtype=np.int64)
    errors = [error or step.error for step in loaded]
    with_samples: dict[int, JaggedBatch] = {}
    for index, (batch, _) in enumerate(loaded):
        if batch is not None and errors[index] is None:
            try:
                of_rows = check_batch(batch, schema)
            except Exception as raised:
                errors[index] = raised
                continue
            lengths[index, :, : batch.batch_size] = of_rows
            with_samples[index] = batch

    def fill_in(batches: dict[int, JaggedBatch]) -> None:
        counts = [batch.num_real for batch in batches.values()]
        parts = [lengths[index, :, :count] for index, count in zip(batches, counts, strict=True)]
        by_key = schema.lengths_by_key(np.concatenate(parts, axis=1))
        candidates = [getattr(batch, "num_candidates", None) for batch in batches.values()]
        num_candidates = np.concatenate(
            [
                np.zeros(count, dtype=np.int64) if of_batch is None else of_batch.numpy()[:count]
                for of_batch, count in zip(candidates, counts, strict=True)
            ]
        )
        of_samples = scaled_costs(config.cost, by_key, num_candidates, samples_per_step=world_size * size)
        tokens_of_samples = count_tokens(config.cost, by_key, len(num_candidates))
        end = 0
        for index, count in zip(batches, counts, strict=True):
            start, end = end, end + count
            costs[index, :count], tokens[index, :count] = of_samples[start:end], tokens_of_samples[start:end]

    try:
        if with_samples:
            fill_in(with_samples)
    except Exception:  # of a step that is found by asking for each alone
        for index, batch in with_samples.items():
            try:
                fill_in({index: batch})
            except Exception as raised:
                errors[index] = raised
    headers = [_header(common, batch, raised) for (batch, _), raised in zip(loaded, errors, strict=True)]
    return OwnSteps(headers, costs, tokens, lengths, errors)


def _header(common: Header, batch: JaggedBatch | None, error: Exception | None) -> Header:
    failed = error is not None
    if batch is None:
        return common._replace(status=int(failed), ended=int(not failed))
    return common._replace(
        status=int(failed),
        num_real=0 if failed else batch.num_real,
        epoch=batch.epoch,
        step=batch.step,
        position=batch.position,
        plan_hash=batch.plan_hash or 0,
    )
