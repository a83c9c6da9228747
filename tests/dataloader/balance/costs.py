"""Types, a cost, and a count of attended pairs that several tests use."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Lengths = Mapping[str, Ints]


def one_per_sample(lengths: Lengths, num_candidates: Ints) -> Ints:
    """Cost 1, whatever the lengths."""
    return np.ones(len(num_candidates), dtype=np.int64)


def write_tokens(
    events: int, num_candidates: int, contextual: int, *, interleave: bool, candidate_actions: bool
) -> str:
    """Write a sample as its tokens in order, h for the history and c for candidates."""
    tokens = "h" * contextual
    for event in range(events):
        is_candidate = event >= events - num_candidates
        has_action = interleave and (candidate_actions or not is_candidate)
        tokens += ("c" if is_candidate else "h") * (1 + has_action)
    return tokens


def count_pairs(tokens: str, *, causal: bool) -> float:
    """Count the attended pairs one by one; the diagonal of causal attention counts half."""
    pairs = 0.0
    for query, role in enumerate(tokens):
        for key, key_role in enumerate(tokens):
            if query == key:
                pairs += 0.5 if causal else 1
            elif key_role == "h":
                pairs += role == "c" or key < query or not causal
    return pairs
