"""Costs of samples: operations of models, counted one by one and by PyTorch, and costs fitted to measured times."""

import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn.functional import linear, silu
from torch.utils.flop_counter import FlopCounterMode

from evenrank.dataloader.balance import HSTUCost, LinearCost, MeasuredCost, PaddedCost, SelfAttentionCost
from evenrank.dataloader.balance.costs.cost import cost_shift, count_tokens, describe_cost, scaled_costs
from evenrank.dataloader.balance.costs.model_costs import counted_tokens
from evenrank.datasets.distributions import Lognormal
from tests.dataloader.balance.costs import Ints, Lengths, one_per_sample

NONE = np.zeros(1, dtype=np.int64)  # candidates
KINDS: list[Any] = [partial(HSTUCost, interleave_actions=False), partial(SelfAttentionCost, ffn_multiplier=4)]


def _doubled(lengths: Lengths, *others: Ints) -> Ints:
    """Return a cost, computed in the arrays that were given."""
    for values in (lengths["item_id"], *others):
        values *= 2
    return lengths["item_id"]


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (LinearCost(interleave_actions=False), [5, 0]),
        (one_per_sample, [9, 1]),  # the values of all keys
        (SimpleNamespace(tokens=lambda _: np.array([0, 2**31 - 1])), [0, 2**31 - 1]),  # messages of ranks have int32
        (SimpleNamespace(tokens=_doubled), [10, 0]),
    ],
)
def test_tokens_are_counted_by_the_cost_or_else_all_values_count(cost: Any, expected: list[int]) -> None:
    lengths = {"item_id": np.array([5, 0]), "action": np.array([4, 1])}
    assert count_tokens(cost, lengths, 2).tolist() == expected
    assert lengths["item_id"].tolist() == [5, 0]


def test_costs_are_shifted_so_that_a_step_of_the_longest_samples_sums_within_62_bits() -> None:
    cost = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=False, max_tokens=100_000)
    lengths, candidates = {"item_id": np.array([100_000, 77])}, np.array([0, 0])
    for samples, least in ((16_384 * 128, 2**60), (8, 0)):
        scaled = scaled_costs(cost, lengths, candidates, samples_per_step=samples).tolist()
        assert least < scaled[0] * samples <= 2**62
        assert scaled == [c >> cost_shift(cost, samples) for c in cost(lengths, candidates).tolist()]
    assert cost_shift(cost, 8) == 0
    assert scaled_costs(_doubled, lengths, candidates, samples_per_step=2).tolist() == [200_000, 154]
    assert lengths["item_id"].tolist() == [100_000, 77]


def _train_layer(x: torch.Tensor, heads: int, head_dim: int, inner: int | None) -> torch.Tensor:
    """Compute the matrix products of a layer with the full attention matrix.

    With a feed-forward network of width `inner`, or with the gates of an HSTU layer instead.
    """
    hidden, width = x.shape[1], heads * head_dim
    shapes = [(width, hidden)] * (4 if inner is None else 3) + [(hidden, width)]
    *projections, out = (torch.randn(shape, requires_grad=True) for shape in shapes)
    q, k, v, *gates = (linear(x, weight).view(-1, heads, head_dim).transpose(0, 1) for weight in projections)
    attended = silu(q @ k.transpose(1, 2)) @ v
    for gate in gates:
        attended = attended * gate
    x = x + linear(attended.transpose(0, 1).reshape(len(x), -1), out)
    if inner is None:
        return x
    up, down = torch.randn(inner, hidden, requires_grad=True), torch.randn(hidden, inner, requires_grad=True)
    return x + linear(linear(x, up), down)


@pytest.mark.parametrize("multiplier", [None, 4, 8 / 3])
@pytest.mark.parametrize(("hidden", "heads", "head_dim", "tokens"), [(8, 2, 3, 5), (12, 1, 32, 1)])
def test_operations_equal_torchs(hidden: int, heads: int, head_dim: int, tokens: int, multiplier: float | None) -> None:
    inner = None if multiplier is None else int(multiplier * hidden)
    with FlopCounterMode(display=False) as counter:
        x = torch.randn(tokens, hidden, requires_grad=True)
        for _ in range(3):
            x = _train_layer(x, heads, head_dim, inner)
        x.sum().backward()
    options: dict[str, Any] = {"hidden": hidden, "heads": heads, "head_dim": head_dim, "layers": 3, "causal": False}
    options["interleave_actions"] = False
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
    count, pairs, causal_pairs = len(tokens), _count_pairs(tokens, causal=causal), _count_pairs(tokens, causal=True)
    fitted: dict[str, Any] = {"fraction_bits": 40, "seconds_per_step": 0.0, "steps": 20, "r2": 0.9}
    hstu = HSTUCost(hidden=3, heads=2, head_dim=5, layers=1, causal=causal, **options)
    attention = SelfAttentionCost(hidden=2, heads=1, head_dim=3, layers=1, ffn_multiplier=1, causal=causal, **options)
    of_attention = 3 * (count * (8 * 2 * 3 + 4 * 2 * 2) + 4 * pairs * 3)
    expected: dict[Any, float] = {
        hstu: 3 * (10 * count * 3 * 10 + 4 * pairs * 10),
        attention: of_attention,
        PaddedCost(attention): of_attention,
        LinearCost(**options): count,
        MeasuredCost(linear=700, quadratic=11, **options, **fitted): 700 * count + 11 * 2 * causal_pairs,
    }
    for cost, of_sample in expected.items():
        assert cost.tokens(lengths).tolist() == [count]
        assert cost(lengths, np.array([num_candidates])).tolist() == [of_sample]


