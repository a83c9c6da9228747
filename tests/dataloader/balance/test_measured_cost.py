import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.balance import MeasuredCost
from evenrank.dataloader.balance.costs.cost import describe_cost
from evenrank.datasets.distributions import Lognormal
from tests.dataloader.balance.costs import Ints

A, B, C = 0.004, 3e-7, 2e-10  # seconds of a step, of a token, of half a pair of tokens


def _steps(count: int = 200, seed: int = 0, batch_size: int = 16) -> Ints:
    lengths = Lognormal(mean=512, std=512).sample(np.random.default_rng(seed), count * batch_size)
    return lengths.reshape(count, batch_size)


def _times(steps: NDArray[Any], a: float = A, b: float = B, c: float = C, noise: float = 0.0) -> NDArray[np.float64]:
    tokens = steps.astype(np.float64)
    exact = a + b * tokens.sum(axis=1) + c * (tokens**2).sum(axis=1)
    times: NDArray[np.float64] = exact * (1 + noise * np.random.default_rng(1).standard_normal(len(steps)))
    return times


GOOD = _steps()
PACKED = np.concatenate([GOOD[:, :8] % 1000, 1000 - GOOD[:, :8] % 1000], axis=1)  # 8,000 tokens each
SIMILAR = np.where(np.arange(16) < np.arange(200)[:, np.newaxis] % 16 + 1, 64, 0)  # 1..16 samples of 64 tokens
NUMBERS = np.arange(200)
KEYS: dict[str, Any] = {"interleave_actions": True, "contextual": ("tags",)}
EXISTING = MeasuredCost(linear=700, quadratic=11, fraction_bits=40, seconds_per_step=A, steps=200, r2=0.97, **KEYS)

_fit = partial(MeasuredCost.fit, interleave_actions=False)


def _seconds(cost: MeasuredCost) -> tuple[float, float, float]:
    """Return the seconds of a token, of half a pair of tokens, and of a step."""
    linear, quadratic = np.ldexp([float(cost.linear), float(cost.quadratic)], -cost.fraction_bits)
    return float(linear), float(quadratic), cost.seconds_per_step


