"""A layer against its equations, written out for one token and one head at a time."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from hstu.attention import Sequences
from hstu.layer import NORM_EPS, HSTULayer
from tests.examples.hstu.samples import CONFIG


def _norm(row: Tensor) -> Tensor:
    return (row - row.mean()) / (row.var(correction=0) + NORM_EPS).sqrt()


def _silu(values: Tensor) -> Tensor:
    return values / (1 + torch.exp(-values))


def _sees(query: int, key: int, contextual: int, history: int) -> bool:
    if key >= history:
        return query == key
    return query < contextual or key <= query


def _one_by_one(layer: HSTULayer, tokens: Tensor, contextual: int, candidates: int) -> Tensor:
    """Return the output for one sample [tokens, hidden]; the norms have their initial weights."""
    heads, head_dim = CONFIG.heads, CONFIG.head_dim
    weight = layer.uvqk.weight.view(heads, 4, head_dim, CONFIG.hidden)
    bias = layer.uvqk.bias.view(heads, 4, head_dim)
    u, v, q, k = (
        [[_silu(weight[head, part] @ _norm(row) + bias[head, part]) for head in range(heads)] for row in tokens]
        for part in range(4)
    )
    rows = []
    for i in range(len(tokens)):
        attended = torch.zeros(heads, head_dim, dtype=tokens.dtype)
        for head in range(heads):
            for j in range(len(tokens)):
                if _sees(i, j, contextual, len(tokens) - candidates):
                    score = q[i][head] @ k[j][head] / math.sqrt(head_dim)
                    attended[head] += _silu(score) / CONFIG.max_length * v[j][head]
        gated = _norm(attended.flatten()) * torch.cat(u[i])
        rows.append(tokens[i] + layer.output.weight @ gated + layer.output.bias)
    return torch.stack(rows)


def test_a_layer_is_its_equations() -> None:
    torch.manual_seed(0)
    layer = HSTULayer(CONFIG).double()
    tokens = torch.randn(9, CONFIG.hidden, dtype=torch.float64)
    sequences = Sequences(
        offsets=torch.tensor([0, 6, 6, 9]),
        num_contextual=torch.tensor([2, 0, 0]),
        num_candidates=torch.tensor([2, 0, 1]),
        num_tokens=9,
        max_length=8,
    )
    expected = torch.cat([_one_by_one(layer, tokens[:6], 2, 2), _one_by_one(layer, tokens[6:], 0, 1)])
    update = torch.randn_like(tokens)
    torch.testing.assert_close(sum(layer(tokens - update, update, sequences)), expected, rtol=1e-12, atol=1e-12)


def test_dropout_is_before_the_output() -> None:
    layer = HSTULayer(replace(CONFIG, dropout=0.999999)).double()
    tokens = torch.randn(3, CONFIG.hidden, dtype=torch.float64)
    sequences = Sequences(
        offsets=torch.tensor([0, 3]),
        num_contextual=torch.zeros(1, dtype=torch.int64),
        num_candidates=torch.zeros(1, dtype=torch.int64),
        num_tokens=3,
        max_length=3,
    )
    stream, update = layer(tokens, torch.zeros_like(tokens), sequences)
    assert torch.equal(stream, tokens)
    torch.testing.assert_close(update, layer.output.bias.expand_as(update))  # nothing but the bias is left
    assert not torch.allclose(layer.eval()(tokens, torch.zeros_like(tokens), sequences)[1], layer.output.bias)