@pytest.mark.parametrize("make", KINDS)
def test_a_cost_tells_how_it_counts_the_longest_samples_cost_and_each_of_its_parameters(make: Any) -> None:
    keys: dict[str, Any] = {"history_key": "semantic_id", "interleave_actions": True, "contextual": ("sex",)}
    cost = make(hidden=1024, heads=2, head_dim=256, layers=8, **keys)
    lengths = {"semantic_id": np.array([131_000, 3]), "action": np.array([71, 3]), "sex": np.array([1, 0])}
    assert cost.tokens(lengths).tolist() == [131_072, 6]
    costs = cost(lengths, np.array([0, 0]))
    assert costs.dtype == np.int64
    assert costs.tolist() == [cost.max_cost, *cost.of_tokens(np.array([6]), NONE).tolist()]
    assert PaddedCost(cost).max_cost == cost.max_cost > 2**47
    assert counted_tokens(cost) == counted_tokens(PaddedCost(cost)) == {**keys, "max_tokens": 131_072}
    assert counted_tokens(one_per_sample) is None
    changed: dict[str, Any] = {entry.name: 5 for entry in dataclasses.fields(cost)}  # ranks compare the descriptions
    changed |= {"causal": False, "interleave_actions": False, "contextual": ("age",), "history_key": "a"}
    described = {describe_cost(dataclasses.replace(cost, **{name: changed[name]})) for name in changed}
    assert len(described | {describe_cost(cost)}) == len(dataclasses.fields(cost)) + 1
    assert describe_cost(PaddedCost(cost)) == f"PaddedCost(row={cost!r})"


A, B, C = 0.004, 3e-7, 2e-10  # seconds of a step, of a token, of half a pair of tokens
STEPS = Lognormal(mean=512, std=512).sample(np.random.default_rng(0), 2000 * 16).reshape(2000, 16)  # tokens of samples
GOOD = STEPS[:200]


def _times_of(steps: NDArray[Any], a: float = A, b: float = B, c: float = C, noise: float = 0.0) -> NDArray[np.float64]:
    tokens = steps.astype(np.float64)
    exact = a + b * tokens.sum(axis=1) + c * (tokens**2).sum(axis=1)
    times: NDArray[np.float64] = exact * (1 + noise * np.random.default_rng(1).standard_normal(len(steps)))
    return times


KEYS: dict[str, Any] = {"interleave_actions": True, "contextual": ("tags",)}
fit = partial(MeasuredCost.fit, interleave_actions=False)


def _check(cost: MeasuredCost, b: float, c: float, a: float, rel: float = 1e-6) -> None:
    fitted = cost.linear * cost.seconds_per_unit, cost.quadratic * cost.seconds_per_unit, cost.seconds_per_step
    assert min(fitted) >= 0
    assert fitted == pytest.approx((b, c, a), rel=rel, abs=1e-12)