def test_exact_times_give_the_coefficients_back() -> None:
    cost = _fit(GOOD, _times(GOOD))
    assert _seconds(cost) == pytest.approx((B, C, A), rel=1e-6)
    assert cost.steps == 200
    assert cost.r2 == pytest.approx(1.0)
    times = _times(GOOD, noise=0.003)
    cost = _fit(GOOD, times)
    assert _fit(GOOD, times) == cost  # deterministic
    assert _fit(GOOD, times, candidates=np.zeros_like(GOOD)) == cost
    assert _fit(GOOD, times, candidates=np.minimum(GOOD, 1)) == cost  # p = t^2
    assert _fit(GOOD, times, candidates=GOOD // 4) != cost


def test_times_of_steps_with_candidates_give_the_coefficients_back() -> None:
    rng = np.random.default_rng(0)
    steps, tokens, candidates, times = [], [], [], []
    for _ in range(100):
        # Of 16 samples, of which most have candidates; the candidates have no actions.
        events, num_candidates, tags = (rng.integers(0, high, 16) for high in (400, 300, 9))
        lengths = {"item_id": events + num_candidates, "action": events, "tags": tags}
        steps.append((lengths, num_candidates))
        tokens.append(EXISTING.tokens(lengths))
        candidates.append(EXISTING.candidate_tokens(lengths, num_candidates))
        history = 2 * events + tags
        pairs = history**2 + num_candidates * (2 * history + 1)
        times.append(A + B * (history + num_candidates).sum() + C * pairs.sum())
    cost = MeasuredCost.fit(tokens, times, candidates=candidates, **KEYS)
    assert _seconds(cost) == pytest.approx((B, C, A), rel=1e-6)
    # What was fitted is what a Balancer is told of the same steps.
    told = [cost.seconds_per_step + np.ldexp(float(cost(*step).sum()), -cost.fraction_bits) for step in steps]
    assert told == pytest.approx(times, rel=1e-6)


@pytest.mark.parametrize("are_longest", [False, True])
def test_noise_and_far_outliers_do_not_bias_the_fit(are_longest: bool) -> None:
    steps = _steps(2000)
    times = _times(steps, noise=0.003)
    times[np.argsort(times)[-40:] if are_longest else slice(0, None, 20)] *= 10  # a checkpoint was written
    cost = _fit(steps, times)
    assert _seconds(cost) == pytest.approx((B, C, A), rel=0.02)
    assert 0.99 < cost.r2 < 1


def test_steps_can_have_different_numbers_of_samples() -> None:
    steps = [row[: 1 + index % 16] for index, row in enumerate(GOOD)]
    times = [A + B * step.sum() + C * (step.astype(float) ** 2).sum() for step in steps]
    cost = _fit([*steps, np.empty(0, dtype=np.int64)], [*times, A])  # and an empty rank
    assert _seconds(cost) == pytest.approx((B, C, A), rel=1e-6)
    assert cost.steps == 201


def test_coefficients_are_never_negative() -> None:
    cost = _fit(GOOD, _times(GOOD, b=1e-6, c=-1e-11))
    assert cost.quadratic == 0
    assert cost.linear > 0
    cost = _fit(GOOD, _times(GOOD, b=-1e-8, c=C))
    assert cost.linear == 0
    assert _seconds(cost)[1] == pytest.approx(C, rel=0.1)
    assert _seconds(_fit(GOOD, _times(GOOD, c=0)))[:2] == pytest.approx((B, 0), rel=1e-5, abs=1e-6 * B)
    cost = _fit(GOOD, _times(GOOD, a=-1e-5))
    assert cost.seconds_per_step == 0
    assert _seconds(cost)[:2] == pytest.approx((B, C), rel=0.02)


@settings(max_examples=100)
@given(
    b=st.floats(1e-9, 1e-4),
    c=st.floats(1e-14, 1e-8),
    tokens=st.lists(st.integers(1, 131_072), min_size=1, max_size=20).map(np.array),
)
def test_costs_are_proportional_for_every_model(b: float, c: float, tokens: Ints) -> None:
    # Steps of one sample each, so that sums have no rounding error.
    steps = np.arange(1, 41)[:, np.newaxis] * 3000
    cost = _fit(steps, _times(steps, b=b, c=c))
    fitted_b, fitted_c, _ = _seconds(cost)
    seconds = fitted_b * tokens + fitted_c * tokens.astype(np.float64) ** 2
    costs = cost.of_tokens(tokens, 0 * tokens).astype(np.float64)
    assert np.ldexp(costs, -cost.fraction_bits) == pytest.approx(seconds, rel=1e-9)
    assert seconds == pytest.approx(b * tokens + c * tokens.astype(np.float64) ** 2, rel=1e-6)
    assert cost.of_tokens(np.array([131_071]), np.array([1])).tolist() == [cost.max_cost]
    assert 2**58 < cost.max_cost < 2**61


def test_the_longest_sample_that_fits_depends_on_max_tokens() -> None:
    lengths, none = {"item_id": np.array([2**20])}, np.zeros(1, dtype=np.int64)
    with pytest.raises(ConfigError, match=r"a sample of 1,048,576 tokens does not fit in int64; max_tokens is 131,072"):
        _fit(GOOD, _times(GOOD))(lengths, none)
    longer = _fit(GOOD, _times(GOOD), max_tokens=2**20)
    assert longer(lengths, none).tolist() == [longer.max_cost]


@pytest.mark.parametrize(
    ("lengths", "seconds", "message"),
    [
        (GOOD[:19], _times(GOOD[:19]), "19 times are too few to fit a cost; measure at least 20"),
        (GOOD, _times(GOOD)[:-1], r"one time for each step, got 200 steps and \(199,\) times"),
        (GOOD, np.where(NUMBERS == 3, -1.0, _times(GOOD)), "1 of 200 are not, the first -1.0 seconds of step 3; time"),
        (GOOD, np.where(NUMBERS > 7, np.inf, _times(GOOD)), "192 of 200 are not, the first inf seconds of step 8"),
        (np.full((200, 4), 100), 1 + NUMBERS / 200, "too similar: their tokens vary by 0.0%, at least 2% is"),
        (PACKED, _times(PACKED), r"vary by 0.0%, .*neither balanced \(strategy=\"none\"\) nor packed"),
        (SIMILAR, _times(SIMILAR), "too similar: tokens explain all but 0.00% of their attended pairs, at least"),
        (GOOD * 1.0, _times(GOOD), r"lengths must be integers \[samples\] for each step; step 0 has float64 of sh"),
        (GOOD.sum(axis=1), _times(GOOD), r"step 0 has int64 of shape \(\)"),
        (GOOD - 10_000, _times(GOOD), r"step 0 has a sample of -9,\d+ tokens, which must be between 0 and 131,072"),
        (GOOD + 131_072, _times(GOOD), r"step 0 has a sample of 13\d,\d+ tokens, which must be between 0 and 131,072"),
        (GOOD, np.random.default_rng(0).uniform(1, 2, 200), "200 times, at least 80% is needed; time the forward"),
        (GOOD, 1 - _times(GOOD), "time of the 200 steps does not grow with tokens; time the forward"),
        (GOOD, _times(GOOD) * np.where(NUMBERS % 10 < 3, 10, 1), "60 of 200 times are far .*, at most 25% may be;"),
    ],
)
def test_a_poor_fit_is_refused_with_the_reason(lengths: Ints, seconds: NDArray[np.float64], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _fit(lengths, seconds)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (GOOD[:-1], "candidates must have an array for each step, got 199 for the 200 steps of lengths"),
        (GOOD[:, :-1], r"same shape as lengths, \(16,\) in step 0; it has int64 of shape \(15,\)"),
        (GOOD * 0.5, r"must be integers of the same shape as lengths, .* in step 0; it has float64 of shape \(16,\)"),
        (GOOD + (NUMBERS == 7)[:, np.newaxis], r"step 7 has a sample of (\d+) tokens, .* correct candidates, or"),
        (np.where(NUMBERS[:, np.newaxis] == 7, -1, GOOD), r"step 7 has a sample of \d+ tokens, -1 of them"),
    ],
)
def test_candidates_that_are_not_among_the_tokens_are_refused(candidates: Ints, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _fit(GOOD, _times(GOOD), candidates=candidates)


@settings(max_examples=100)
@given(
    cost=st.builds(
        partial(MeasuredCost, steps=30, r2=0.9, interleave_actions=True, max_tokens=5),
        linear=st.integers(1, 2**50),
        quadratic=st.integers(0, 2**40),
        fraction_bits=st.integers(0, 100),
        seconds_per_step=st.floats(0, 10),
        contextual=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    )
)
def test_a_saved_cost_is_loaded_as_it_was(tmp_path_factory: pytest.TempPathFactory, cost: MeasuredCost) -> None:
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    cost.save(path)
    loaded = MeasuredCost.load(path)
    assert loaded == cost
    described = describe_cost(cost)
    assert repr(loaded) == repr(cost) == described == describe_cost(loaded)
    coefficients = f"linear={cost.linear}, quadratic={cost.quadratic}, fraction_bits={cost.fraction_bits},"
    assert coefficients in described


def _saved(tmp_path: Path) -> Path:
    path = tmp_path / "cost.json"
    EXISTING.save(path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fraction_bits": ...}, "cost.json: the cost: missing a required argument: 'fraction_bits'; its settings"),
        ({"linear": -1}, "cost.json: the cost: linear must be at least 0, got -1; fit the cost again"),
        ({"linear": 1.5}, "cost.json: the cost: linear must be of type int, got 1.5; fit the cost again"),
        ({"linear": 0, "quadratic": 0}, "linear and quadratic must not both be 0"),
        ({"linear": 2**46}, r"linear 70368744177664 and .* of max_tokens, 131,072, must cost less than 2\^62; fit"),
        ({"seconds_per_step": float("nan")}, "seconds_per_step must be at least 0 and finite, got nan"),
        ({"r2": 1.5}, "r2 must be at least 0 and at most 1, got 1.5"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"contextual": ["sex", 1]}, r"contextual must be of type tuple\[str, \.\.\.\], got \['sex', 1\]"),
        ({"contextual": "sex"}, r"contextual must be of type tuple\[str, \.\.\.\], got 'sex'"),
        ({"interleave_actions": 1}, "interleave_actions must be of type bool, got 1"),
        ({"version": 2}, "has version 2, this evenrank reads 1"),
        ({"format": "other"}, "is not a measured cost"),
    ],
)
def test_a_file_with_an_invalid_field_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = _saved(tmp_path)
    values = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    with pytest.raises(DataError, match=message):
        MeasuredCost.load(path)


