"""Costs of samples: operations of models, counted one by one and by PyTorch, and costs fitted to measured times."""

import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from evenrank.dataloader.balance import (
    HSTUCost,
    LinearCost,
    MeasuredCost,
    PaddedCost,
    SelfAttentionCost,
)
from evenrank.dataloader.balance.costs.cost import cost_shift, count_tokens, describe_cost, scaled_costs
from evenrank.dataloader.balance.costs.model_costs import counted_tokens
from evenrank.datasets.distributions import Lognormal
from tests.dataloader.balance.costs import Ints, Lengths, one_per_sample

NONE, NONE_OF_TWO = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64)  # candidates
KINDS: list[Any] = [partial(HSTUCost, interleave_actions=False), partial(SelfAttentionCost, ffn_multiplier=4)]


def test_tokens_are_counted_by_the_cost_or_else_all_values_count() -> None:
    lengths = {"item_id": np.array([5, 0]), "action": np.array([4, 1])}
    assert count_tokens(LinearCost(interleave_actions=False), lengths, 2).tolist() == [5, 0]
    assert count_tokens(lambda lengths, candidates: candidates, lengths, 2).tolist() == [9, 1]
    assert count_tokens(lambda lengths, candidates: candidates, {}, 3).tolist() == [0, 0, 0]
    cost: Any = SimpleNamespace(tokens=lambda _: np.array([0, 2**31 - 1]))  # the most that messages of ranks can have
    assert count_tokens(cost, lengths, 2).tolist() == [0, 2**31 - 1]


def test_costs_are_shifted_so_that_a_step_of_the_longest_samples_sums_within_62_bits() -> None:
    cost = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=False, max_tokens=100_000)
    samples = 16_384 * 128
    lengths = {"item_id": np.array([100_000, 77])}
    scaled = scaled_costs(cost, lengths, NONE_OF_TWO, samples_per_step=samples).tolist()
    assert 2**60 < scaled[0] * samples <= 2**62
    assert scaled == [c >> cost_shift(cost, samples) for c in cost(lengths, NONE_OF_TWO).tolist()]
    assert cost_shift(cost, 8) == 0


def test_functions_of_users_may_compute_in_the_arrays_that_they_are_given() -> None:
    def doubled(lengths: Lengths, *others: Ints) -> Ints:
        for values in (lengths["item_id"], *others):
            values *= 2
        return lengths["item_id"]

    lengths, candidates, counting = {"item_id": np.array([5, 3])}, np.array([1, 1]), SimpleNamespace(tokens=doubled)
    assert scaled_costs(doubled, lengths, candidates, samples_per_step=2).tolist() == [10, 6]
    assert count_tokens(cast(Any, counting), lengths, 2).tolist() == [10, 6]
    assert (lengths["item_id"].tolist(), candidates.tolist()) == ([5, 3], [1, 1])


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

    def forward(self, x: torch.Tensor) -> Any:
        projected = self.projections(x).split(self.out.in_features, dim=-1)
        q, k, v, *gates = (part.view(-1, *self.shape).transpose(0, 1) for part in projected)
        attended = torch.nn.functional.silu(q @ k.transpose(1, 2)) @ v
        for gate in gates:
            attended = attended * gate
        x = x + self.out(attended.transpose(0, 1).reshape(len(x), -1))
        return x + self.feed_forward(x)


@pytest.mark.parametrize("multiplier", [None, 4, 8 / 3])
@pytest.mark.parametrize(("hidden", "heads", "head_dim", "tokens"), [(8, 2, 3, 5), (16, 4, 4, 33), (12, 1, 32, 1)])
def test_operations_equal_torchs(hidden: int, heads: int, head_dim: int, tokens: int, multiplier: float | None) -> None:
    shape: dict[str, Any] = {"hidden": hidden, "heads": heads, "head_dim": head_dim}
    inner = None if multiplier is None else int(multiplier * hidden)
    layers = torch.nn.Sequential(*(_Layer(**shape, inner=inner) for _ in range(3)))
    with FlopCounterMode(display=False) as counter:
        layers(torch.randn(tokens, hidden, requires_grad=True)).sum().backward()
    options: dict[str, Any] = shape | {"layers": 3, "causal": False, "interleave_actions": False}
    cost = HSTUCost(**options) if multiplier is None else SelfAttentionCost(**options, ffn_multiplier=multiplier)
    assert cost.of_tokens(np.array([tokens]), NONE).tolist() == [counter.get_total_flops()]


