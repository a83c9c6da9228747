"""The fields of a batch as bytes: what moves between ranks, and how a buffer becomes a batch again, on any device.

The values of a jagged key are a section, their weights another one, and so are the rows of a dense field. Sections of
one tensor are adjacent, in the order of its keys.

Nothing is read back from the device. A training thread that is bound by the host waits for all that happens between two
steps, so `wire_format` and `caches_of` leave little to `make_fields`: one operator for all tensors of a dtype, and one
constructor for each jagged field.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.balance.exchange.device import as_bytes
from evenrank.dataloader.balance.exchange.layout import Sections
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.schema import BatchSchema, FieldSpec
from evenrank.dataloader.batches.token_padding import TokenPadding


class _Part(NamedTuple):
    """A tensor of a field in the output buffer."""

    spec: FieldSpec
    argument: str  # of a KeyedJaggedTensor: values, weights, lengths or offsets; empty for a dense field
    dtype: torch.dtype
    keys: range  # of a jagged field, among all jagged keys

    @property
    def is_sent(self) -> bool:
        return self.argument not in ("lengths", "offsets")


def _parts_of(schema: BatchSchema) -> list[_Part]:
    """Return the parts of an output buffer: T tensors that are sent, then lengths and offsets of each jagged field."""
    parts, first_key = [], 0
    for spec in schema.fields:
        keys = range(first_key, first_key := first_key + len(spec.keys or ()))
        arguments = ("values", "weights", "lengths", "offsets") if keys else ("",)
        dtypes = (spec.dtype, spec.weights_dtype, spec.lengths_dtype, spec.lengths_dtype)
        of_field = zip(arguments, dtypes, strict=False)
        parts += [_Part(spec, argument, dtype, keys) for argument, dtype in of_field if dtype is not None]
    return sorted(parts, key=lambda part: not part.is_sent)


class WireFormat(NamedTuple):
    """How the batches of a schema become bytes, and a buffer becomes such a batch."""

    sections: Sections  # in the order of fields
    num_rows: int
    dtypes: list[tuple[torch.dtype, slice]]  # each with the slice of its views among all V
    fields: list[tuple[FieldSpec, dict[str, int]]]  # each with the numbers of its views, by argument
    padding: TokenPadding | None


@functools.lru_cache
def wire_format(schema: BatchSchema) -> WireFormat:
    """Return the wire format of a schema."""
    parts, padding = _parts_of(schema), []
    rows: list[tuple[int, int, int]] = []
    for tensor, (spec, argument, dtype, keys) in enumerate(part for part in parts if part.is_sent):
        element_bytes = (1 if argument == "weights" else math.prod(spec.shape)) * dtype.itemsize
        rows += [(tensor, key, element_bytes) for key in keys or (-1,)]
        padding += [np.empty(0, dtype=np.uint8)] * len(keys)
        if not keys:
            padding.append(as_bytes(torch.full(spec.shape, spec.fill, dtype=dtype, device="cpu")).numpy())
    tensors, key_of, element_bytes_of = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
    jagged = [(part.keys[0], len(part.keys), part.dtype.itemsize) for part in parts if part.argument == "lengths"]
    dtypes: list[tuple[torch.dtype, slice]] = []
    views: list[tuple[int, int, int]] = []
    fields: dict[str, tuple[FieldSpec, dict[str, int]]] = {}
    for dtype in dict.fromkeys(part.dtype for part in parts):
        first, begin = len(views), 0
        for number, part in enumerate(parts, 1):
            if part.dtype == dtype:
                # Before each part there is a view of what is between it and the one before, and one after the last.
                fields.setdefault(part.spec.name, (part.spec, {}))[1][part.argument] = len(views) + 1
                views += [(begin, 2 * number, dtype.itemsize), (2 * number, 2 * number + 1, dtype.itemsize)]
                begin = 2 * number + 1
        views.append((begin, 1, dtype.itemsize))
        dtypes.append((dtype, slice(first, len(views))))
    sections = Sections(
        tensor=tensors,
        key=key_of,
        element_bytes=element_bytes_of,
        padding_starts=np.cumsum([0, *map(len, padding)]),
        padding=np.concatenate([np.empty(0, dtype=np.uint8), *padding]),
        jagged_fields=np.array(jagged, dtype=np.int64).reshape(-1, 3),
        views=np.array(views, dtype=np.int64).reshape(-1, 3),
        loss_key=-1 if schema.loss_key is None else schema.jagged_keys.index(schema.loss_key[:2]),
        loss_skip=0 if schema.loss_key is None else schema.loss_key.skip,
    )
    known = [fields[spec.name] for spec in schema.fields if spec.dtype is not None]
    added = dict(schema.shared).get("token_padding")
    num_rows = schema.batch_size + (0 if added is None else added.rows)
    return WireFormat(sections, num_rows, dtypes, known, added)


def tensors_of(batch: JaggedBatch) -> list[Tensor]:
    """Return the T tensors of a batch, contiguous, in the order of the sections."""
    tensors: list[Tensor] = []
    for _, value in batch.tensors():
        if isinstance(value, KeyedJaggedTensor):
            weights = value.weights_or_none()
            tensors += [value.values()] if weights is None else [value.values(), weights]
        elif value is not None:
            tensors.append(value)
    return [tensor.contiguous() for tensor in tensors]


def sample_bytes(schema: BatchSchema, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of each sample over all fields: int64 [n], given lengths [K, n]."""
    sections = wire_format(schema).sections
    is_jagged = sections.key >= 0
    bytes_of_value = np.bincount(
        sections.key[is_jagged], weights=sections.element_bytes[is_jagged], minlength=len(lengths)
    )
    total: NDArray[np.int64] = bytes_of_value.astype(np.int64) @ lengths + sections.element_bytes[~is_jagged].sum()
    return total


def caches_of(wire: WireFormat, length_per_key: list[int]) -> list[dict[str, Any]]:
    """Return what each KeyedJaggedTensor of a batch knows on the host, so that using it never synchronizes."""
    caches, end = [], 0
    for spec, _ in wire.fields:
        if spec.keys is not None:
            counts = length_per_key[end : (end := end + len(spec.keys))]
            offsets = [0, *itertools.accumulate(counts)]
            caches.append({"stride": wire.num_rows, "length_per_key": counts, "offset_per_key": offsets})
    return caches


def make_fields(buffer: Tensor, wire: WireFormat, sizes: list[int], caches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields by name, given a buffer, uint8 [output_bytes], the sizes of its V views, and `caches_of`."""
    parts = [part for dtype, views in wire.dtypes for part in buffer.view(dtype).split_with_sizes(sizes[views])]
    fields: dict[str, Any] = {}
    of_next = iter(caches)
    for spec, numbers in wire.fields:
        arguments = {argument: parts[number] for argument, number in numbers.items()}
        if spec.keys is None:
            fields[spec.name] = _shaped(arguments[""], wire.num_rows, spec.shape)
            continue
        cache = next(of_next)
        arguments["values"] = _shaped(arguments["values"], cache["offset_per_key"][-1], spec.shape)
        fields[spec.name] = KeyedJaggedTensor(keys=list(spec.keys), **arguments, **cache)
    return fields


def _shaped(part: Tensor, num_rows: int, shape: tuple[int, ...]) -> Tensor:
    return part.view(num_rows, *shape) if shape else part
