"""Costs: those of models equal PyTorch's count of operations; those of users are checked, scaled and counted."""

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
from evenrank.dataloader.balance.cost import (
    HSTUCost,
    SelfAttentionCost,
    cost_shift,
    count_tokens,
    describe_cost,
    scaled_costs,
)
from evenrank.dataloader.batches.schema import lengths_of, schema_of
from evenrank.datasets.distributions import Uniform
from tests.dataloader.balance.costs import Ints, count_pairs, write_tokens

NO_CANDIDATES = np.zeros(1, dtype=np.int64)


def test_tokens_are_counted_by_the_cost_or_else_all_values_count() -> None:
    lengths = {"item_id": np.array([5, 0]), "action": np.array([4, 1])}
    cost = HSTUCost(hidden=1, heads=1, head_dim=1, layers=1, interleave_actions=False)
    assert count_tokens(cost, lengths, 2).tolist() == [5, 0]
    assert count_tokens(lambda lengths, candidates: candidates, lengths, 2).tolist() == [9, 1]
    assert count_tokens(lambda lengths, candidates: candidates, {}, 3).tolist() == [0, 0, 0]


def test_a_step_of_the_longest_samples_sums_within_62_bits() -> None:
    cost = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=False, max_tokens=100_000)
    samples = 16_384 * 128
    longest = {"item_id": np.array([100_000])}
    scaled = scaled_costs(cost, longest, np.zeros(1, dtype=np.int64), num_real=1, samples_per_step=samples)
    assert 2**60 < int(scaled[0]) * samples <= 2**62
    assert cost_shift(cost, 8) == 0


def test_the_scale_is_a_power_of_two_that_depends_on_the_configuration_alone() -> None:
    cost = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=False)
    samples = 3 * 2**18
    shift = cost_shift(cost, samples)
    lengths = {"item_id": np.array([1, 77, 4096])}
    scaled = scaled_costs(cost, lengths, np.zeros(3, dtype=np.int64), num_real=3, samples_per_step=samples // 3 * 3)
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
        scaled_costs(
            lambda lengths, candidates: returned, {}, np.zeros(2, dtype=np.int64), num_real=2, samples_per_step=8
        )


def test_padding_costs_0_whatever_the_cost_returns() -> None:
    returned = np.array([5, 6, -7])
    no_candidates = np.zeros(3, dtype=np.int64)
    scaled = scaled_costs(lambda lengths, candidates: returned, {}, no_candidates, num_real=1, samples_per_step=8)
    assert scaled.tolist() == [5, 0, 0]


class _Layer(torch.nn.Module):
    """The matrix products of a layer with the full attention matrix; `inner` is the width of the feed-forward network,
    None for the gates of an HSTU layer."""

    def __init__(self, hidden: int, heads: int, head_dim: int, inner: int | None) -> None:
        super().__init__()
        self.shape = (heads, head_dim)
        self.projections = torch.nn.Linear(hidden, (4 if inner is None else 3) * heads * head_dim)
        self.out = torch.nn.Linear(heads * head_dim, hidden)
        self.feed_forward = torch.nn.Sequential()
        if inner is not None:
            self.feed_forward = torch.nn.Sequential(torch.nn.Linear(hidden, inner), torch.nn.Linear(inner, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, *gates = (
            part.view(-1, *self.shape).transpose(0, 1)
            for part in self.projections(x).split(self.out.in_features, dim=-1)
        )
        attended = torch.nn.functional.silu(q @ k.transpose(1, 2)) @ v
        for gate in gates:
            attended = attended * gate
        x = x + self.out(attended.transpose(0, 1).reshape(len(x), -1))
        output: torch.Tensor = x + self.feed_forward(x)
        return output


@pytest.mark.parametrize("multiplier", [None, 4, 8 / 3])
@pytest.mark.parametrize(("hidden", "heads", "head_dim", "tokens"), [(8, 2, 3, 5), (16, 4, 4, 33), (12, 1, 32, 1)])
def test_operations_equal_pytorchs_count_of_forward_and_backward(
    hidden: int, heads: int, head_dim: int, tokens: int, multiplier: float | None
) -> None:
    shape: dict[str, Any] = {"hidden": hidden, "heads": heads, "head_dim": head_dim}
    inner = None if multiplier is None else int(multiplier * hidden)
    layers = torch.nn.Sequential(*(_Layer(**shape, inner=inner) for _ in range(3)))
    x = torch.randn(tokens, hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layers(x).sum().backward()
    options: dict[str, Any] = shape | {"layers": 3, "causal": False, "interleave_actions": False}
    cost = HSTUCost(**options) if multiplier is None else SelfAttentionCost(**options, ffn_multiplier=multiplier)
    assert cost.of_tokens(np.array([tokens]), NO_CANDIDATES).tolist() == [counter.get_total_flops()]


_KINDS = pytest.mark.parametrize(
    "make", [partial(HSTUCost, interleave_actions=False), partial(SelfAttentionCost, ffn_multiplier=4)]
)


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


def test_impossible_model_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers must be at least 1, got 0"):
        HSTUCost(hidden=8, heads=1, head_dim=8, layers=0, interleave_actions=False)
    with pytest.raises(ConfigError, match="max_tokens must be at least 1, got -1"):
        SelfAttentionCost(hidden=8, heads=1, head_dim=8, layers=1, ffn_multiplier=4, max_tokens=-1)
    for wrong in (-4, 0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"ffn_multiplier must be positive and finite, got {wrong}"):
            SelfAttentionCost(hidden=8, heads=1, head_dim=8, layers=1, ffn_multiplier=wrong)


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


def test_candidates_outside_of_the_history_key_are_refused() -> None:
    cost = HSTUCost(hidden=1, heads=1, head_dim=1, layers=1, interleave_actions=False)
    message = "row 1 has 3 candidates, but 2 values of 'item_id', the last of which are the candidates"
    with pytest.raises(ConfigError, match=message):
        cost({"item_id": np.array([5, 2])}, np.array([1, 3]))


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


def test_a_key_whose_values_are_tokens_must_be_there() -> None:
    lengths = {"item_id": np.array([5, 0]), "action": np.array([4, 0])}
    cost = HSTUCost(hidden=1, heads=1, head_dim=1, layers=1, interleave_actions=True, contextual=("age",))
    with pytest.raises(ConfigError, match="needs the key 'age'; batches have item_id, action"):
        cost.tokens(lengths)
