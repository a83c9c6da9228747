"""A batch with every kind of field: two KeyedJaggedTensors, one with weights, dense fields, and one that is None."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.batches.batch import JaggedBatch, LossKey, dense
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor


@dataclass(kw_only=True, eq=False, repr=False)
class RichBatch(JaggedBatch):
    first: KeyedJaggedTensor  # keys a, b: int64, int32 lengths
    weighted: KeyedJaggedTensor  # keys a (as in `first`), c: float32 with float64 weights
    nothing: Tensor | None = None
    ids: Tensor = dense(fill=-1)  # int64 [B]
    matrix: Tensor = dense(fill=0.5)  # bfloat16 [B, 2]
    flags: Tensor = dense()  # bool [B, 3]

    def loss_key(self) -> LossKey:
        return LossKey("weighted", "c")


def rich_batch(lengths: Sequence[Sequence[tuple[int, int]]], first_id: int = 0) -> RichBatch:
    """Make a batch without padding.

    Args:
        lengths: per sample, those of keys a and b of `first`, then those of a and c of `weighted`.
        first_id: sample i gets the id first_id + i, which determines all its values.
    """
    num_rows = len(lengths)
    counts = np.array(lengths, dtype=np.int32).reshape(num_rows, 4).T
    ids = torch.arange(first_id, first_id + num_rows)

    def values(kind: int) -> Tensor:
        rows = [torch.arange(n) + 100 * kind + 1000 * (first_id + i) for i, n in enumerate(counts[kind])]
        return torch.cat([torch.empty(0, dtype=torch.int64), *rows])

    weighted = torch.cat([values(2), values(3)])
    return RichBatch(
        batch_size=num_rows,
        num_real=num_rows,
        loss_tokens=int(counts[3].sum()),
        first=keyed_jagged_tensor(["a", "b"], torch.cat([values(0), values(1)]), counts[:2]),
        weighted=keyed_jagged_tensor(
            ["a", "c"], weighted.float(), counts[2:].astype(np.int64), weights=weighted.double() + 0.25
        ),
        ids=ids,
        matrix=torch.stack([ids, -ids], dim=1).to(torch.bfloat16),
        flags=torch.stack([ids % 2 == 0, ids % 3 == 0, ids % 5 == 0], dim=1),
    )


def samples_of(batch: RichBatch) -> list[dict[str, Any]]:
    """Return every value of each sample of a batch, so that equal samples compare equal."""
    if batch.batch_size == 0:
        return []  # TorchRec cannot split what has no rows
    samples: list[dict[str, Any]] = [
        {"id": batch.ids[row].item(), "matrix": batch.matrix[row].tolist(), "flags": batch.flags[row].tolist()}
        for row in range(batch.num_real)
    ]
    for name in ("first", "weighted"):
        for key, jagged in getattr(batch, name).to_dict().items():
            lengths = jagged.lengths().tolist()
            for kind, numbers in (("values", jagged.values()), ("weights", jagged.weights_or_none())):
                if numbers is not None:
                    for sample, row in zip(samples, torch.split(numbers, lengths), strict=False):
                        sample[f"{name} {key} {kind}"] = row.tolist()
    return samples
