"""Batches of semantic ids from samples as lists of codes."""

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import torch

from evenrank.dataloader import SemanticIdBatch
from tests.examples.hstu.samples import jagged

Codes = tuple[int, ...]
Sample = tuple[Codes, ...]  # of each event; the last event is the target


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
    labels = [list(chain(*events[first:])) for events, first in zip(samples, first_labels, strict=True)]
    padding: list[list[int]] = [[]] * (batch_size - len(samples))
    of_features, limits = jagged({key: rows + padding for key, rows in features.items()})
    of_labels, label_limits = jagged({"label": labels + padding})
    return SemanticIdBatch(
        batch_size=batch_size,
        num_real=len(samples),
        loss_tokens=len(of_labels.values()),
        max_lengths=limits | label_limits,
        sample_ids=torch.arange(batch_size),
        features=of_features,
        labels=of_labels,
    )


def _tokens(events: Sequence[Codes], offsets: Sequence[int]) -> list[int]:
    return [code + offset for codes in events for code, offset in zip(codes, offsets, strict=False)]


def random_samples(num_samples: int, codebook_sizes: Sequence[int], *, max_history: int, seed: int = 0) -> list[Sample]:
    """Return samples with histories of 0 to `max_history` events."""
    rng = np.random.default_rng(seed)
    lengths = (rng.integers(max_history + 1) + 1 for _ in range(num_samples))
    return [tuple(tuple(rng.integers(codebook_sizes).tolist()) for _ in range(length)) for length in lengths]
