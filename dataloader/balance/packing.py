"""A batch as one memory, where its rows lie in it, and a new batch as views of one memory. On any device.

What lies where follows from the plan alone, on the host; nothing is read from a device.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.balance.copying import Copies, as_bytes
from evenrank.dataloader.balance.plan import ALIGNMENT, Plan, Section, row_bytes
from evenrank.dataloader.batch import BatchSchema, FieldSpec, JaggedBatch

Batch = TypeVar("Batch", bound=JaggedBatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Where each row of a batch lies in its memory: int64 [S, B], in bytes."""

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    begins: NDArray[np.int64]  # [T + 1]: of each tensor, aligned; the last is the size of all

    def __len__(self) -> int:
        return int(self.begins[-1])


def rows_of(sections: tuple[Section, ...], lengths: NDArray[np.int64], rows: int) -> Rows:
    """Lay a batch's tensors out one behind the other.

    Args:
        sections: of the batch; S of them.
        lengths: int64 [K, B], padding 0.
        rows: of dense fields that are there; their others are padding.

    """
    sizes = np.zeros((len(sections), lengths.shape[1]), dtype=np.int64)
    for index, section in enumerate(sections):
        sizes[index] = row_bytes(section, lengths)
        sizes[index, rows:] = 0
    starts = np.zeros_like(sizes)
    begins = [0]
    for indices in by_tensor(sections):  # the keys of a field lie one behind the other
        flat = sizes[indices].reshape(-1)
        starts[indices] = (begins[-1] + np.cumsum(flat) - flat).reshape(len(indices), -1)
        begins.append(begins[-1] + _aligned(int(flat.sum())))
    return Rows(starts=starts, sizes=sizes, begins=np.array(begins))


def by_tensor(sections: tuple[Section, ...]) -> list[list[int]]:
    """Group the numbers of sections by the tensor that they are of: a field's values, or its weights."""
    groups = itertools.groupby(range(len(sections)), lambda i: (sections[i].field, sections[i].is_weights))
    return [list(indices) for _, indices in groups]


def write_batch(batch: JaggedBatch, sections: tuple[Section, ...], rows: Rows, memory: Tensor) -> None:
    """Copy the real rows of a CPU batch to the front of a memory, as `rows` says."""
    fields = dict(batch.tensors())
    for begin, indices in zip(rows.begins, by_tensor(sections), strict=False):
        section = sections[indices[0]]
        source = as_bytes(_storage(fields[section.field], section.is_weights))
        size = int(rows.sizes[indices].sum())
        memory[begin : begin + size] = source[:size]


def _storage(value: "KeyedJaggedTensor | Tensor | None", is_weights: bool) -> Tensor:
    if isinstance(value, KeyedJaggedTensor):
        stored: Tensor = value.weights() if is_weights else value.values()
    else:
        assert value is not None  # a field that is None has no section
        stored = value
    return stored.contiguous()


@dataclass(frozen=True, kw_only=True, slots=True)
class NewBatch:
    """What a new batch looks like: where its tensors lie in one memory, and its lengths and padding in another."""

    schema: BatchSchema
    plan: Plan
    rows: Rows  # in the memory of the tensors
    size: int  # of that memory, with the padding of dense fields
    begins: NDArray[np.int64]  # [T]: of each tensor there
    facts: NDArray[np.uint8]  # lengths, offsets and padding rows, as bytes
    facts_at: dict[str, tuple[int, int]]  # of each jagged field: where in the facts its lengths and offsets begin
    padding: Copies  # from the facts to the memory of the tensors