def _count_pairs(tokens: str, *, causal: bool) -> float:
    """Count the attended pairs of tokens, h or c, one by one; the diagonal of causal attention counts half."""
    pairs = 0.0
    for query, role in enumerate(tokens):
        for key, key_role in enumerate(tokens):
            if query == key:
                pairs += 0.5 if causal else 1
            elif key_role == "h":
                pairs += role == "c" or key < query or not causal
    return pairs


@settings(max_examples=200)
@given(st.data(), st.integers(0, 9), st.integers(0, 3), st.booleans(), st.booleans(), st.booleans())
def test_every_cost_is_that_of_the_tokens_and_pairs_of_a_sample(
    data: st.DataObject, events: int, contextual: int, interleave: bool, candidate_actions: bool, causal: bool
) -> None:
    num_candidates = data.draw(st.integers(0, events))
    tokens = "h" * contextual  # in order: h for the history, c for candidates
    for event in range(events):
        is_candidate = event >= events - num_candidates
        tokens += ("c" if is_candidate else "h") * (1 + (interleave and (candidate_actions or not is_candidate)))
    actions = events - num_candidates * (not candidate_actions)
    counts = {"item_id": events, "action": actions, "age": contextual // 2, "tags": -(-contextual // 2)}
    lengths = {key: np.array([count]) for key, count in counts.items()}
    options: dict[str, Any] = {"interleave_actions": interleave, "contextual": ("age", "tags")}
    pairs = _count_pairs(tokens, causal=causal)
    fit: dict[str, Any] = {"fraction_bits": 40, "seconds_per_step": 0.0, "steps": 20, "r2": 0.9}
    attention = SelfAttentionCost(hidden=2, heads=1, head_dim=3, layers=1, ffn_multiplier=1, causal=causal, **options)
    of_attention = 3 * (len(tokens) * (8 * 2 * 3 + 4 * 2 * 2) + 4 * pairs * 3)
    for cost, expected in (
        (
            HSTUCost(hidden=3, heads=2, head_dim=5, layers=1, causal=causal, **options),
            3 * (10 * len(tokens) * 3 * 10 + 4 * pairs * 10),
        ),
        (attention, of_attention),
        (PaddedCost(attention), of_attention),
        (LinearCost(**options), len(tokens)),
        (
            MeasuredCost(linear=700, quadratic=11, **options, **fit),
            700 * len(tokens) + 11 * 2 * _count_pairs(tokens, causal=True),
        ),
    ):
        assert cost.tokens(lengths).tolist() == [len(tokens)]
        assert cost(lengths, np.array([num_candidates])).tolist() == [expected]


@pytest.mark.parametrize("make", KINDS)
def test_every_model_cost_knows_the_longest_samples_cost(make: Any) -> None:
    keys: dict[str, Any] = {"history_key": "semantic_id", "interleave_actions": True, "contextual": ("sex",)}
    cost = make(hidden=1024, heads=2, head_dim=256, layers=8, **keys)
    lengths = {"semantic_id": np.array([131_000, 3]), "action": np.array([71, 3]), "sex": np.array([1, 0])}
    assert cost.tokens(lengths).tolist() == [131_072, 6]
    costs = cost(lengths, NONE_OF_TWO)
    assert costs.dtype == np.int64
    assert costs.tolist() == [cost.max_cost, *cost.of_tokens(np.array([6]), NONE).tolist()]
    assert PaddedCost(cost).max_cost == cost.max_cost > 2**47
    assert counted_tokens(cost) == counted_tokens(PaddedCost(cost)) == {**keys, "max_tokens": 131_072}
    assert counted_tokens(one_per_sample) is None


@pytest.mark.parametrize("make", KINDS)
def test_ranks_compare_every_parameter_of_a_cost(make: Any) -> None:
    changed: dict[str, Any] = dict.fromkeys(
        ("hidden", "heads", "head_dim", "layers", "max_tokens", "ffn_multiplier"), 5
    )
    changed |= {"causal": False, "interleave_actions": True, "contextual": ("age",), "history_key": "a"}
    cost = make(hidden=1, heads=1, head_dim=1, layers=1)
    names = [entry.name for entry in dataclasses.fields(cost)]
    described = {describe_cost(dataclasses.replace(cost, **{name: changed[name]})) for name in names}
    assert len(described | {describe_cost(cost)}) == len(names) + 1
    assert describe_cost(PaddedCost(cost)) == f"PaddedCost(row={cost!r})"


A, B, C = 0.004, 3e-7, 2e-10  # seconds of a step, of a token, of half a pair of tokens


def make_steps(count: int = 200) -> Ints:
    """Return the tokens of the samples of steps, [count, 16]."""
    return Lognormal(mean=512, std=512).sample(np.random.default_rng(0), count * 16).reshape(count, 16)


def times_of(steps: NDArray[Any], a: float = A, b: float = B, c: float = C, noise: float = 0.0) -> NDArray[np.float64]:
    tokens = steps.astype(np.float64)
    exact = a + b * tokens.sum(axis=1) + c * (tokens**2).sum(axis=1)
    times: NDArray[np.float64] = exact * (1 + noise * np.random.default_rng(1).standard_normal(len(steps)))
    return times


GOOD = make_steps()
KEYS: dict[str, Any] = {"interleave_actions": True, "contextual": ("tags",)}
EXISTING = MeasuredCost(linear=700, quadratic=11, fraction_bits=40, seconds_per_step=A, steps=200, r2=0.97, **KEYS)
fit = partial(MeasuredCost.fit, interleave_actions=False)


def _seconds(cost: MeasuredCost) -> tuple[float, float, float]:
    """Return the seconds of a token, of half a pair of tokens, and of a step."""
    return cost.linear * cost.seconds_per_unit, cost.quadratic * cost.seconds_per_unit, cost.seconds_per_step


def test_exact_times_give_the_coefficients_back() -> None:
    cost = fit(GOOD, times_of(GOOD))
    assert _seconds(cost) == pytest.approx((B, C, A), rel=1e-6)
    assert cost.steps == 200
    assert cost.r2 == pytest.approx(1.0)
    noisy = times_of(GOOD, noise=0.003)
    assert (
        fit(GOOD, noisy) == fit(GOOD, noisy, candidates=np.minimum(GOOD, 1)) != fit(GOOD, noisy, candidates=GOOD // 4)
    )
    # Steps may have different numbers of samples, and a rank none.
    uneven = [row[: 1 + index % 16] for index, row in enumerate(GOOD)]
    times = [A + B * step.sum() + C * (step.astype(float) ** 2).sum() for step in uneven]
    cost = fit([*uneven, np.empty(0, dtype=np.int64)], [*times, A])
    assert _seconds(cost) == pytest.approx((B, C, A), rel=1e-6)
    # Sums of steps are fitted as their samples are.
    tokens, squares = GOOD.sum(axis=1).astype(np.float64), (GOOD.astype(np.float64) ** 2).sum(axis=1)
    of_sums = MeasuredCost.fit_sums(tokens, squares, noisy, max_tokens=131_072, interleave_actions=False)
    assert of_sums == fit(GOOD, noisy)


def test_times_of_steps_with_candidates_give_the_coefficients_back() -> None:
    rng = np.random.default_rng(0)
    steps, times = [], []
    for _ in range(100):
        # Of 16 samples, of which most have candidates; the candidates have no actions.
        events, num_candidates, tags = (rng.integers(0, high, 16) for high in (400, 300, 9))
        steps.append(({"item_id": events + num_candidates, "action": events, "tags": tags}, num_candidates))
        history = 2 * events + tags
        pairs = history**2 + num_candidates * (2 * history + 1)
        times.append(A + B * (history + num_candidates).sum() + C * pairs.sum())
    tokens, candidates = [EXISTING.tokens(of) for of, _ in steps], [EXISTING.candidate_tokens(*step) for step in steps]
    cost = MeasuredCost.fit(tokens, times, candidates=candidates, **KEYS)
    assert _seconds(cost) == pytest.approx((B, C, A), rel=1e-6)
    # What was fitted is what a Balancer is told of the same steps.
    told = [cost.seconds_per_step + cost.seconds_per_unit * float(cost(*step).sum()) for step in steps]
    assert told == pytest.approx(times, rel=1e-6)


@pytest.mark.parametrize("are_longest", [False, True])
def test_noise_and_far_outliers_do_not_bias_the_fit(are_longest: bool) -> None:
    steps = make_steps(2000)
    times = times_of(steps, noise=0.003)
    times[np.argsort(times)[-40:] if are_longest else slice(0, None, 20)] *= 10  # a checkpoint was written
    cost = fit(steps, times)
    assert _seconds(cost) == pytest.approx((B, C, A), rel=0.02)
    assert 0.99 < cost.r2 < 1


def test_coefficients_are_never_negative() -> None:
    cost = fit(GOOD, times_of(GOOD, b=1e-6, c=-1e-11))
    assert cost.linear > cost.quadratic == 0
    cost = fit(GOOD, times_of(GOOD, b=-1e-8))
    assert cost.linear == 0
    assert _seconds(cost)[1] == pytest.approx(C, rel=0.1)
    assert _seconds(fit(GOOD, times_of(GOOD, c=0)))[:2] == pytest.approx((B, 0), rel=1e-5, abs=1e-6 * B)
    assert _seconds(fit(GOOD, times_of(GOOD, a=-1e-5))) == pytest.approx((B, C, 0), rel=0.02)


@settings(max_examples=60)
@given(st.floats(1e-9, 1e-4), st.floats(1e-14, 1e-8), st.lists(st.integers(1, 131_072), min_size=1).map(np.array))
def test_costs_are_proportional_for_every_model(b: float, c: float, tokens: Ints) -> None:
    steps = np.arange(1, 41)[:, np.newaxis] * 3000  # of one sample each, so that sums have no rounding error
    cost = fit(steps, times_of(steps, b=b, c=c))
    fitted_b, fitted_c, _ = _seconds(cost)
    seconds = fitted_b * tokens + fitted_c * tokens.astype(np.float64) ** 2
    costs = cost.of_tokens(tokens, 0 * tokens).astype(np.float64)
    assert costs * cost.seconds_per_unit == pytest.approx(seconds, rel=1e-9)
    assert seconds == pytest.approx(b * tokens + c * tokens.astype(np.float64) ** 2, rel=1e-6)
    assert 2**58 < cost.max_cost < 2**61
    longer = fit(steps, times_of(steps, b=b, c=c), max_tokens=2**20)
    assert longer({"item_id": np.array([2**20])}, NONE).tolist() == [longer.max_cost]


def test_a_saved_cost_is_loaded_as_it_was(tmp_path: Path) -> None:
    options: dict[str, Any] = {"interleave_actions": True, "max_tokens": 5, "contextual": ("a\n", "\u00e9"), "r2": 0.9}
    options |= {"linear": 2**50, "fraction_bits": 100, "steps": 30}
    for number, seconds in enumerate((0.0, 1 / 3, 1e-300)):
        cost = MeasuredCost(quadratic=number, seconds_per_step=seconds, **options)
        cost.save(tmp_path / "cost.json")
        loaded = MeasuredCost.load(tmp_path / "cost.json")
        assert loaded == cost
        assert repr(loaded) == describe_cost(cost) == describe_cost(loaded)
    assert "linear=1125899906842624, quadratic=2, fraction_bits=100," in describe_cost(cost)


def test_a_file_of_a_cost_that_was_fitted_to_squared_tokens_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(
        '{"format": "evenrank measured cost", "version": 1, "interleave_actions": true, "contextual": ["tags"], '
        '"history_key": "item_id", "max_tokens": 131072, "linear": 700, "quadratic": 11, "fraction_bits": 40, '
        '"seconds_per_step": 0.004, "steps": 200, "r2": 0.97}'
    )
    assert MeasuredCost.load(path) == EXISTING
