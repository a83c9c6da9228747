"""Rows of a CPU batch -> one buffer of bytes, and ranges of such buffers -> a batch."""

import dataclasses
import itertools
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.balance.copying import as_bytes, copy_ranges
from evenrank.dataloader.balance.plan import Plan, Section, row_bytes
from evenrank.dataloader.batch import JaggedBatch, keyed_jagged_tensor, lengths_of, schema_of

Batch = TypeVar("Batch", bound=JaggedBatch)


def pack(
    batch: JaggedBatch,
    sections: tuple[Section, ...],
    *,
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
    offsets: NDArray[np.int64],
    size: int,
) -> Tensor:
    """Copy rows of a CPU batch into a buffer, chunk after chunk.

    Args:
        batch: that the rows are of.
        sections: what a chunk consists of; S of them.
        rows: int64 [n], by chunk.
        counts: int64 [C], how many of them are in each chunk.
        offsets: int64 [S, C], where each section of each chunk begins.
        size: of the buffer.

    Returns:
        uint8 [size].

    """
    buffer = torch.zeros(size, dtype=torch.uint8)
    target = as_bytes(buffer)
    lengths = lengths_of(batch)
    chunks = np.repeat(np.arange(len(counts)), counts)
    first_of_chunk = np.cumsum(counts) - counts
    tensors = dict(batch.tensors())
    for _, group in itertools.groupby(enumerate(sections), lambda pair: (pair[1].field, pair[1].is_weights)):
        begin = 0  # of the section's rows in their tensor: the keys of a field lie one behind the other
        for index, section in group:
            sizes = row_bytes(section, lengths)
            starts = begin + np.cumsum(sizes) - sizes
            begin += int(sizes.sum())
            moved = sizes[rows]
            running = np.concatenate(([0], np.cumsum(moved)))
            within_chunk = running[:-1] - running[first_of_chunk[chunks]]
            copy_ranges(
                as_bytes(_storage(tensors[section.field], section)),
                target,
                starts[rows],
                offsets[index][chunks] + within_chunk,
                moved,
            )
    return buffer


def _storage(value: "KeyedJaggedTensor | Tensor | None", section: Section) -> Tensor:
    if isinstance(value, KeyedJaggedTensor):
        stored: Tensor = value.weights() if section.is_weights else value.values()
    else:
        assert value is not None  # a field that is None has no section
        stored = value
    return stored.contiguous()


def unpack(batch: Batch, plan: Plan, received: Tensor, *, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Batch:
    """Build the new batch from a receive buffer; facts about the step stay those of the old one.

    Args:
        batch: as it was before.
        plan: of the step.
        received: uint8.
        starts: int64 [S, n], ranges of the buffer that make up each section, in ascending order of positions.
        sizes: int64 [S, n], of those ranges, in bytes.

    """
    source = as_bytes(received)
    schema = schema_of(batch)
    fields: dict[str, Any] = {}
    index = 0  # of the next section
    key = 0  # of the next row of the lengths

    def fill(tensor: Tensor, count: int) -> Tensor:
        """Copy the next sections, one behind the other, to the front of a tensor."""
        nonlocal index
        chosen = slice(index, index + count)
        index += count
        flat = sizes[chosen].reshape(-1)
        copy_ranges(source, as_bytes(tensor), starts[chosen].reshape(-1), np.cumsum(flat) - flat, flat)
        return tensor

    for spec in schema.fields:
        if spec.dtype is None:
            continue
        if spec.keys is None:
            padded = torch.full((batch.batch_size, *spec.shape), spec.fill, dtype=spec.dtype)
            fields[spec.name] = fill(padded, 1)
            continue
        count = len(spec.keys)
        lengths = plan.lengths[key : key + count]
        key += count
        total = int(lengths.sum())
        values = fill(torch.empty((total, *spec.shape), dtype=spec.dtype), count)
        weights = None
        if spec.weights_dtype is not None:
            weights = fill(torch.empty(total, dtype=spec.weights_dtype), count)
        counts = torch.from_numpy(lengths).to(spec.lengths_dtype).numpy()
        fields[spec.name] = keyed_jagged_tensor(spec.keys, values, counts, weights)
    return dataclasses.replace(
        batch,
        num_real=plan.num_real,
        loss_tokens=plan.loss_tokens,
        world_loss_tokens=plan.world_loss_tokens,
        max_lengths=schema.max_lengths(plan.lengths),
        **fields,
    )
