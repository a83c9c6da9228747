import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, RandomBatches, RandomData
from evenrank.dataloader.balance.cost import HSTUCost, SelfAttentionCost, describe_cost
from evenrank.dataloader.batches.schema import lengths_of, schema_of
from evenrank.datasets.distributions import Uniform
from tests.dataloader.balance.costs import count_pairs, write_tokens

NO_CANDIDATES = np.zeros(1, dtype=np.int64)


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
    cost = HSTUCost(hidden=hidden, heads=heads, head_dim=head_dim, layers=3, interleave_actions=False, causal=False)
    assert cost.of_tokens(np.array([tokens]), NO_CANDIDATES).tolist() == [counter.get_total_flops()]


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
    assert cost.of_tokens(np.array([tokens]), NO_CANDIDATES).tolist() == [counter.get_total_flops()]


_KINDS = pytest.mark.parametrize(
    "make", [partial(HSTUCost, interleave_actions=False), partial(SelfAttentionCost, ffn_multiplier=4)]
)


@_KINDS
def test_heads_are_counted_once(make: Callable[..., HSTUCost | SelfAttentionCost]) -> None:
    tokens = np.array([17])
    few, many = (
        make(hidden=16, heads=heads, head_dim=16 // heads, layers=2).of_tokens(tokens, NO_CANDIDATES).item()
        for heads in (2, 4)
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
    assert costs.tolist() == [cost.max_cost, *cost.of_tokens(np.array([6]), NO_CANDIDATES).tolist()]
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
    full, causal = (
        SelfAttentionCost(**shape, causal=causal).of_tokens(tokens, 0 * tokens).tolist() for causal in (False, True)
    )
    assert full == [3 * 2 * (linear * s + 4 * 6 * s * s) for s in (0, 1, 10)]
    assert causal == [3 * 2 * (linear * s + 2 * 6 * s * s) for s in (0, 1, 10)]


def test_impossible_model_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers must be at least 1, got 0"):
        HSTUCost(hidden=8, heads=1, head_dim=8, layers=0, interleave_actions=False)
    with pytest.raises(ConfigError, match="max_tokens must be at least 1, got -1"):
        SelfAttentionCost(hidden=8, heads=1, head_dim=8, layers=1, ffn_multiplier=4, max_tokens=-1)
    for wrong in (-4, 0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"ffn_multiplier must be positive and finite, got {wrong}"):
            SelfAttentionCost(hidden=8, heads=1, head_dim=8, layers=1, ffn_multiplier=wrong)


def test_causal_attention_costs_half() -> None:
    shape: Any = {"hidden": 8, "heads": 2, "head_dim": 4, "layers": 1, "interleave_actions": False}
    tokens = np.array([10])
    full, causal = (
        HSTUCost(**shape, causal=causal).of_tokens(tokens, NO_CANDIDATES).item() for causal in (False, True)
    )
    assert full == 3 * (10 * 10 * 8 * 8 + 4 * 10 * 10 * 8)
    assert causal == 3 * (10 * 10 * 8 * 8 + 2 * 10 * 10 * 8)


def test_tokens_are_items_and_optionally_actions_and_contextual_keys() -> None:
    lengths = {"item_id": np.array([5, 0]), "action": np.array([4, 0]), "sex": np.array([1, 1])}
    shape: Any = {"hidden": 1, "heads": 1, "head_dim": 1, "layers": 1}
    assert HSTUCost(**shape, interleave_actions=False).tokens(lengths).tolist() == [5, 0]
    assert HSTUCost(**shape, interleave_actions=True).tokens(lengths).tolist() == [9, 0]
    assert HSTUCost(**shape, interleave_actions=True, contextual=("sex",)).tokens(lengths).tolist() == [10, 1]
    with pytest.raises(ConfigError, match="needs the key 'age'; batches have item_id, action, sex"):
        HSTUCost(**shape, interleave_actions=True, contextual=("age",)).tokens(lengths)


def test_the_history_can_be_another_key() -> None:
    cost = HSTUCost(hidden=4, heads=1, head_dim=4, layers=1, interleave_actions=False, history_key="semantic_id")
    assert cost.tokens({"semantic_id": np.array([9, 0])}).tolist() == [9, 0]


@settings(max_examples=300)
@given(data=st.data(), interleave=st.booleans(), candidate_actions=st.booleans(), causal=st.booleans())
def test_candidates_attend_to_the_history_and_not_to_one_another(
    data: st.DataObject, interleave: bool, candidate_actions: bool, causal: bool
) -> None:
    events, contextual = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
    num_candidates = data.draw(st.integers(0, events))
    tokens = write_tokens(
        events, num_candidates, contextual, interleave=interleave, candidate_actions=candidate_actions
    )
    keys = tuple(f"feature_{index}" for index in range(contextual))
    lengths = dict.fromkeys(keys, np.array([1])) | {
        "item_id": np.array([events]),
        "action": np.array([events - num_candidates * (not candidate_actions)]),
    }
    cost = HSTUCost(
        hidden=3, heads=2, head_dim=5, layers=1, interleave_actions=interleave, contextual=keys, causal=causal
    )
    assert cost.tokens(lengths).tolist() == [len(tokens)]
    pairs = count_pairs(tokens, causal=causal)
    assert cost(lengths, np.array([num_candidates])).tolist() == [3 * (10 * len(tokens) * 3 * 10 + 4 * pairs * 10)]


@pytest.mark.parametrize("candidate_actions", [False, True])
@pytest.mark.parametrize("interleave", [False, True])
def test_the_tokens_of_collated_batches_are_counted_as_they_are_laid_out(
    interleave: bool, candidate_actions: bool
) -> None:
    config = LoaderConfig(batch_size=8, max_history_length=6, max_num_candidates=2, candidate_actions=candidate_actions)
    data = RandomData(lengths=Uniform(low=0, high=12), contextual={"age": Uniform(low=1, high=9)})
    (batch,) = RandomBatches(config, data, num_batches=1)
    lengths = schema_of(batch).lengths_by_key(lengths_of(batch))
    events = lengths["item_id"].tolist()
    assert len(set(events)) > 2
    cost = SelfAttentionCost(
        hidden=2, heads=1, head_dim=3, layers=1, ffn_multiplier=1, interleave_actions=interleave, contextual=("age",)
    )
    samples = [write_tokens(n, 2, 1, interleave=interleave, candidate_actions=candidate_actions) for n in events]
    assert cost(lengths, batch.num_candidates.numpy()).tolist() == [
        3 * (len(tokens) * (8 * 2 * 3 + 4 * 2 * 2) + 4 * count_pairs(tokens, causal=True) * 3) for tokens in samples
    ]


def test_a_sample_with_candidates_never_costs_more_than_one_without() -> None:
    candidates = np.arange(21)
    for causal in (False, True):
        cost = HSTUCost(hidden=1, heads=1, head_dim=1, layers=1, interleave_actions=False, causal=causal, max_tokens=20)
        assert cost.of_tokens(20 - candidates, candidates).max() == cost.max_cost


def test_candidates_outside_of_the_history_key_are_refused() -> None:
    cost = HSTUCost(hidden=1, heads=1, head_dim=1, layers=1, interleave_actions=False)
    message = "row 1 has 3 candidates, but 2 values of 'item_id', the last of which are the candidates"
    with pytest.raises(ConfigError, match=message):
        cost({"item_id": np.array([5, 2])}, np.array([1, 3]))


def test_whether_actions_are_tokens_of_an_hstu_model_has_to_be_stated() -> None:
    with pytest.raises(TypeError, match="interleave_actions"):
        HSTUCost(hidden=8, heads=1, head_dim=8, layers=1)  # type: ignore[call-arg]


_CHANGED: dict[str, Any] = {
    "hidden": 2,
    "heads": 2,
    "head_dim": 2,
    "layers": 2,
    "causal": False,
    "interleave_actions": True,
    "contextual": ("age",),
    "history_key": "a",
    "max_tokens": 5,
    "ffn_multiplier": 2.0,
}


@_KINDS
def test_ranks_compare_every_parameter_of_a_cost(make: Callable[..., HSTUCost | SelfAttentionCost]) -> None:
    cost = make(hidden=1, heads=1, head_dim=1, layers=1)
    names = [entry.name for entry in dataclasses.fields(cost)]
    described = {describe_cost(dataclasses.replace(cost, **{name: _CHANGED[name]})) for name in names}
    assert len(described | {describe_cost(cost)}) == len(names) + 1
