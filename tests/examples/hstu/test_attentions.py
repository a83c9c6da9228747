"""Attention by name says where it works."""

import pytest
import torch

from evenrank.core.errors import ConfigError
from hstu.attention import Sequences
from hstu.config import ATTENTIONS


@pytest.mark.parametrize("name", ["triton"])
def test_triton_on_the_cpu_is_refused(name: str) -> None:
    nothing = torch.zeros(1, dtype=torch.int64)
    values = torch.zeros(0, 1, 64)
    sequences = Sequences(
        offsets=nothing, num_contextual=nothing[1:], num_candidates=nothing[1:], num_tokens=0, max_length=0
    )
    with pytest.raises(ConfigError, match=f"'{name}' needs a CUDA device, got cpu; choose 'auto' or 'padded'"):
        ATTENTIONS[name](values, values, values, sequences, scale_length=1)
