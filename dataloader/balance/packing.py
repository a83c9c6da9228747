"""Rows of a batch -> ranges of bytes in a send buffer, and what arrived -> a batch. On any device.

What lies where follows from the plan alone, on the host; nothing is read from the tensors.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.balance.copying import Moves, as_bytes
from evenrank.dataloader.balance.plan import Plan, Section, row_bytes
from evenrank.dataloader.batch import JaggedBatch, keyed_jagged_tensor, schema_of

Batch = TypeVar("Batch", bound=JaggedBatch)
Copy = Callable[[Sequence[Moves]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Where each row of a batch lies in the tensors of its fields: int64 [S, B], in bytes."""

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """Ranges that make up the sections of a new batch: int64 [S, n], in bytes."""

    starts: NDArray[np.int64]  # in the memory that they come from
    targets: NDArray[np.int64]  # from the beginning of their section
    sizes: NDArray[np.int64]


def rows_of(sections: tuple[Section, ...], lengths: NDArray[np.int64]) -> Rows:
    """Work out where a batch's rows lie, given its lengths [K, B]."""
    sizes = np.zeros((len(sections), lengths.shape[1]), dtype=np.int64)
    starts = np.zeros_like(sizes)
    for indices in _by_tensor(sections):
        begin = 0  # the keys of a field lie one behind the other
        for index in indices:
            sizes[index] = row_bytes(sections[index], lengths)
            starts[index] = begin + np.cumsum(sizes[index]) - sizes[index]
            begin += int(sizes[index].sum())
    return Rows(starts=starts, sizes=sizes)


def tensors_of(batch: JaggedBatch, sections: tuple[Section, ...]) -> dict[tuple[str, bool], Tensor]:
    """Return the memory of each field, and of its weights, that has sections: contiguous tensors."""
    fields = dict(batch.tensors())
    return {
        (section.field, section.is_weights): _storage(fields[section.field], section.is_weights) for section in sections
    }


def _storage(value: "KeyedJaggedTensor | Tensor | None", is_weights: bool) -> Tensor:
    if isinstance(value, KeyedJaggedTensor):
        stored: Tensor = value.weights() if is_weights else value.values()
    else:
        assert value is not None  # a field that is None has no section
        stored = value
    return stored.contiguous()


def pack(
    tensors: Mapping[tuple[str, bool], Tensor],
    sections: tuple[Section, ...],
    rows: Rows,
    *,
    chosen: NDArray[np.int64],
    counts: NDArray[np.int64],
    offsets: NDArray[np.int64],
    buffer: Tensor,
) -> list[Moves]:
    """Say how rows of a batch get into a buffer, chunk after chunk.

    Args:
        tensors: of the batch, by field and whether they are weights.
        sections: what a chunk consists of; S of them.
        rows: of the batch.
        chosen: int64 [n], the rows to pack, by chunk.
        counts: int64 [C], how many of them are in each chunk.
        offsets: int64 [S, C], where each section of each chunk begins.
        buffer: uint8.

    """
    chunks = np.repeat(np.arange(len(counts)), counts)
    first_of_chunk = np.cumsum(counts) - counts
    sizes = rows.sizes[:, chosen]
    running = np.cumsum(sizes, axis=1) - sizes
    within_chunk = running - running[:, first_of_chunk[chunks]]
    targets = offsets[:, chunks] + within_chunk
    return [
        Moves(
            source=as_bytes(tensors[sections[indices[0]].field, sections[indices[0]].is_weights]),
            target=buffer,
            source_starts=rows.starts[indices][:, chosen].reshape(-1),
            target_starts=targets[indices].reshape(-1),
            sizes=sizes[indices].reshape(-1),
        )
        for indices in _by_tensor(sections)
    ]


def unpack(
    batch: Batch,
    plan: Plan,
    tensors: Mapping[tuple[str, bool], Tensor],
    received: Tensor,
    *,
    arrived: Arrivals,
    stayed: Arrivals,
    copy: Copy,
) -> Batch:
    """Build the new batch; facts about the step stay those of the old one.

    Args:
        batch: as it was before, on the CPU.
        plan: of the step.
        tensors: of the batch, on any device, by field and whether they are weights.
        received: uint8, on that device.
        arrived: ranges of `received`.
        stayed: ranges of `tensors`.
        copy: carries moves out there.

    """
    schema = schema_of(batch)
    moves: list[Moves] = []
    totals = np.array([int(row_bytes(section, plan.lengths)[: plan.num_real].sum()) for section in plan.sections])
    made: dict[tuple[str, bool], Tensor] = {}
    key = 0  # of the next row of the lengths
    for spec in schema.fields:
        if spec.dtype is None:
            continue
        if spec.keys is None:
            dense = torch.empty((batch.batch_size, *spec.shape), dtype=spec.dtype, device=received.device)
            dense[plan.num_real :] = spec.fill
            made[spec.name, False] = dense
            continue
        total = int(plan.lengths[key : key + len(spec.keys)].sum())
        key += len(spec.keys)
        made[spec.name, False] = torch.empty((total, *spec.shape), dtype=spec.dtype, device=received.device)
        if spec.weights_dtype is not None:
            made[spec.name, True] = torch.empty(total, dtype=spec.weights_dtype, device=received.device)
    for indices in _by_tensor(plan.sections):
        which = plan.sections[indices[0]].field, plan.sections[indices[0]].is_weights
        begins = (np.cumsum(totals[indices]) - totals[indices])[:, np.newaxis]
        for source, ranges in ((received, arrived), (as_bytes(tensors[which]), stayed)):
            moves.append(
                Moves(
                    source=source,
                    target=as_bytes(made[which]),
                    source_starts=ranges.starts[indices].reshape(-1),
                    target_starts=(begins + ranges.targets[indices]).reshape(-1),
                    sizes=ranges.sizes[indices].reshape(-1),
                )
            )
    copy(moves)
    fields: dict[str, Any] = {}
    key = 0
    for spec in schema.fields:
        if spec.dtype is None:
            continue
        fields[spec.name] = made[spec.name, False]
        if spec.keys is not None:
            counts = torch.from_numpy(plan.lengths[key : key + len(spec.keys)]).to(spec.lengths_dtype).numpy()
            key += len(spec.keys)
            weights = made.get((spec.name, True))
            fields[spec.name] = keyed_jagged_tensor(spec.keys, made[spec.name, False], counts, weights)
    return dataclasses.replace(
        batch,
        num_real=plan.num_real,
        loss_tokens=plan.loss_tokens,
        world_loss_tokens=plan.world_loss_tokens,
        max_lengths=schema.max_lengths(plan.lengths),
        **fields,
    )


def _by_tensor(sections: tuple[Section, ...]) -> list[list[int]]:
    """Group the numbers of sections by the tensor that they are of."""
    groups = itertools.groupby(range(len(sections)), lambda i: (sections[i].field, sections[i].is_weights))
    return [list(indices) for _, indices in groups]
