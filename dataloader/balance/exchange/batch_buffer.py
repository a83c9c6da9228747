"""A batch as one buffer, on any device: the layout of its rows, and a new batch as views of one buffer.

All offsets follow from the plan, on the host; nothing is read back from a device.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.balance.exchange.cpu_copy import ByteCopies
from evenrank.dataloader.balance.exchange.plan import ALIGNMENT, Plan, Section, aligned, row_bytes, starts_of
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.schema import FieldSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """Where the rows of a batch are in its buffer, in bytes. S sections, B rows, T tensors."""

    starts: NDArray[np.int64]  # [S, B]: start of each row in each section
    section_starts: NDArray[np.int64]  # [S]: start of each section, also where there are no rows
    num_bytes: NDArray[np.int64]  # [S, B]: bytes of each row in each section; 0 for padding, dense or not
    tensor_starts: NDArray[np.int64]  # [T]: start of each tensor
    tensor_bytes: NDArray[np.int64]  # [T]: bytes of each tensor, padding rows included

    @property
    def total_bytes(self) -> int:
        """Size of the buffer."""
        return int((self.tensor_starts + aligned(self.tensor_bytes)).max(initial=0))


def lay_out_rows(sections: tuple[Section, ...], lengths: NDArray[np.int64], num_real: int) -> RowLayout:
    """Lay the tensors of a batch out one after the other, each aligned, given lengths, int64 [K, B]."""
    num_bytes = row_bytes(sections, lengths)
    first = first_sections(sections)
    section_bytes = num_bytes.sum(axis=1)
    tensor_bytes = np.add.reduceat(section_bytes, first) if first else np.empty(0, dtype=np.int64)
    tensor_starts = starts_of(aligned(tensor_bytes))
    alignment_gaps = np.repeat(tensor_starts - starts_of(tensor_bytes), np.diff([*first, len(sections)]))
    section_starts = starts_of(section_bytes) + alignment_gaps
    starts = section_starts[:, np.newaxis] + starts_of(num_bytes)
    num_bytes[:, num_real:] = 0
    return RowLayout(
        starts=starts,
        section_starts=section_starts,
        num_bytes=num_bytes,
        tensor_starts=tensor_starts,
        tensor_bytes=tensor_bytes,
    )


@functools.cache
def first_sections(sections: tuple[Section, ...]) -> tuple[int, ...]:
    """Return the index of the first section of each tensor: the values of a field, or its weights."""
    groups = itertools.groupby(range(len(sections)), lambda i: (sections[i].field, sections[i].is_weights))
    return tuple(next(indices) for _, indices in groups)


def write_batch(batch: JaggedBatch, sections: tuple[Section, ...], rows: RowLayout, buffer: Tensor) -> None:
    """Copy the tensors of a CPU batch into a uint8 buffer on the CPU, laid out as `rows` says."""
    fields = dict(batch.tensors())
    for start, size, index in zip(rows.tensor_starts, rows.tensor_bytes, first_sections(sections), strict=True):
        section = sections[index]
        tensor = fields[section.field]
        if isinstance(tensor, KeyedJaggedTensor):
            tensor = tensor.weights() if section.is_weights else tensor.values()
        assert tensor is not None  # a field that is None has no section
        buffer[start : start + size] = as_bytes(tensor.contiguous())


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor of any dtype and shape as uint8 [bytes]."""
    if tensor.numel() == 0:  # empty tensors can have strides that `view` rejects
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)


class TensorView(NamedTuple):
    """A contiguous tensor inside a buffer."""

    start: int  # first byte, a multiple of ALIGNMENT
    dtype: torch.dtype
    shape: tuple[int, ...]


class JaggedTensorView(NamedTuple):
    """A KeyedJaggedTensor inside a buffer."""

    tensors: dict[str, TensorView]  # by argument of KeyedJaggedTensor
    metadata: dict[str, Any]  # its other arguments: all that it caches on the host, so that using it never synchronizes


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputLayout:
    """The buffer of a balanced batch: its tensors, then its lengths and offsets."""

    rows: RowLayout
    total_bytes: int
    host_data: NDArray[np.uint8]  # bytes that the host computes: lengths, offsets, and padding rows of dense tensors
    host_copies: ByteCopies  # copies of `host_data` (source 1) to the buffer
    fields: dict[str, Any]  # fields that differ from those of the loaded batch: views of the buffer, or other values


