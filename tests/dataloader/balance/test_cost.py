import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import (
    COSTS,
    HSTUCost,
    LinearCost,
    MeasuredCost,
    PaddedCost,
    SelfAttentionCost,
    register_cost,
)
from evenrank.dataloader.balance.costs.cost import cost_shift, count_tokens, describe_cost, resolve_cost, scaled_costs
from evenrank.dataloader.balance.costs.model_costs import counted_tokens
from tests.dataloader.balance.costs import Ints, Lengths, one_per_sample
from tests.registrations import restored

Model = Callable[..., HSTUCost | SelfAttentionCost]
NONE, NONE_OF_TWO = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64)  # candidates


def _write_tokens(events: int, num_candidates: int, contextual: int, interleave: bool, candidate_actions: bool) -> str:
    """Write a sample as its tokens in order, h for the history and c for candidates."""
    tokens = "h" * contextual
    for event in range(events):
        is_candidate = event >= events - num_candidates
        has_action = interleave and (candidate_actions or not is_candidate)
        tokens += ("c" if is_candidate else "h") * (1 + has_action)
    return tokens


def _count_pairs(tokens: str, *, causal: bool) -> float:
    """Count the attended pairs one by one; the diagonal of causal attention counts half."""
    pairs = 0.0
    for query, role in enumerate(tokens):
        for key, key_role in enumerate(tokens):
            if query == key:
                pairs += 0.5 if causal else 1
            elif key_role == "h":
                pairs += role == "c" or key < query or not causal
    return pairs


def test_tokens_are_counted_by_the_cost_or_else_all_values_count() -> None:
    lengths = {"item_id": np.array([5, 0]), "action": np.array([4, 1])}
    cost = HSTUCost(hidden=1, heads=1, head_dim=1, layers=1, interleave_actions=False)
    assert count_tokens(cost, lengths, 2).tolist() == [5, 0]
    assert count_tokens(lambda lengths, candidates: candidates, lengths, 2).tolist() == [9, 1]
    assert count_tokens(lambda lengths, candidates: candidates, {}, 3).tolist() == [0, 0, 0]


def test_costs_are_shifted_so_that_a_step_of_the_longest_samples_sums_within_62_bits() -> None:
    cost = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=False, max_tokens=100_000)
    samples = 16_384 * 128
    lengths = {"item_id": np.array([100_000, 77])}
    scaled = scaled_costs(cost, lengths, NONE_OF_TWO, samples_per_step=samples).tolist()
    assert 2**60 < scaled[0] * samples <= 2**62
    shift = cost_shift(cost, samples)
    assert scaled == [c >> shift for c in cost(lengths, NONE_OF_TWO).tolist()]
    assert cost_shift(cost, 8) == 0


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
        scaled_costs(lambda lengths, candidates: returned, {}, NONE_OF_TWO, samples_per_step=8)


class _Failing:
    def __call__(self, lengths: Lengths, candidates: Ints) -> Ints:
        return lengths["user_id"]

    def tokens(self, lengths: Lengths) -> Ints:
        return lengths["item_id"][1:]


@pytest.mark.parametrize(("most", "accepted"), [([0, 2**31 - 1], True), ([0, 2**31], False), ([-1, 0], False)])
def test_tokens_of_a_cost_fit_the_messages_of_ranks(most: list[int], accepted: bool) -> None:
    cost: Any = SimpleNamespace(tokens=lambda lengths: np.array(most))
    if accepted:
        assert count_tokens(cost, {"item_id": np.array([5, 0])}, 2).tolist() == most
        return
    with pytest.raises(ConfigError, match=rf"must return 0..2147483647 for each sample, got {most[0]}..{most[1]}"):
        count_tokens(cost, {"item_id": np.array([5, 0])}, 2)


def test_a_cost_that_fails_is_named_with_the_keys_of_the_batch() -> None:
    lengths = {"item_id": np.array([5, 0]), "action": np.array([4, 1])}
    keys = "; the batch has the keys item_id, action"
    with pytest.raises(ConfigError) as raised:
        scaled_costs(_Failing(), lengths, NONE_OF_TWO, samples_per_step=8)
    assert str(raised.value) == f"the cost _Failing raised KeyError: 'user_id'{keys}"
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(ConfigError) as raised:
        count_tokens(_Failing(), lengths, 2)
    assert str(raised.value) == (
        f"tokens() of the cost _Failing must return int64 of shape (2,), got int64 of shape (1,){keys}"
    )
    cost = HSTUCost(hidden=1, heads=1, head_dim=1, layers=1, interleave_actions=True)
    with pytest.raises(
        ConfigError, match=r"^the cost HSTUCost needs the key 'action'; the batch has the keys item_id$"
    ):
        scaled_costs(cost, {"item_id": np.array([5, 0])}, NONE_OF_TWO, samples_per_step=8)