def test_exact_times_give_the_coefficients_back() -> None:
    cost = fit(GOOD, _times_of(GOOD))
    _check(cost, B, C, A)
    assert cost.steps == 200
    assert cost.r2 == pytest.approx(1.0)
    # Steps may have different numbers of samples, and a rank none.
    uneven = [*(row[: 1 + index % 16] for index, row in enumerate(GOOD)), np.empty(0, dtype=np.int64)]
    _check(fit(uneven, [_times_of(step[np.newaxis])[0] for step in uneven]), B, C, A)
    noisy = _times_of(GOOD, noise=0.003)
    assert fit(GOOD, noisy) == fit(GOOD, noisy, candidates=0 * GOOD) != fit(GOOD, noisy, candidates=GOOD // 4)
    # Sums of steps are fitted as their samples are.
    tokens, squares = GOOD.sum(axis=1).astype(np.float64), (GOOD.astype(np.float64) ** 2).sum(axis=1)
    of_sums = MeasuredCost.fit_sums(tokens, squares, noisy, max_tokens=131_072, interleave_actions=False)
    assert of_sums == fit(GOOD, noisy)


def test_times_of_steps_with_candidates_give_the_coefficients_back() -> None:
    rng, counting = np.random.default_rng(0), LinearCost(**KEYS)
    steps, times = [], []
    for _ in range(100):
        # Of 16 samples, of which most have candidates; the candidates have no actions.
        events, num_candidates, tags = (rng.integers(0, high, 16) for high in (400, 300, 9))
        steps.append(({"item_id": events + num_candidates, "action": events, "tags": tags}, num_candidates))
        history = 2 * events + tags
        pairs = history**2 + num_candidates * (2 * history + 1)
        times.append(A + B * (history + num_candidates).sum() + C * pairs.sum())
    tokens, candidates = [counting.tokens(of) for of, _ in steps], [counting.candidate_tokens(*step) for step in steps]
    cost = MeasuredCost.fit(tokens, times, candidates=candidates, **KEYS)
    _check(cost, B, C, A)
    # What was fitted is what a Balancer is told of the same steps.
    told = [cost.seconds_per_step + cost.seconds_per_unit * float(cost(*step).sum()) for step in steps]
    assert told == pytest.approx(times, rel=1e-6)


@pytest.mark.parametrize("are_longest", [False, True])
def test_noise_and_far_outliers_do_not_bias_the_fit(are_longest: bool) -> None:
    times = _times_of(STEPS, noise=0.003)
    times[np.argsort(times)[-40:] if are_longest else slice(0, None, 20)] *= 10  # a checkpoint was written
    cost = fit(STEPS, times)
    _check(cost, B, C, A, 0.02)
    assert 0.99 < cost.r2 < 1


def test_coefficients_are_never_negative() -> None:
    _check(fit(GOOD, _times_of(GOOD, b=1e-6, c=-1e-11)), 1e-6, 0, A, 0.05)
    _check(fit(GOOD, _times_of(GOOD, b=-1e-8)), 0, C, A, 0.1)
    _check(fit(GOOD, _times_of(GOOD, c=0)), B, 0, A, 1e-5)
    _check(fit(GOOD, _times_of(GOOD, a=-1e-5)), B, C, 0, 0.02)


@settings(max_examples=60)
@given(st.floats(1e-9, 1e-4), st.floats(1e-14, 1e-8), st.lists(st.integers(1, 131_072), min_size=1).map(np.array))
def test_costs_are_proportional_for_every_model(b: float, c: float, tokens: Ints) -> None:
    steps = np.arange(1, 41)[:, np.newaxis] * 3000  # of one sample each, so that sums have no rounding error
    cost = fit(steps, _times_of(steps, b=b, c=c))
    costs = cost.of_tokens(tokens, 0 * tokens).astype(np.float64)
    seconds = b * tokens + c * tokens.astype(np.float64) ** 2
    assert costs * cost.seconds_per_unit == pytest.approx(seconds, rel=1e-6)
    assert 2**58 < cost.max_cost < 2**61
    longer = fit(steps, _times_of(steps, b=b, c=c), max_tokens=2**20)
    assert longer({"item_id": np.array([2**20])}, NONE).tolist() == [longer.max_cost]


def test_a_cost_is_loaded_as_it_was_saved_also_by_earlier_versions(tmp_path: Path) -> None:
    path, fitted = tmp_path / "cost.json", {"steps": 200, "r2": 0.97, "fraction_bits": 40}
    options: dict[str, Any] = {"contextual": ("a\n", "\u00e9"), "max_tokens": 5, "linear": 2**50, **fitted}
    for seconds in (0.0, 1 / 3, 1e-300):
        cost = MeasuredCost(quadratic=2, seconds_per_step=seconds, interleave_actions=True, **options)
        cost.save(path)
        loaded = MeasuredCost.load(path)
        assert loaded == cost
        assert repr(loaded) == describe_cost(cost)
    assert "linear=1125899906842624, quadratic=2, fraction_bits=40," in describe_cost(cost)
    path.write_text(
        '{"format": "evenrank measured cost", "version": 1, "interleave_actions": true, "contextual": ["tags"], '
        '"history_key": "item_id", "max_tokens": 131072, "linear": 700, "quadratic": 11, "fraction_bits": 40, '
        '"seconds_per_step": 0.004, "steps": 200, "r2": 0.97}'
    )
    earlier: Any = {"linear": 700, "quadratic": 11, "seconds_per_step": 0.004, **KEYS, **fitted}
    assert MeasuredCost.load(path) == MeasuredCost(**earlier)
