"""A batch with every kind of field, for tests: two KeyedJaggedTensors, weights, dense fields, one that is None."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.batch import JaggedBatch, dense, keyed_jagged_tensor


@dataclass(kw_only=True, eq=False, repr=False)
class RichBatch(JaggedBatch):
    first: KeyedJaggedTensor  # keys a, b: int64, int32 lengths
    weighted: KeyedJaggedTensor  # keys a (as in `first`), c: float32 with float64 weights
    nothing: Tensor | None = None
    ids: Tensor = dense(fill=-1)  # int64 [B]
    matrix: Tensor = dense(fill=0.5)  # bfloat16 [B, 2]
    flags: Tensor = dense()  # bool [B, 3]

    def loss_key(self) -> tuple[str, str]:
        return ("weighted", "c")


def rich_batch(lengths: Sequence[Sequence[tuple[int, int]]], first_id: int = 0) -> RichBatch:
    """Make a batch, all real.

    Args:
        lengths: per sample, those of keys a and b of `first`, then those of a and c of `weighted`.
        first_id: sample i gets the id first_id + i; all its values follow from it.

    """
    rows = len(lengths)
    counts = np.array(lengths, dtype=np.int32).reshape(rows, 4).T
    ids = torch.arange(first_id, first_id + rows)

    def values(kind: int) -> Tensor:
        runs = [torch.arange(n) + 100 * kind + 1000 * (first_id + i) for i, n in enumerate(counts[kind])]
        return torch.cat([torch.empty(0, dtype=torch.int64), *runs])

    weighted = torch.cat([values(2), values(3)])
    return RichBatch(
        batch_size=rows,
        num_real=rows,
        loss_tokens=int(counts[3].sum()),
        first=keyed_jagged_tensor(["a", "b"], torch.cat([values(0), values(1)]), counts[:2]),
        weighted=keyed_jagged_tensor(
            ["a", "c"], weighted.float(), counts[2:].astype(np.int64), weighted.double() + 0.25
        ),
        ids=ids,
        matrix=torch.stack([ids, -ids], dim=1).to(torch.bfloat16),
        flags=torch.stack([ids % 2 == 0, ids % 3 == 0, ids % 5 == 0], dim=1),
    )


def samples_of(batch: RichBatch) -> list[dict[str, Any]]:
    """Take the real samples of a batch apart; two are equal if nothing of them differs."""
    samples: list[dict[str, Any]] = [
        {
            "id": batch.ids[row].item(),
            "matrix": batch.matrix[row].tolist(),
            "flags": batch.flags[row].tolist(),
        }
        for row in range(batch.num_real)
    ]
    for name in ("first", "weighted"):
        for key, jagged in getattr(batch, name).to_dict().items():
            sizes = jagged.lengths().tolist()
            for what in ("values", "weights"):
                parts = jagged.values() if what == "values" else jagged.weights_or_none()
                if parts is not None:
                    for sample, part in zip(samples, torch.split(parts, sizes), strict=False):
                        sample[f"{name} {key} {what}"] = part.tolist()
    return samples