def lay_out_batch(schema: BatchSchema, plan: Plan) -> NewBatch:
    """Work out what the batch after an exchange looks like."""
    rows = rows_of(plan.sections, plan.lengths, plan.num_real)
    specs = {spec.name: spec for spec in schema.fields}
    begins, facts, padding = [], [], []
    facts_at: dict[str, tuple[int, int]] = {}
    starts = np.empty_like(rows.starts)
    at = used = 0

    def add(data: NDArray[Any]) -> int:
        nonlocal used
        begin = used
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        facts.append(np.concatenate([flat, np.zeros(_aligned(len(flat)) - len(flat), dtype=np.uint8)]))
        used += len(facts[-1])
        return begin

    for number, indices in enumerate(by_tensor(plan.sections)):
        section = plan.sections[indices[0]]
        spec = specs[section.field]
        starts[indices] = rows.starts[indices] - rows.begins[number] + at
        begins.append(at)
        size = int(rows.sizes[indices].sum())
        if section.key is None and plan.num_real < schema.batch_size:
            fill = torch.full((schema.batch_size - plan.num_real, *spec.shape), spec.fill, dtype=spec.dtype)
            rest = as_bytes(fill).numpy()
            begin = add(rest)
            padding.append(Copies.of(1, np.array([begin]), np.array([at + size]), np.array([len(rest)])))
            size += len(rest)
        at += _aligned(size)
    key = 0
    for spec in schema.fields:
        if spec.keys is not None and spec.dtype is not None:
            lengths = plan.lengths[key : key + len(spec.keys)].reshape(-1)
            key += len(spec.keys)
            dtype = torch.empty(0, dtype=spec.lengths_dtype).numpy().dtype
            facts_at[spec.name] = (
                add(lengths.astype(dtype)),
                add(np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)),
            )
    nothing = np.empty(0, dtype=np.int64)
    return NewBatch(
        schema=schema,
        plan=plan,
        rows=Rows(starts=starts, sizes=rows.sizes, begins=rows.begins),
        size=at,
        begins=np.array(begins, dtype=np.int64),
        facts=np.concatenate(facts) if facts else np.empty(0, dtype=np.uint8),
        facts_at=facts_at,
        padding=Copies.joined([Copies.of(1, nothing, nothing, nothing), *padding]),
    )


def build_batch(batch: Batch, new: NewBatch, memory: Tensor, facts: Tensor) -> Batch:
    """Build the new batch from views of its memories; facts about the step stay those of the old one.

    Args:
        batch: as it was before.
        new: what it looks like now.
        memory: uint8 [new.size], of the tensors.
        facts: uint8 [len(new.facts)].

    """
    plan, schema = new.plan, new.schema
    specs = {spec.name: spec for spec in schema.fields}
    tensors: dict[tuple[str, bool], Tensor] = {}
    for begin, indices in zip(new.begins.tolist(), by_tensor(plan.sections), strict=True):
        section = plan.sections[indices[0]]
        spec = specs[section.field]
        count = schema.batch_size if section.key is None else int(plan.lengths[_keys(plan.sections, indices)].sum())
        dtype = spec.weights_dtype if section.is_weights else spec.dtype
        shape = () if section.is_weights else spec.shape
        tensors[section.field, section.is_weights] = _view(memory, begin, dtype, (count, *shape))
    fields: dict[str, Any] = {name: tensor for (name, is_weights), tensor in tensors.items() if not is_weights}
    key = 0
    for spec in schema.fields:
        if spec.keys is not None and spec.dtype is not None:
            lengths = plan.lengths[key : key + len(spec.keys)]
            key += len(spec.keys)
            fields[spec.name] = _keyed_jagged_tensor(spec, lengths, tensors, new.facts_at[spec.name], facts)
    return dataclasses.replace(
        batch,
        num_real=plan.num_real,
        loss_tokens=plan.loss_tokens,
        world_loss_tokens=plan.world_loss_tokens,
        max_lengths=schema.max_lengths(plan.lengths),
        **fields,
    )


def _keyed_jagged_tensor(
    spec: FieldSpec,
    lengths: NDArray[np.int64],
    tensors: dict[tuple[str, bool], Tensor],
    at: tuple[int, int],
    facts: Tensor,
) -> KeyedJaggedTensor:
    """Build one with its host-side caches, so that nothing downstream synchronises to learn them."""
    assert spec.keys is not None
    per_key = lengths.sum(axis=1).tolist()
    return KeyedJaggedTensor(
        keys=list(spec.keys),
        values=tensors[spec.name, False],
        weights=tensors.get((spec.name, True)),
        lengths=_view(facts, at[0], spec.lengths_dtype, (lengths.size,)),
        offsets=_view(facts, at[1], spec.lengths_dtype, (lengths.size + 1,)),
        stride=lengths.shape[1],
        length_per_key=per_key,
        offset_per_key=[0, *itertools.accumulate(per_key)],
    )


def _keys(sections: tuple[Section, ...], indices: list[int]) -> list[int]:
    return [key for index in indices if (key := sections[index].key) is not None]


def _view(memory: Tensor, begin: int, dtype: torch.dtype | None, shape: tuple[int, ...]) -> Tensor:
    """View a part of a memory as a tensor."""
    assert dtype is not None
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return memory[begin : begin + size].view(dtype).view(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
