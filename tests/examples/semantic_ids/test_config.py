"""The settings of a decoder."""

from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import ConfigError
from semantic_ids.config import DecoderConfig


def test_the_cost_counts_contextual_tokens_the_history_and_the_candidate() -> None:
    cost = DecoderConfig(codebook_sizes=(4, 5), contextual={"user_id": 9}, hidden=8, heads=2, layers=3).cost()
    lengths = {"user_id": np.array([1]), "semantic_id": np.array([6]), "candidate_id": np.array([2])}
    no_candidates = np.zeros(1, dtype=np.int64)
    assert cost(lengths, no_candidates) == cost.of_tokens(np.array([9]), no_candidates)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebook_sizes": (4, 0)}, r"codebook_sizes must be numbers of at least 1, got \[4, 0\]"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"hidden": 20, "heads": 4}, r"hidden must be a multiple of 2 \* heads, got hidden=20 and heads=4"),
        ({"contextual": ("user_id",)}, r"the size of each feature's vocabulary, got \('user_id',\); pass a mapping"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecoderConfig(**{"codebook_sizes": (4, 4), **changes})
