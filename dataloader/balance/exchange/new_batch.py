"""The tensors of a balanced batch, as views of one buffer on any device. Nothing is read back from the device.

A training thread that is bound by the host waits for all that happens between two steps, so `plan_views` leaves little
to `make_fields`: one operator for all tensors of a dtype, and one constructor for each jagged field.
"""

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.balance.exchange.layout import Layout
from evenrank.dataloader.balance.exchange.sections import dtypes_of_parts
from evenrank.dataloader.batches.schema import BatchSchema


class _Jagged(NamedTuple):
    """A KeyedJaggedTensor of a schema. Views are numbered as `make_fields` makes them."""

    name: str
    keys: list[str]
    rows: slice  # of its keys among all jagged keys
    views: dict[str, int]  # of its arguments that are tensors
    shape: tuple[int, ...]  # of a value


class _Fields(NamedTuple):
    """The fields of a schema."""

    dtypes: list[tuple[torch.dtype, slice]]  # of views, and which of `Layout.views` are their sizes
    dense: list[tuple[str, int, tuple[int, ...]]]  # name, view, shape of a row
    jagged: list[_Jagged]


class Views(NamedTuple):
    """How a buffer becomes the fields of a batch."""

    fields: _Fields
    sizes: list[list[int]]
    """Of each dtype, the sizes of adjacent views of the whole buffer; those of tensors of other dtypes are not used."""
    num_rows: int
    caches: list[dict[str, Any]]
    """Of each jagged field, what its KeyedJaggedTensor knows on the host, so that using it never synchronizes."""


def plan_views(layout: Layout, schema: BatchSchema) -> Views:
    """Return the views of the fields of a batch in a buffer of `output_bytes`."""
    fields, sizes, length_per_key = _fields_of(schema), layout.views.tolist(), layout.length_per_key.tolist()
    caches = []
    for one in fields.jagged:
        counts = length_per_key[one.rows]
        offsets = [0, *itertools.accumulate(counts)]
        caches.append({"stride": schema.batch_size, "length_per_key": counts, "offset_per_key": offsets})
    return Views(fields, [sizes[part] for _, part in fields.dtypes], schema.batch_size, caches)


def make_fields(buffer: Tensor, views: Views) -> dict[str, Any]:
    """Return the fields by name, given a buffer, uint8 [output_bytes]."""
    parts = [
        part
        for (dtype, _), sizes in zip(views.fields.dtypes, views.sizes, strict=True)
        for part in buffer.view(dtype).split_with_sizes(sizes)
    ]
    fields: dict[str, Any] = {
        name: _shaped(parts[number], views.num_rows, shape) for name, number, shape in views.fields.dense
    }
    for one, cache in zip(views.fields.jagged, views.caches, strict=True):
        arguments = {argument: parts[number] for argument, number in one.views.items()}
        arguments["values"] = _shaped(arguments["values"], cache["offset_per_key"][-1], one.shape)
        fields[one.name] = KeyedJaggedTensor(keys=list(one.keys), **arguments, **cache)
    return fields


def _shaped(part: Tensor, num_rows: int, shape: tuple[int, ...]) -> Tensor:
    return part.view(num_rows, *shape) if shape else part


@functools.lru_cache
def _fields_of(schema: BatchSchema) -> _Fields:
    parts = dtypes_of_parts(schema)
    numbers: dict[int, int] = {}
    splits, first = [], 0
    for dtype in dict.fromkeys(parts):
        of_dtype = [part for part, other in enumerate(parts) if other == dtype]
        # Before each part there is a view of what is between it and the one before, and one after the last.
        numbers |= {part: first + 2 * index + 1 for index, part in enumerate(of_dtype)}
        splits.append((dtype, slice(first, first := first + 2 * len(of_dtype) + 1)))
    dense, jagged, part, first_key = [], [], 0, 0
    for spec in schema.fields:
        if spec.dtype is None:
            continue
        if spec.keys is None:
            dense.append((spec.name, numbers[part], spec.shape))
            part += 1
            continue
        names = ["values", *([] if spec.weights_dtype is None else ["weights"])]
        views = {name: numbers[part + index] for index, name in enumerate(names)}
        part += len(names)
        rows = slice(first_key, first_key := first_key + len(spec.keys))
        jagged.append(_Jagged(spec.name, list(spec.keys), rows, views, spec.shape))
    for one in jagged:
        one.views.update(lengths=numbers[part], offsets=numbers[part + 1])
        part += 2
    return _Fields(splits, dense, jagged)
