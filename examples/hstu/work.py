"""`attention_flops`: what the attention of a layer computes, for an `AttentionTracker`."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from evenrank.training import Flops, ModelFlops, hstu_work


def attention_flops(layer: nn.Module, arguments: Mapping[str, Any]) -> Flops:
    """Return the FLOPs of a call of an HSTUAttention, as kernels are quoted: the backward has 2.5 times the forward's.

    Args:
        layer: the HSTUAttention.
        arguments: of its `forward`, by name.

    """
    sequences = arguments["sequences"]
    history = sequences.lengths - sequences.num_candidates
    work = hstu_work(history, sequences.num_contextual, sequences.num_candidates, predictions=0)
    heads, head_dim = arguments["query"].shape[1:]
    return ModelFlops(per_token=0, per_pair=4 * heads * head_dim).of(work).with_recomputed_scores()
