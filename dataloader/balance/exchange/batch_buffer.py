"""A batch as one memory, where its rows lie in it, and a new batch as views of one memory. On any device.

What lies where follows from the plan alone, on the host; nothing is read from a device.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.balance.exchange.byte_copy import Copies, as_bytes
from evenrank.dataloader.balance.exchange.plan import ALIGNMENT, Plan, Section, row_bytes
from evenrank.dataloader.batch import FieldSpec, JaggedBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Where each row of a batch lies in its memory: int64 [S, B], in bytes. T is the number of tensors."""

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]  # 0 for padding, for which dense tensors have room all the same
    tensor_starts: NDArray[np.int64]  # [T]
    tensor_sizes: NDArray[np.int64]  # [T]

    def __len__(self) -> int:
        return int((self.tensor_starts + _aligned(self.tensor_sizes)).max(initial=0))


def rows_of(sections: tuple[Section, ...], lengths: NDArray[np.int64], rows: int) -> Rows:
    """Lay a batch's tensors out one behind the other, each aligned.

    Args:
        sections: of the batch; S of them.
        lengths: int64 [K, B], padding 0.
        rows: that are real.

    """
    sizes = row_bytes(sections, lengths)
    # The keys of a field lie one behind the other.
    firsts = [indices[0] for indices in by_tensor(sections)]
    tensor_sizes = np.add.reduceat(sizes.sum(axis=1), firsts) if firsts else np.empty(0, dtype=np.int64)
    aligned = _aligned(tensor_sizes)
    tensor_starts = np.cumsum(aligned) - aligned
    flat = sizes.reshape(-1)
    starts = (np.cumsum(flat) - flat).reshape(sizes.shape)
    shifts = tensor_starts - (np.cumsum(tensor_sizes) - tensor_sizes)
    starts += np.repeat(shifts, np.diff([*firsts, len(sections)]))[:, np.newaxis]
    sizes[:, rows:] = 0
    return Rows(starts=starts, sizes=sizes, tensor_starts=tensor_starts, tensor_sizes=tensor_sizes)


@functools.cache
def by_tensor(sections: tuple[Section, ...]) -> tuple[tuple[int, ...], ...]:
    """Group the numbers of sections by the tensor that they are of: a field's values, or its weights."""
    groups = itertools.groupby(range(len(sections)), lambda i: (sections[i].field, sections[i].is_weights))
    return tuple(tuple(indices) for _, indices in groups)


def write_batch(batch: JaggedBatch, sections: tuple[Section, ...], rows: Rows, memory: Tensor) -> None:
    """Copy a CPU batch to the front of a memory, as `rows` says."""
    fields = dict(batch.tensors())
    for start, size, indices in zip(rows.tensor_starts, rows.tensor_sizes, by_tensor(sections), strict=True):
        section = sections[indices[0]]
        memory[start : start + size] = as_bytes(_storage(fields[section.field], section.is_weights))


def _storage(value: "KeyedJaggedTensor | Tensor | None", is_weights: bool) -> Tensor:
    if isinstance(value, KeyedJaggedTensor):
        stored: Tensor = value.weights() if is_weights else value.values()
    else:
        assert value is not None  # a field that is None has no section
        stored = value
    return stored.contiguous()


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A contiguous tensor that is a part of a memory."""

    begin: int  # in elements
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def at(cls, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Self:
        """Say at which byte a tensor begins, which is a multiple of 16."""
        strides = [1]
        for count in reversed(shape[1:]):
            strides.insert(0, strides[0] * count)
        return cls(begin=begin // dtype.itemsize, dtype=dtype, shape=shape, strides=tuple(strides))


class Memory:
    """A memory from which views are taken, each by one operator: a step has many.

    Args:
        memory: uint8, contiguous, at the beginning of its storage; its size is a multiple of 16.

    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._by_dtype: dict[torch.dtype, Tensor] = {}

    def tensor(self, view: View) -> Tensor:
        """Return a view."""
        if view.dtype not in self._by_dtype:
            self._by_dtype[view.dtype] = self._memory.view(view.dtype)
        return self._by_dtype[view.dtype].as_strided(view.shape, view.strides, view.begin)


