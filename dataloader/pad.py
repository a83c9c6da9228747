"""Fills every batch to `batch_size` rows with zero-length ones, and streams that end early with empty batches."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterDataPipe
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batch import BatchSchema, FieldSpec, JaggedBatch, keyed_jagged_tensor

Sample = TypeVar("Sample")
Batch = TypeVar("Batch", bound=JaggedBatch)


def pad_batch(batch: Batch, batch_size: int) -> Batch:
    """Return the batch with rows added at its end up to `batch_size`: length 0 in every key, fills in dense fields.

    Raises:
        ValueError: the batch has more rows than that.

    """
    missing = batch_size - batch.batch_size
    if missing < 0:
        raise ValueError(f"a batch of {batch.batch_size} rows cannot be padded to {batch_size}")
    if missing == 0:
        return batch
    fills = {entry.name: entry.metadata.get("fill", 0) for entry in dataclasses.fields(batch)}
    padded: dict[str, Any] = {}
    for name, value in batch.tensors():
        if isinstance(value, KeyedJaggedTensor):
            lengths = value.lengths().view(len(value.keys()), -1).numpy()
            lengths = np.pad(lengths, ((0, 0), (0, missing)))
            padded[name] = keyed_jagged_tensor(value.keys(), value.values(), lengths, value.weights_or_none())
        elif isinstance(value, Tensor):
            padded[name] = torch.cat([value, value.new_full((missing, *value.shape[1:]), fills[name])])
    return dataclasses.replace(batch, batch_size=batch_size, **padded)


def empty_batch(schema: BatchSchema) -> JaggedBatch:
    """Return a batch of this schema that is all padding: what a rank trains on once its data have run out."""
    fields: dict[str, Any] = {spec.name: _empty_field(spec, schema.batch_size) for spec in schema.fields}
    nothing = np.zeros((len(schema.jagged_keys), schema.batch_size), dtype=np.int64)
    return schema.batch_type(
        batch_size=schema.batch_size, num_real=0, max_lengths=schema.max_lengths(nothing), **fields
    )


def _empty_field(spec: FieldSpec, batch_size: int) -> "KeyedJaggedTensor | Tensor | None":
    if spec.dtype is None:
        return None
    if spec.keys is None:
        return torch.full((batch_size, *spec.shape), spec.fill, dtype=spec.dtype)
    values = torch.empty((0, *spec.shape), dtype=spec.dtype)
    weights = None if spec.weights_dtype is None else torch.empty(0, dtype=spec.weights_dtype)
    lengths = torch.zeros((len(spec.keys), batch_size), dtype=spec.lengths_dtype).numpy()
    return keyed_jagged_tensor(spec.keys, values, lengths, weights)


class PaddedBatches(IterDataPipe, Generic[Sample, Batch]):  # type: ignore[type-arg]
    """Batches of exactly `batch_size` rows over any iterable of samples.

    Samples are taken `batch_size` at a time and collated; the last group may be smaller, and is padded. It is a
    DataPipe to be put outside of DataLoaders: a DataLoader that iterates over a DataPipe opens a process group of its
    own, and hangs if one rank does not take part.

    Args:
        samples: whatever `collate` takes; iterated anew for each iteration over the batches.
        batch_size: rows of every batch.
        collate: makes a batch of 0..batch_size samples, with one row each.
        drop_last: leave out a last group that is smaller than `batch_size`.
        num_batches: yield this many batches, at the end with empty ones, where the samples last for fewer; so that
            ranks with fewer samples take as many steps as the others.

    """

    def __init__(
        self,
        samples: Iterable[Sample],
        *,
        batch_size: int,
        collate: Callable[[Sequence[Sample]], Batch],
        drop_last: bool = False,
        num_batches: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        self._samples = samples
        self._batch_size = batch_size
        self._collate = collate
        self._drop_last = drop_last
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[Batch]:
        groups = grouped(self._samples, self._batch_size, drop_last=self._drop_last, num_groups=self._num_batches or 0)
        for group in groups:
            yield pad_batch(self._collate(group), self._batch_size)


def grouped(
    samples: Iterable[Sample], size: int, *, drop_last: bool = False, num_groups: int = 0
) -> Iterator[list[Sample]]:
    """Cut samples into lists of `size`, of which the last may be smaller; add empty ones up to `num_groups`."""
    iterator = iter(samples)
    yielded = 0
    while group := list(islice(iterator, size)):
        if len(group) < size and drop_last:
            break
        yield group
        yielded += 1
    for _ in range(yielded, num_groups):
        yield []
