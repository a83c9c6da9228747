"""Agree on one schema of the batches of all ranks before the first step, and hold every later batch to it."""

import dataclasses
import itertools
import pickle
from collections.abc import Sequence

from evenrank.core.errors import ConfigError, RankError
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.padding import empty_batch
from evenrank.dataloader.batches.schema import BatchSchema, check_contents, schema_of


def report_schema(batch: JaggedBatch | None, error: Exception | None) -> tuple[BatchSchema | None, Exception | None]:
    """Return the schema of a rank's first batch, or the error of its loader or of the schema; both None: no batch."""
    if batch is None or error is not None:
        return None, error
    try:
        schema = schema_of(batch)
        pickle.dumps(schema)
        empty_batch(schema)  # needed once this rank has no more batches
    except Exception as raised:  # reported to all ranks
        return None, raised
    return schema, None


def common_schema(schemas: Sequence[BatchSchema | None], batch_size: int | None = None) -> BatchSchema | None:
    """Return the schema of all ranks that have batches, or raise a RankError if two differ; None if no rank has any.

    `batch_size` None is that of the longest batch.
    """
    known = [(rank, schema) for rank, schema in enumerate(schemas) if schema is not None]
    if batch_size is None:
        batch_size = max((schema.batch_size for _, schema in known if schema.batch_size), default=1)
    known = [(rank, dataclasses.replace(schema, batch_size=batch_size)) for rank, schema in known]
    for (rank, schema), (other_rank, other) in itertools.pairwise(known):
        if differences := schema.differences(other):
            raise RankError(f"batches differ between rank {rank} and rank {other_rank}: {'; '.join(differences)}")
    return known[0][1] if known else None


def check_batch(batch: JaggedBatch, schema: BatchSchema, *, max_batch_size: int | None) -> None:
    """Check that a batch, before padding, has the common schema except for its rows, and lengths that match."""
    if differences := schema.differences(dataclasses.replace(schema_of(batch), batch_size=schema.batch_size)):
        raise ValueError(f"a batch differs from the first one: {'; '.join(differences)}")
    if max_batch_size is not None and batch.batch_size > max_batch_size:
        raise ConfigError(
            f"a batch has {batch.batch_size} rows, but the Balancer's batch_size is {max_batch_size}; raise it, or "
            "leave it out"
        )
    check_contents(batch)
