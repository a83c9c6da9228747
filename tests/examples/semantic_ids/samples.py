"""Batches of semantic ids from samples as lists of codes."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from evenrank.dataloader import SemanticIdBatch
from evenrank.dataloader.batches.batch import keyed_jagged_tensor

Codes = tuple[int, ...]
Sample = tuple[Codes, ...]
"""The codes of each event; the last event is the target."""


def batch_of(
    samples: Sequence[Sample],
    codebook_sizes: Sequence[int],
    *,
    batch_size: int | None = None,
    history_labels: bool = False,
    users: Sequence[int] = (),
) -> SemanticIdBatch:
    """Return what a loader makes of these samples, with `candidate_feature` and, if there are users, `user_id`."""
    batch_size = len(samples) if batch_size is None else batch_size
    offsets = list(accumulate(codebook_sizes, initial=0))
    features: dict[str, list[list[int]]] = {"user_id": [[user] for user in users]} if users else {}
    features["semantic_id"] = [_tokens(events[:-1], offsets) for events in samples]
    features["candidate_id"] = [_tokens(events[-1:], offsets) for events in samples]
    first_labels = [min(1, len(events) - 1) if history_labels else len(events) - 1 for events in samples]
    labels = {
        "label": [
            [code for codes in events[first:] for code in codes]
            for events, first in zip(samples, first_labels, strict=True)
        ]
    }
    tensors = {}
    max_lengths: dict[str, int] = {}
    for name, rows_by_key in (("features", features), ("labels", labels)):
        lengths = np.array(
            [[len(row) for row in rows] + [0] * (batch_size - len(rows)) for rows in rows_by_key.values()]
        )
        values = torch.tensor([value for rows in rows_by_key.values() for row in rows for value in row]).long()
        tensors[name] = keyed_jagged_tensor(list(rows_by_key), values, lengths)
        max_lengths |= {key: int(n.max(initial=0)) for key, n in zip(rows_by_key, lengths, strict=True)}
    return SemanticIdBatch(
        batch_size=batch_size,
        num_real=len(samples),
        loss_tokens=len(tensors["labels"].values()),
        max_lengths=max_lengths,
        sample_ids=torch.arange(batch_size),
        **tensors,
    )


def _tokens(events: Sequence[Codes], offsets: Sequence[int]) -> list[int]:
    return [code + offset for codes in events for code, offset in zip(codes, offsets, strict=False)]


def random_samples(num_samples: int, codebook_sizes: Sequence[int], *, max_history: int, seed: int = 0) -> list[Sample]:
    """Return samples with histories of 0 to `max_history` events."""
    rng = np.random.default_rng(seed)
    return [
        tuple(
            tuple(int(rng.integers(size)) for size in codebook_sizes) for _ in range(rng.integers(max_history + 1) + 1)
        )
        for _ in range(num_samples)
    ]
