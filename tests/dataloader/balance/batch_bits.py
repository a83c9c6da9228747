"""Batches as values, for comparisons bit for bit."""

import dataclasses
from typing import Any

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.balance.exchange.device import as_bytes
from evenrank.dataloader.batches.batch import JaggedBatch


def bits_of(batch: JaggedBatch) -> list[Any]:
    """Return every field of a batch, and every bit of its tensors, but not the hash of a plan that is not confirmed."""
    bits: list[Any] = []
    for field in dataclasses.fields(batch):
        value = None if field.name == "plan_hash" else getattr(batch, field.name)
        parts = [value]
        if isinstance(value, KeyedJaggedTensor):
            bits += [value.keys(), value.stride(), value.length_per_key(), value.offset_per_key()]
            parts = [value.values(), value.lengths(), value.offsets(), value.weights_or_none()]
        for part in parts:
            if isinstance(part, Tensor):
                part = (part.dtype, part.shape, as_bytes(part.cpu().contiguous()).numpy().tobytes())
            bits.append((field.name, part))
    return bits
