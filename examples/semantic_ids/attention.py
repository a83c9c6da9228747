"""Causal softmax attention over jagged sequences, and from the codes of beams to a history."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from semantic_ids.tokens import Sequences

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From query, key and value [tokens, heads, head_dim] to what each token receives, of the same shape."""


def causal_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Attend from each token to itself and to earlier ones of its sample.

    Args:
        query: [tokens, heads, head_dim].
        key: like `query`.
        value: like `query`.
        sequences: where the samples are; none is empty, because each has BOS.

    Returns:
        [tokens, heads, head_dim].
    """
    # PyTorch has kernels for jagged causal attention on CUDA alone, and none for float64.
    is_jagged = query.is_cuda and query.dtype != torch.float64
    return (jagged_attention if is_jagged else padded_attention)(query, key, value, sequences)


def padded_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Attend by padding all samples to the longest; see `causal_attention`.

    Padding comes last, so no token of a sample sees it, and no mask but the causal one is needed.
    """
    query, key, value = (sequences.pad(tensor).transpose(1, 2) for tensor in (query, key, value))
    return sequences.unpad(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2))


def jagged_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Attend with work only for the tokens that exist; see `causal_attention`."""
    # With both lengths given, nothing has to wait for the device to know them.
    query, key, value = (
        torch.nested.nested_tensor_from_jagged(
            tensor.contiguous(), sequences.offsets, min_seqlen=1, max_seqlen=sequences.max_length
        ).transpose(1, 2)
        for tensor in (query, key, value)
    )
    return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).values()


def beam_attention(
    query: Tensor, key: Tensor, value: Tensor, *, history: tuple[Tensor, Tensor], lengths: Tensor, beams: int
) -> Tensor:
    """Attend from each code of a beam to the whole history, and to the codes of the beam up to itself.

    Args:
        query: [B * beams * codes, heads, head_dim].
        key: like `query`.
        value: like `query`.
        history: its keys and values, [B, heads, max_length, head_dim] both.
        lengths: int64 [B]: tokens of each history, BOS included.
        beams: of each sample.

    Returns:
        [B * beams * codes, heads, head_dim].
    """
    own_query, own_key, own_value = (
        tensor.view(len(lengths), -1, *query.shape[1:]).transpose(1, 2) for tensor in (query, key, value)
    )
    token = torch.arange(own_query.shape[2], device=query.device)
    beam = token // max(len(token) // beams, 1)
    sees_own = (beam[:, None] == beam[None, :]) & (token[:, None] >= token[None, :])
    sees_history = torch.arange(history[0].shape[2], device=query.device) < lengths[:, None]
    mask = torch.cat(
        [
            sees_history[:, None, :].expand(-1, len(token), -1),
            sees_own.expand(len(lengths), -1, -1),
        ],
        dim=-1,
    )
    attended = scaled_dot_product_attention(
        own_query,
        torch.cat([history[0], own_key], dim=2),
        torch.cat([history[1], own_value], dim=2),
        attn_mask=mask[:, None],
    )
    return attended.transpose(1, 2).reshape(query.shape)
