from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.cost import HSTUCost, SelfAttentionCost, cost_shift, count_tokens, scaled_costs
from tests.dataloader.balance.costs import Ints


class _HSTULayer(torch.nn.Module):
    """The matrix products of one layer, as in the paper, with the full attention matrix."""

    def __init__(self, hidden: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.shape = (heads, head_dim)
        self.uvqk = torch.nn.Linear(hidden, 4 * heads * head_dim)
        self.out = torch.nn.Linear(heads * head_dim, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, v, q, k = (part.view(-1, *self.shape).transpose(0, 1) for part in self.uvqk(x).chunk(4, dim=-1))
        attended = torch.nn.functional.silu(q @ k.transpose(1, 2)) @ v
        output: torch.Tensor = x + self.out((attended * u).transpose(0, 1).reshape(len(x), -1))
        return output


@pytest.mark.parametrize(("hidden", "heads", "head_dim", "tokens"), [(8, 2, 3, 5), (16, 4, 4, 33), (12, 1, 32, 1)])
def test_hstu_flops_equal_pytorchs_count_of_forward_and_backward(
    hidden: int, heads: int, head_dim: int, tokens: int
) -> None:
    layers = torch.nn.Sequential(*(_HSTULayer(hidden, heads, head_dim) for _ in range(3)))
    x = torch.randn(tokens, hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layers(x).sum().backward()
    cost = HSTUCost(hidden=hidden, heads=heads, head_dim=head_dim, layers=3, causal=False)
    assert cost.of_tokens(np.array([tokens])).tolist() == [counter.get_total_flops()]


class _TransformerLayer(torch.nn.Module):
    """The matrix products of one layer, with the full attention matrix."""

    def __init__(self, hidden: int, heads: int, head_dim: int, inner: int) -> None:
        super().__init__()
        self.shape = (heads, head_dim)
        self.qkv = torch.nn.Linear(hidden, 3 * heads * head_dim)
        self.out = torch.nn.Linear(heads * head_dim, hidden)
        self.ffn = torch.nn.Sequential(torch.nn.Linear(hidden, inner), torch.nn.ReLU(), torch.nn.Linear(inner, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(-1, *self.shape).transpose(0, 1) for part in self.qkv(x).chunk(3, dim=-1))
        attended = torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v
        x = x + self.out(attended.transpose(0, 1).reshape(len(x), -1))
        output: torch.Tensor = x + self.ffn(x)
        return output


@pytest.mark.parametrize(
    ("hidden", "heads", "head_dim", "multiplier", "tokens"),
    [(8, 2, 3, 4, 5), (16, 4, 4, 8 / 3, 33), (12, 1, 32, 1, 1)],
)
def test_self_attention_flops_equal_pytorchs_count(
    hidden: int, heads: int, head_dim: int, multiplier: float, tokens: int
) -> None:
    inner = int(multiplier * hidden)
    layers = torch.nn.Sequential(*(_TransformerLayer(hidden, heads, head_dim, inner) for _ in range(2)))
    x = torch.randn(tokens, hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layers(x).sum().backward()
    cost = SelfAttentionCost(
        hidden=hidden, heads=heads, head_dim=head_dim, layers=2, ffn_multiplier=multiplier, causal=False
    )
    assert cost.of_tokens(np.array([tokens])).tolist() == [counter.get_total_flops()]


_KINDS = pytest.mark.parametrize("make", [HSTUCost, partial(SelfAttentionCost, ffn_multiplier=4)])


@_KINDS
def test_heads_are_counted_once(make: Callable[..., HSTUCost | SelfAttentionCost]) -> None:
    tokens = np.array([17])
    few, many = (
        make(hidden=16, heads=heads, head_dim=16 // heads, layers=2).of_tokens(tokens).item() for heads in (2, 4)
    )
    assert few == many


@_KINDS
def test_every_model_cost_counts_tokens_and_knows_the_longest_samples_cost(
    make: Callable[..., HSTUCost | SelfAttentionCost],
) -> None:
    cost = make(
        hidden=1024,
        heads=2,
        head_dim=256,
        layers=8,
        history_key="semantic_id",
        interleave_actions=True,
        contextual=("sex",),
    )
    lengths = {"semantic_id": np.array([131_000, 3]), "action": np.array([71, 3]), "sex": np.array([1, 0])}
    assert cost.tokens(lengths).tolist() == [131_072, 6]
    costs = cost(lengths, np.zeros(2, dtype=np.int64))
    assert costs.dtype == np.int64
    assert costs.tolist() == [cost.max_cost, *cost.of_tokens(np.array([6])).tolist()]
    assert cost.max_cost > 2**47


@_KINDS
def test_a_cost_that_would_wrap_around_is_refused(make: Callable[..., HSTUCost | SelfAttentionCost]) -> None:
    cost = make(hidden=1024, heads=4, head_dim=256, layers=8)
    with pytest.raises(ConfigError, match=r"sample of 30,000,000 tokens does not fit in int64; max_tokens is 131,072"):
        cost({"item_id": np.array([5, 30_000_000])}, np.zeros(2, dtype=np.int64))


def test_self_attention_is_the_sum_of_its_products() -> None:
    # heads * head_dim = 6 differs from hidden = 8, and 8/3 of 8 is 21.3.
    shape: Any = {"hidden": 8, "heads": 2, "head_dim": 3, "layers": 2, "ffn_multiplier": 8 / 3}
    tokens = np.array([0, 1, 10])
    linear = 8 * 8 * 6 + 4 * 8 * 21
    full, causal = (SelfAttentionCost(**shape, causal=causal).of_tokens(tokens).tolist() for causal in (False, True))
    assert full == [3 * 2 * (linear * s + 4 * 6 * s * s) for s in (0, 1, 10)]
    assert causal == [3 * 2 * (linear * s + 2 * 6 * s * s) for s in (0, 1, 10)]


def test_impossible_model_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers must be at least 1, got 0"):
        HSTUCost(hidden=8, heads=1, head_dim=8, layers=0)
    with pytest.raises(ConfigError, match="max_tokens must be at least 1, got -1"):
        SelfAttentionCost(hidden=8, heads=1, head_dim=8, layers=1, ffn_multiplier=4, max_tokens=-1)
    for wrong in (-4, 0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"ffn_multiplier must be positive and finite, got {wrong}"):
            SelfAttentionCost(hidden=8, heads=1, head_dim=8, layers=1, ffn_multiplier=wrong)


def test_tokens_are_counted_by_the_cost_or_else_all_values_count() -> None:
    lengths = {"item_id": np.array([5, 0]), "action": np.array([4, 1])}
    cost = HSTUCost(hidden=1, heads=1, head_dim=1, layers=1)
    assert count_tokens(cost, lengths, 2).tolist() == [5, 0]
    assert count_tokens(lambda lengths, candidates: candidates, lengths, 2).tolist() == [9, 1]
    assert count_tokens(lambda lengths, candidates: candidates, {}, 3).tolist() == [0, 0, 0]


def test_causal_attention_costs_half() -> None:
    shape: Any = {"hidden": 8, "heads": 2, "head_dim": 4, "layers": 1}
    tokens = np.array([10])
    full, causal = (HSTUCost(**shape, causal=causal).of_tokens(tokens).item() for causal in (False, True))
    assert full == 3 * (10 * 10 * 8 * 8 + 4 * 10 * 10 * 8)
    assert causal == 3 * (10 * 10 * 8 * 8 + 2 * 10 * 10 * 8)


def test_tokens_are_items_and_optionally_actions_and_contextual_keys() -> None:
    lengths = {"item_id": np.array([5, 0]), "action": np.array([4, 0]), "sex": np.array([1, 1])}
    shape: Any = {"hidden": 1, "heads": 1, "head_dim": 1, "layers": 1}
    assert HSTUCost(**shape).tokens(lengths).tolist() == [5, 0]
    assert HSTUCost(**shape, interleave_actions=True).tokens(lengths).tolist() == [9, 0]
    assert HSTUCost(**shape, interleave_actions=True, contextual=("sex",)).tokens(lengths).tolist() == [10, 1]
    with pytest.raises(ConfigError, match="needs the key 'age'; batches have item_id, action, sex"):
        HSTUCost(**shape, contextual=("age",)).tokens(lengths)


def test_the_history_can_be_another_key() -> None:
    cost = HSTUCost(hidden=4, heads=1, head_dim=4, layers=1, history_key="semantic_id")
    assert cost.tokens({"semantic_id": np.array([9, 0])}).tolist() == [9, 0]


def test_a_step_of_the_longest_samples_sums_within_62_bits() -> None:
    cost = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, max_tokens=100_000)
    samples = 16_384 * 128
    longest = {"item_id": np.array([100_000])}
    scaled = scaled_costs(cost, longest, np.zeros(1, dtype=np.int64), num_real=1, world_size=samples)
    assert 2**60 < int(scaled[0]) * samples <= 2**62
    assert cost_shift(cost, 8) == 0


def test_the_scale_is_a_power_of_two_that_depends_on_the_configuration_alone() -> None:
    cost = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8)
    samples = 3 * 2**18
    shift = cost_shift(cost, samples)
    lengths = {"item_id": np.array([1, 77, 4096])}
    scaled = scaled_costs(cost, lengths, np.zeros(3, dtype=np.int64), num_real=3, world_size=samples // 3)
    assert shift > 0
    assert scaled.tolist() == [c >> shift for c in cost(lengths, np.zeros(3, dtype=np.int64)).tolist()]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.array([0.5, 1.0]), r"must return int64 of shape \(2,\), got float64"),
        (np.array([1]), r"got int64 of shape \(1,\)"),
        (np.array([1, -5]), "must not be negative, got -5"),
        (np.array([1, 2**60]), "cost of 1152921504606846976 is too large to be summed over 8 samples"),
    ],
)
def test_what_a_cost_returns_is_checked(returned: Ints, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scaled_costs(lambda lengths, candidates: returned, {}, np.zeros(2, dtype=np.int64), num_real=2, world_size=4)


def test_padding_costs_0_whatever_the_cost_returns() -> None:
    returned = np.array([5, 6, -7])
    no_candidates = np.zeros(3, dtype=np.int64)
    scaled = scaled_costs(lambda lengths, candidates: returned, {}, no_candidates, num_real=1, world_size=4)
    assert scaled.tolist() == [5, 0, 0]
