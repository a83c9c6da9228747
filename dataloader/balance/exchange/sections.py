"""The sections of a batch: runs of equally typed elements that move between ranks as bytes, with a row for each sample.

The values of a jagged key are a section, their weights another one, and so are the rows of a dense field. Sections of
one tensor are adjacent, in the order of its keys.
"""

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.balance.exchange.layout import Sections
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.schema import BatchSchema


@functools.lru_cache
def sections_of(schema: BatchSchema) -> Sections:
    """Return the sections of a schema, in the order of its fields."""
    rows: list[tuple[int, int, int]] = []
    padding, jagged_fields, first_key, tensor = [], [], 0, 0
    parts = dtypes_of_parts(schema)
    dtypes = list(dict.fromkeys(parts))
    for spec in schema.fields:
        if spec.dtype is None:
            continue
        element_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        if spec.keys is None:
            rows.append((tensor, -1, element_bytes))
            padding.append(as_bytes(torch.full(spec.shape, spec.fill, dtype=spec.dtype, device="cpu")).numpy())
            tensor += 1
            continue
        assert spec.lengths_dtype is not None
        keys = range(first_key, first_key + len(spec.keys))
        jagged_fields.append((first_key, len(keys), spec.lengths_dtype.itemsize))
        first_key += len(keys)
        for dtype, num_bytes in ((spec.dtype, element_bytes), (spec.weights_dtype, 0)):
            if dtype is not None:
                rows += [(tensor, key, num_bytes or dtype.itemsize) for key in keys]
                padding += [np.empty(0, dtype=np.uint8)] * len(keys)
                tensor += 1
    tensors, key_of, element_bytes_of = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
    return Sections(
        tensor=tensors,
        key=key_of,
        element_bytes=element_bytes_of,
        padding_starts=np.cumsum([0, *map(len, padding)]),
        padding=np.concatenate([np.empty(0, dtype=np.uint8), *padding]),
        jagged_fields=np.array(jagged_fields, dtype=np.int64).reshape(-1, 3),
        dtypes=np.array([dtypes.index(dtype) for dtype in parts], dtype=np.int64),
        dtype_bytes=np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64),
        loss_key=-1 if schema.loss_key is None else schema.jagged_keys.index(schema.loss_key[:2]),
        loss_skip=0 if schema.loss_key is None else schema.loss_key.skip,
    )


def dtypes_of_parts(schema: BatchSchema) -> list[torch.dtype]:
    """Return the dtypes of the parts of an output buffer: T tensors, then lengths and offsets of each jagged field."""
    known = [spec for spec in schema.fields if spec.dtype is not None]
    of_tensors = [dtype for spec in known for dtype in (spec.dtype, spec.weights_dtype) if dtype is not None]
    return of_tensors + [spec.lengths_dtype for spec in known for _ in range(2) if spec.lengths_dtype is not None]


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
    sections = sections_of(schema)
    is_jagged = sections.key >= 0
    bytes_of_value = np.bincount(
        sections.key[is_jagged], weights=sections.element_bytes[is_jagged], minlength=len(lengths)
    )
    total: NDArray[np.int64] = bytes_of_value.astype(np.int64) @ lengths + sections.element_bytes[~is_jagged].sum()
    return total


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor of any dtype and shape as uint8 [bytes]."""
    if tensor.numel() == 0:  # empty tensors can have strides that `view` rejects
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)