@dataclass(frozen=True, kw_only=True, slots=True)
class JaggedViews:
    """A KeyedJaggedTensor that is parts of a memory, and what is known of it on the host."""

    keys: list[str]
    values: View
    weights: View | None
    lengths: View
    offsets: View
    stride: int
    length_per_key: list[int]
    offset_per_key: list[int]

    def of(self, memory: Memory) -> KeyedJaggedTensor:
        """Return it, with its host-side caches, so that nothing downstream synchronises to learn them."""
        return KeyedJaggedTensor(
            keys=self.keys,
            values=memory.tensor(self.values),
            weights=None if self.weights is None else memory.tensor(self.weights),
            lengths=memory.tensor(self.lengths),
            offsets=memory.tensor(self.offsets),
            stride=self.stride,
            length_per_key=self.length_per_key,
            offset_per_key=self.offset_per_key,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NewBatch:
    """What a new batch looks like: where its tensors, and then its lengths and offsets, lie in one memory."""

    rows: Rows
    size: int  # of the memory
    facts: NDArray[np.uint8]  # lengths, offsets and padding rows, as bytes, which come from the host
    copies: Copies  # from the facts to the memory
    dense: dict[str, View]
    jagged: dict[str, JaggedViews]
    host: dict[str, Any]  # what is known on the host


def lay_out_batch(plan: Plan) -> NewBatch:
    """Work out what the batch after an exchange looks like."""
    schema = plan.schema
    rows = rows_of(plan.sections, plan.lengths, plan.num_real)
    specs = {spec.name: spec for spec in schema.fields}
    views: dict[tuple[str, bool], View] = {}
    facts = _Facts(at=len(rows))
    tensors = zip(by_tensor(plan.sections), rows.tensor_starts.tolist(), rows.tensor_sizes.tolist(), strict=True)
    for indices, start, size in tensors:
        section = plan.sections[indices[0]]
        spec = specs[section.field]
        if section.key is None and plan.num_real < schema.batch_size:
            fill = torch.full((schema.batch_size - plan.num_real, *spec.shape), spec.fill, dtype=spec.dtype)
            facts.add(as_bytes(fill).numpy(), ending_at=start + size)
        views[section.field, section.is_weights] = _view_of(spec, section, start, size, schema.batch_size)
    jagged: dict[str, JaggedViews] = {}
    key = 0
    for spec in schema.fields:
        if spec.keys is not None and spec.dtype is not None:
            jagged[spec.name] = _jagged_views(spec, plan.lengths[key : key + len(spec.keys)], views, facts)
            key += len(spec.keys)
    return NewBatch(
        rows=rows,
        size=facts.end,
        facts=facts.joined(),
        copies=facts.copies(),
        dense={name: view for (name, _), view in views.items() if name not in jagged},
        jagged=jagged,
        host={
            "num_real": plan.num_real,
            "loss_tokens": plan.loss_tokens,
            "world_loss_tokens": plan.world_loss_tokens,
            "max_lengths": schema.max_lengths(plan.lengths),
        },
    )


def fields_in(memory: Tensor, new: NewBatch) -> dict[str, Any]:
    """Make the fields of a new batch that differ from the old one's, as views of its memory: uint8 [new.size]."""
    made = Memory(memory)
    dense = {name: made.tensor(view) for name, view in new.dense.items()}
    return new.host | dense | {name: views.of(made) for name, views in new.jagged.items()}


class _Facts:
    """Arrays as bytes, one behind the other, each aligned, and where in a memory they belong.

    Args:
        at: the byte of the memory at which those begin that have no place of their own.

    """

    def __init__(self, at: int) -> None:
        self.end = at
        self._parts: list[NDArray[np.uint8]] = [np.empty(0, dtype=np.uint8)]
        self._size = 0
        self._copies: list[tuple[int, int, int]] = []

    def add(self, data: NDArray[Any], ending_at: int | None = None) -> int:
        """Add an array and return the byte of the memory at which it begins."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        gap = -len(flat) % ALIGNMENT
        target = self.end if ending_at is None else ending_at - len(flat)
        if ending_at is None:
            self.end += len(flat) + gap
        self._copies.append((self._size, target, len(flat)))
        self._parts += [flat, np.zeros(gap, dtype=np.uint8)]
        self._size += len(flat) + gap
        return target

    def joined(self) -> NDArray[np.uint8]:
        """Return all of them: uint8."""
        return np.concatenate(self._parts)

    def copies(self) -> Copies:
        """Say how they get there from a memory (1) that begins with them."""
        return Copies.of(1, *np.array(self._copies, dtype=np.int64).reshape(-1, 3).T)


def _view_of(spec: FieldSpec, section: Section, begin: int, size: int, batch_size: int) -> View:
    dtype = spec.weights_dtype if section.is_weights else spec.dtype
    shape = () if section.is_weights else spec.shape
    assert dtype is not None
    row = math.prod(shape) * dtype.itemsize
    count = batch_size if section.key is None else size // max(row, 1)
    return View.at(begin, dtype, (count, *shape))


def _jagged_views(
    spec: FieldSpec, lengths: NDArray[np.int64], views: dict[tuple[str, bool], View], facts: _Facts
) -> JaggedViews:
    assert spec.keys is not None
    assert spec.lengths_dtype is not None
    dtype = torch.empty(0, dtype=spec.lengths_dtype).numpy().dtype
    flat = lengths.reshape(-1)
    parts = []
    for values in (flat, np.concatenate([[0], np.cumsum(flat)])):
        parts.append(View.at(facts.add(values.astype(dtype)), spec.lengths_dtype, (len(values),)))
    per_key = lengths.sum(axis=1).tolist()
    return JaggedViews(
        keys=list(spec.keys),
        values=views[spec.name, False],
        weights=views.get((spec.name, True)),
        lengths=parts[0],
        offsets=parts[1],
        stride=lengths.shape[1],
        length_per_key=per_key,
        offset_per_key=[0, *itertools.accumulate(per_key)],
    )


def _aligned(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    aligned: NDArray[np.int64] = -(-sizes // ALIGNMENT) * ALIGNMENT
    return aligned