def lay_out_output(plan: Plan, host_start: int) -> OutputLayout:
    """Lay out the batch that a plan produces, with `host_data` from byte `host_start` of its source on."""
    rows = lay_out_rows(plan.sections, plan.lengths, plan.num_real)
    num_rows = plan.lengths.shape[1]
    fields: dict[str, Any] = {
        "batch_size": num_rows,
        "num_real": plan.num_real,
        "loss_tokens": plan.loss_tokens,
        "world_loss_tokens": plan.world_loss_tokens,
        "dp_size": len(plan.rank_of),
        "max_lengths": plan.schema.max_lengths(plan.lengths),
    }
    tensors = [(plan.sections[index].field, plan.sections[index].is_weights) for index in first_sections(plan.sections)]
    starts = dict(zip(tensors, rows.tensor_starts.tolist(), strict=True))
    host_data = _HostData(rows.total_bytes)
    first_key = 0
    for spec in plan.schema.fields:
        if spec.dtype is None:
            continue
        start = starts[spec.name, False]
        if spec.keys is None:
            fields[spec.name] = TensorView(start, spec.dtype, (num_rows, *spec.shape))
            if plan.num_real < num_rows:
                padding = torch.full((num_rows - plan.num_real, *spec.shape), spec.fill, dtype=spec.dtype, device="cpu")
                bytes_of_row = math.prod(spec.shape) * spec.dtype.itemsize
                host_data.add(as_bytes(padding).numpy(), start + plan.num_real * bytes_of_row)
            continue
        lengths = plan.lengths[first_key : first_key + len(spec.keys)]
        first_key += len(spec.keys)
        views = {"values": TensorView(start, spec.dtype, (int(lengths.sum()), *spec.shape))}
        if spec.weights_dtype is not None:
            views["weights"] = TensorView(starts[spec.name, True], spec.weights_dtype, (int(lengths.sum()),))
        fields[spec.name] = _jagged_view(spec, lengths, views, host_data)
    ranges = np.array(host_data.ranges, dtype=np.int64).reshape(-1, 3).T
    return OutputLayout(
        rows=rows,
        total_bytes=host_data.buffer_end,
        host_data=np.concatenate(host_data.parts),
        host_copies=ByteCopies.from_source(1, ranges[0] + host_start, *ranges[1:]),
        fields=fields,
    )


def output_fields(buffer: Tensor, output: OutputLayout) -> dict[str, Any]:
    """Return the fields of a balanced batch that differ from the loaded one, as views of uint8 [total_bytes]."""
    by_dtype: dict[torch.dtype, Tensor] = {}

    def tensor(view: TensorView) -> Tensor:  # one operator call, because a step has many
        start, dtype, shape = view
        if dtype not in by_dtype:
            by_dtype[dtype] = buffer.view(dtype)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        return by_dtype[dtype].as_strided(shape, strides, start // dtype.itemsize)

    fields = dict(output.fields)
    for name, value in fields.items():
        if isinstance(value, TensorView):
            fields[name] = tensor(value)
        elif isinstance(value, JaggedTensorView):
            tensors = {key: tensor(view) for key, view in value.tensors.items()}
            fields[name] = KeyedJaggedTensor(**tensors, **value.metadata)
    return fields


class _HostData:
    """Arrays as bytes, one after the other, each aligned, and the places in the output buffer that they go to."""

    def __init__(self, buffer_end: int) -> None:
        self.buffer_end = buffer_end  # where arrays without a place of their own follow
        self.parts: list[NDArray[np.uint8]] = [np.empty(0, dtype=np.uint8)]
        self.ranges: list[tuple[int, int, int]] = []  # start in the data, start in the output buffer, bytes
        self._size = 0

    def add(self, data: NDArray[Any], target: int | None = None) -> int:
        """Add an array that goes to byte `target` of the output buffer, or is appended to it; return its first byte."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        gap = -len(flat) % ALIGNMENT
        if target is None:
            target = self.buffer_end
            self.buffer_end += len(flat) + gap
        self.ranges.append((self._size, target, len(flat)))
        self.parts += [flat, np.zeros(gap, dtype=np.uint8)]
        self._size += len(flat) + gap
        return target


def _jagged_view(
    spec: FieldSpec, lengths: NDArray[np.int64], views: dict[str, TensorView], host_data: _HostData
) -> JaggedTensorView:
    """Return the view of a field, given those of its values and weights; its lengths and offsets become host data."""
    assert spec.keys is not None
    assert spec.lengths_dtype is not None
    dtype = torch.empty(0, dtype=spec.lengths_dtype, device="cpu").numpy().dtype
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for name, values in (("lengths", lengths.reshape(-1)), ("offsets", offsets)):
        views[name] = TensorView(host_data.add(values.astype(dtype)), spec.lengths_dtype, (len(values),))
    length_per_key = lengths.sum(axis=1).tolist()
    metadata = {
        "keys": list(spec.keys),
        "stride": lengths.shape[1],
        "length_per_key": length_per_key,
        "offset_per_key": [0, *itertools.accumulate(length_per_key)],
    }
    return JaggedTensorView(views, metadata)