def test_registered_functions_and_classes_are_costs_by_name() -> None:
    with restored(COSTS):
        assert register_cost("failing")(_Failing) is _Failing  # still a class
        register_cost("ones")(one_per_sample)
        assert type(resolve_cost("failing")) is _Failing
        assert resolve_cost("ones") is resolve_cost({"name": "ones"}) is one_per_sample
        COSTS.unregister("ones")
        with pytest.raises(ConfigError, match=r"^no cost is called 'ones'; known are hstu, .*, measured, failing$"):
            resolve_cost("ones")


class _Layer(torch.nn.Module):
    """The matrix products of a layer with the full attention matrix."""

    def __init__(self, hidden: int, heads: int, head_dim: int, inner: int | None) -> None:
        """Of a feed-forward network of width `inner`, or with the gates of an HSTU layer instead."""
        super().__init__()
        self.shape = (heads, head_dim)
        self.projections = torch.nn.Linear(hidden, (4 if inner is None else 3) * heads * head_dim)
        self.out = torch.nn.Linear(heads * head_dim, hidden)
        widths = [] if inner is None else [(hidden, inner), (inner, hidden)]
        self.feed_forward = torch.nn.Sequential(*(torch.nn.Linear(*width) for width in widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = self.projections(x).split(self.out.in_features, dim=-1)
        q, k, v, *gates = (part.view(-1, *self.shape).transpose(0, 1) for part in projected)
        attended = torch.nn.functional.silu(q @ k.transpose(1, 2)) @ v
        for gate in gates:
            attended = attended * gate
        x = x + self.out(attended.transpose(0, 1).reshape(len(x), -1))
        output: torch.Tensor = x + self.feed_forward(x)
        return output


@pytest.mark.parametrize("multiplier", [None, 4, 8 / 3])
@pytest.mark.parametrize(("hidden", "heads", "head_dim", "tokens"), [(8, 2, 3, 5), (16, 4, 4, 33), (12, 1, 32, 1)])
def test_operations_equal_torchs(hidden: int, heads: int, head_dim: int, tokens: int, multiplier: float | None) -> None:
    shape: dict[str, Any] = {"hidden": hidden, "heads": heads, "head_dim": head_dim}
    inner = None if multiplier is None else int(multiplier * hidden)
    layers = torch.nn.Sequential(*(_Layer(**shape, inner=inner) for _ in range(3)))
    x = torch.randn(tokens, hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layers(x).sum().backward()
    options: dict[str, Any] = shape | {"layers": 3, "causal": False, "interleave_actions": False}
    cost = HSTUCost(**options) if multiplier is None else SelfAttentionCost(**options, ffn_multiplier=multiplier)
    assert cost.of_tokens(np.array([tokens]), NONE).tolist() == [counter.get_total_flops()]


_KINDS = [partial(HSTUCost, interleave_actions=False), partial(SelfAttentionCost, ffn_multiplier=4)]


@pytest.mark.parametrize("make", _KINDS)
def test_every_model_cost_counts_tokens_and_knows_the_longest_samples_cost(make: Model) -> None:
    keys: dict[str, Any] = {"history_key": "semantic_id", "interleave_actions": True, "contextual": ("sex",)}
    cost = make(hidden=1024, heads=2, head_dim=256, layers=8, **keys)
    lengths = {"semantic_id": np.array([131_000, 3]), "action": np.array([71, 3]), "sex": np.array([1, 0])}
    assert cost.tokens(lengths).tolist() == [131_072, 6]
    costs = cost(lengths, NONE_OF_TWO)
    assert costs.dtype == np.int64
    assert costs.tolist() == [cost.max_cost, *cost.of_tokens(np.array([6]), NONE).tolist()]
    assert cost.max_cost > 2**47
    too_long = dict.fromkeys(lengths, np.array([5, 10_000_000]))
    with pytest.raises(ConfigError, match=r"sample of 30,000,000 tokens does not fit in int64; max_tokens is 131,072"):
        cost(too_long, NONE_OF_TWO)
    with pytest.raises(ConfigError, match="Cost needs the key 'sex'; the batch has the keys semantic_id, action"):
        cost.tokens({"semantic_id": lengths["semantic_id"], "action": lengths["action"]})
    message = "row 1 has 4 candidates, but 3 values of 'semantic_id', the last of which are the candidates"
    with pytest.raises(ConfigError, match=message):
        cost(lengths, np.array([1, 4]))


def test_impossible_model_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers must be at least 1, got 0"):
        HSTUCost(hidden=8, heads=1, head_dim=8, layers=0, interleave_actions=False)
    with pytest.raises(ConfigError, match="max_tokens must be at least 1, got -1"):
        SelfAttentionCost(hidden=8, heads=1, head_dim=8, layers=1, ffn_multiplier=4, max_tokens=-1)
    for wrong in (-4, 0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"ffn_multiplier must be above 0 and finite, got {wrong}"):
            SelfAttentionCost(hidden=8, heads=1, head_dim=8, layers=1, ffn_multiplier=wrong)


@settings(max_examples=300)
@given(data=st.data(), interleave=st.booleans(), candidate_actions=st.booleans(), causal=st.booleans())
def test_candidates_attend_to_history(data: Any, interleave: bool, candidate_actions: bool, causal: bool) -> None:
    events, contextual = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
    num_candidates = data.draw(st.integers(0, events))
    tokens = _write_tokens(events, num_candidates, contextual, interleave, candidate_actions)
    actions = events - num_candidates * (not candidate_actions)
    counts = {"item_id": events, "action": actions, "age": contextual // 2, "tags": -(-contextual // 2)}
    lengths = {key: np.array([count]) for key, count in counts.items()}
    options: dict[str, Any] = {"interleave_actions": interleave, "contextual": ("age", "tags")}
    cost = HSTUCost(hidden=3, heads=2, head_dim=5, layers=1, causal=causal, **options)
    assert cost.tokens(lengths).tolist() == [len(tokens)]
    pairs = _count_pairs(tokens, causal=causal)
    assert cost(lengths, np.array([num_candidates])).tolist() == [3 * (10 * len(tokens) * 3 * 10 + 4 * pairs * 10)]
    attention = SelfAttentionCost(hidden=2, heads=1, head_dim=3, layers=1, ffn_multiplier=1, causal=causal, **options)
    expected = 3 * (len(tokens) * (8 * 2 * 3 + 4 * 2 * 2) + 4 * pairs * 3)
    assert attention(lengths, np.array([num_candidates])).tolist() == [expected]
    fit: dict[str, Any] = {"fraction_bits": 40, "seconds_per_step": 0.0, "steps": 20, "r2": 0.9}
    measured = MeasuredCost(linear=700, quadratic=11, **options, **fit)
    seconds = 700 * len(tokens) + 11 * 2 * _count_pairs(tokens, causal=True)
    assert measured(lengths, np.array([num_candidates])).tolist() == [seconds]


_CHANGED: dict[str, Any] = dict.fromkeys(("hidden", "heads", "head_dim", "layers", "max_tokens", "ffn_multiplier"), 5)
_CHANGED |= {"causal": False, "interleave_actions": True, "contextual": ("age",), "history_key": "a"}


@pytest.mark.parametrize("make", _KINDS)
def test_ranks_compare_every_parameter_of_a_cost(make: Model) -> None:
    cost = make(hidden=1, heads=1, head_dim=1, layers=1)
    names = [entry.name for entry in dataclasses.fields(cost)]
    described = {describe_cost(dataclasses.replace(cost, **{name: _CHANGED[name]})) for name in names}
    assert len(described | {describe_cost(cost)}) == len(names) + 1


def test_linear_and_padded_costs_are_those_of_single_samples() -> None:
    options: dict[str, Any] = {"interleave_actions": True, "contextual": ("user_id",), "max_tokens": 50}
    lengths = {"item_id": np.array([3, 0]), "action": np.array([3, 0]), "user_id": np.array([1, 1])}
    linear = LinearCost(**options)
    assert linear(lengths, NONE_OF_TWO).tolist() == linear.tokens(lengths).tolist() == [7, 1]
    assert linear.max_cost == 50
    attention = SelfAttentionCost(hidden=2, heads=1, head_dim=2, layers=1, ffn_multiplier=1, **options)
    padded = PaddedCost(attention)
    assert padded(lengths, NONE_OF_TWO).tolist() == attention(lengths, NONE_OF_TWO).tolist()
    assert (padded.tokens(lengths).tolist(), padded.max_cost) == ([7, 1], attention.max_cost)
    assert describe_cost(padded) == f"PaddedCost(row={attention!r})"
    counted = {"history_key": "item_id", "interleave_actions": True, "contextual": ("user_id",), "max_tokens": 50}
    assert counted_tokens(linear) == counted_tokens(padded) == counted
    assert counted_tokens(lambda lengths, candidates: candidates) is None