def test_a_file_of_a_cost_that_was_fitted_to_squared_tokens_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(
        '{"format": "evenrank measured cost", "version": 1, "interleave_actions": true, "contextual": ["tags"], '
        '"history_key": "item_id", "max_tokens": 131072, "linear": 700, "quadratic": 11, "fraction_bits": 40, '
        '"seconds_per_step": 0.004, "steps": 200, "r2": 0.97}'
    )
    cost = MeasuredCost.load(path)
    assert cost == EXISTING
    lengths = {"item_id": np.array([5, 5]), "action": np.array([5, 3]), "tags": np.array([1, 1])}
    assert cost(lengths, np.array([0, 2])).tolist() == [700 * 11 + 11 * 11**2, 700 * 9 + 11 * (7**2 + 2 * 15)]


def test_a_file_that_cannot_be_read_or_written_is_named_and_an_old_one_kept(tmp_path: Path) -> None:
    before = _saved(tmp_path).read_bytes()
    with pytest.raises(DataError, match=r"none/cost.json could not be written: No such file or directory"):
        EXISTING.save(tmp_path / "none" / "cost.json")
    with pytest.raises(DataError, match="could not be written"):
        EXISTING.save(tmp_path)  # a folder
    assert (tmp_path / "cost.json").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["cost.json"]
    (tmp_path / "text.json").write_text("seconds")
    for name, reason in (("none", "No such file"), ("text", "Expecting value")):
        with pytest.raises(DataError, match=f"{name}.json cannot be read as a measured cost: .*{reason}"):
            MeasuredCost.load(tmp_path / f"{name}.json")


def test_sums_of_steps_are_fitted_as_their_samples_are() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, (30, 8))
    tokens, squares = lengths.sum(axis=1).astype(np.float64), (lengths.astype(np.float64) ** 2).sum(axis=1)
    seconds = 0.01 + 1e-5 * tokens + 1e-8 * squares
    counted: dict[str, Any] = {"interleave_actions": False, "max_tokens": 1000}
    of_sums = MeasuredCost.fit_sums(tokens, squares, seconds, **counted)
    assert of_sums == MeasuredCost.fit(lengths, seconds, **counted)
    assert of_sums.linear * of_sums.seconds_per_unit == pytest.approx(1e-5)
    with pytest.raises(ConfigError, match="there must be one time for each step, got 30 steps and"):
        MeasuredCost.fit_sums(tokens, squares, seconds[1:], **counted)
