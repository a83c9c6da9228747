"""The tensors of a balanced batch, as views of one buffer on any device. Nothing is read back from the device.

A training thread that is bound by the host waits for all that happens between two steps, so `plan_views` leaves little
to `make_fields`: one operator for all tensors of a dtype, and one constructor for each jagged field.
"""

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.balance.exchange.layout import ALIGNMENT, Layout
from evenrank.dataloader.batches.schema import BatchSchema


class Views(NamedTuple):
    """How a buffer becomes the fields of a batch."""

    splits: list[tuple[torch.dtype, list[int]]]
    """Of each dtype, the sizes of adjacent views of the whole buffer; those of tensors of other dtypes are not used."""
    dense: list[tuple[str, int, tuple[int, ...]]]
    """Field, number of its view among all, shape."""
    jagged: list[tuple[str, dict[str, tuple[int, tuple[int, ...]]], dict[str, Any]]]
    """Field, number and shape of the view for each tensor of the KeyedJaggedTensor, and its other arguments: all that
    it caches on the host, so that using it never synchronizes."""


class _Place(NamedTuple):
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def plan_views(layout: Layout, schema: BatchSchema) -> Views:
    """Return the views of the fields of a batch in a buffer of `output_bytes`."""
    starts, host_data = iter(layout.tensor_starts.tolist()), layout.output_data
    length_per_key, num_rows = layout.lengths.sum(axis=1).tolist(), layout.lengths.shape[1]
    dense: dict[str, _Place] = {}
    jagged: dict[str, tuple[dict[str, _Place], dict[str, Any]]] = {}
    first_key = 0
    for spec in schema.fields:
        if spec.dtype is None:
            continue
        if spec.keys is None:
            dense[spec.name] = _Place(next(starts), spec.dtype, (num_rows, *spec.shape))
            continue
        assert spec.lengths_dtype is not None
        counts = length_per_key[first_key : first_key + len(spec.keys)]
        first_key += len(spec.keys)
        places = {"values": _Place(next(starts), spec.dtype, (sum(counts), *spec.shape))}
        if spec.weights_dtype is not None:
            places["weights"] = _Place(next(starts), spec.weights_dtype, (sum(counts),))
        for name, count in (("lengths", len(counts) * num_rows), ("offsets", len(counts) * num_rows + 1)):
            places[name] = _Place(host_data, spec.lengths_dtype, (count,))
            host_data += -(-count * spec.lengths_dtype.itemsize // ALIGNMENT) * ALIGNMENT
        offsets = [0, *itertools.accumulate(counts)]
        cached = {"keys": list(spec.keys), "stride": num_rows, "length_per_key": counts, "offset_per_key": offsets}
        jagged[spec.name] = places, cached
    splits, numbers = _split([*dense.values(), *(one for ones, _ in jagged.values() for one in ones.values())], layout)
    return Views(
        splits,
        [(name, numbers[place], place.shape) for name, place in dense.items()],
        [
            (name, {one: (numbers[place], place.shape) for one, place in places.items()}, cached)
            for name, (places, cached) in jagged.items()
        ],
    )


def _split(places: list[_Place], layout: Layout) -> tuple[list[tuple[torch.dtype, list[int]]], dict[_Place, int]]:
    """Return the sizes of adjacent views of each dtype, and the number of the view of each place."""
    splits, numbers, first = [], {}, 0
    for dtype in dict.fromkeys(place.dtype for place in places):
        sizes: list[int] = []
        end = 0
        of_dtype = [
            (place.start // dtype.itemsize, math.prod(place.shape), place) for place in places if place.dtype == dtype
        ]
        # An empty tensor begins where the next one does, and comes before it.
        for start, size, place in sorted(of_dtype, key=lambda one: one[:2]):
            numbers[place] = first + len(sizes) + 1
            sizes += [start - end, size]
            end = start + size
        sizes.append(layout.output_bytes // dtype.itemsize - end)
        splits.append((dtype, sizes))
        first += len(sizes)
    return splits, numbers


def make_fields(buffer: Tensor, views: Views) -> dict[str, Any]:
    """Return the fields by name, given a buffer, uint8 [output_bytes]."""
    parts = [part for dtype, sizes in views.splits for part in buffer.view(dtype).split_with_sizes(sizes)]
    fields: dict[str, Any] = {name: _shaped(parts[number], shape) for name, number, shape in views.dense}
    for name, tensors, cached in views.jagged:
        arguments = {argument: _shaped(parts[number], shape) for argument, (number, shape) in tensors.items()}
        fields[name] = KeyedJaggedTensor(**arguments, **cached)
    return fields


def _shaped(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    return part if len(shape) == 1 else part.view(shape)
