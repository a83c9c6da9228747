import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.balance import MeasuredCost
from evenrank.dataloader.balance.cost import describe_cost
from evenrank.datasets.distributions import Lognormal
from tests.dataloader.balance.costs import Ints, count_pairs, write_tokens

A, B, C = 0.004, 3e-7, 2e-10  # seconds of a step, of a token, of half a pair of tokens


def _steps(count: int = 200, seed: int = 0, batch_size: int = 16) -> Ints:
    lengths = Lognormal(mean=512, std=512).sample(np.random.default_rng(seed), count * batch_size)
    return lengths.reshape(count, batch_size)


def _times(steps: NDArray[Any], a: float = A, b: float = B, c: float = C, noise: float = 0.0) -> NDArray[np.float64]:
    tokens = steps.astype(np.float64)
    exact = a + b * tokens.sum(axis=1) + c * (tokens**2).sum(axis=1)
    times: NDArray[np.float64] = exact * (1 + noise * np.random.default_rng(1).standard_normal(len(steps)))
    return times


EXISTING = MeasuredCost(
    linear=700,
    quadratic=11,
    fraction_bits=40,
    seconds_per_step=A,
    steps=200,
    r2=0.97,
    interleave_actions=True,
    contextual=("tags",),
)


def _seconds(cost: MeasuredCost) -> tuple[float, float]:
    return float(np.ldexp(cost.linear, -cost.fraction_bits)), float(np.ldexp(cost.quadratic, -cost.fraction_bits))


def test_exact_times_give_the_coefficients_back() -> None:
    steps = _steps()
    cost = MeasuredCost.fit(steps, _times(steps), interleave_actions=False)
    assert _seconds(cost) == pytest.approx((B, C), rel=1e-6)
    assert cost.seconds_per_step == pytest.approx(A, rel=1e-6)
    assert cost.steps == 200
    assert cost.r2 == pytest.approx(1.0)
    assert MeasuredCost.fit(steps, _times(steps), interleave_actions=False) == cost  # deterministic


@settings(max_examples=200)
@given(data=st.data(), interleave=st.booleans(), candidate_actions=st.booleans())
def test_a_sample_costs_its_tokens_and_twice_its_causal_pairs(
    data: st.DataObject, interleave: bool, candidate_actions: bool
) -> None:
    events, contextual = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
    num_candidates = data.draw(st.integers(0, events))
    tokens = write_tokens(
        events, num_candidates, contextual, interleave=interleave, candidate_actions=candidate_actions
    )
    lengths = {
        "item_id": np.array([events]),
        "action": np.array([events - num_candidates * (not candidate_actions)]),
        "tags": np.array([contextual]),
    }
    cost = replace(EXISTING, interleave_actions=interleave, contextual=("tags",))
    seconds = 700 * len(tokens) + 11 * 2 * count_pairs(tokens, causal=True)
    assert cost(lengths, np.array([num_candidates])).tolist() == [seconds]


def _step_with_candidates(seed: int) -> tuple[dict[str, Ints], Ints]:
    """Draw the lengths of 16 samples, of which most have candidates, and how many: the last have no actions."""
    rng = np.random.default_rng(seed)
    events, num_candidates = rng.integers(0, 400, 16), rng.integers(0, 300, 16)
    lengths = {"item_id": events + num_candidates, "action": events, "tags": rng.integers(0, 9, 16)}
    return lengths, num_candidates


def test_times_of_steps_with_candidates_give_the_coefficients_back() -> None:
    steps = [_step_with_candidates(seed) for seed in range(100)]
    histories = [2 * lengths["action"] + lengths["tags"] for lengths, _ in steps]
    candidates = [num_candidates for _, num_candidates in steps]
    times = [
        A + B * (history + count).sum() + C * (history**2 + count * (2 * history + 1)).sum()
        for history, count in zip(histories, candidates, strict=True)
    ]
    keys: Any = {"interleave_actions": True, "contextual": ("tags",)}
    counted = [(EXISTING.tokens(lengths), EXISTING.candidate_tokens(lengths, count)) for lengths, count in steps]
    cost = MeasuredCost.fit([pair[0] for pair in counted], times, candidates=[pair[1] for pair in counted], **keys)
    assert (*_seconds(cost), cost.seconds_per_step) == pytest.approx((B, C, A), rel=1e-6)
    # What was fitted is what a Balancer is told of the same steps.
    told = [cost.seconds_per_step + np.ldexp(float(cost(*step).sum()), -cost.fraction_bits) for step in steps]
    assert told == pytest.approx(times, rel=1e-6)


def test_steps_without_candidates_are_fitted_as_ever() -> None:
    steps = _steps()
    times = _times(steps, noise=0.003)
    cost = MeasuredCost.fit(steps, times, interleave_actions=False)
    assert MeasuredCost.fit(steps, times, candidates=np.zeros_like(steps), interleave_actions=False) == cost
    assert MeasuredCost.fit(steps, times, candidates=np.minimum(steps, 1), interleave_actions=False) == cost  # p = t^2
    assert MeasuredCost.fit(steps, times, candidates=steps // 4, interleave_actions=False) != cost


@pytest.mark.parametrize("are_longest", [False, True])
def test_noise_and_far_outliers_do_not_bias_the_fit(are_longest: bool) -> None:
    steps = _steps(2000)
    times = _times(steps, noise=0.003)
    times[np.argsort(times)[-40:] if are_longest else slice(0, None, 20)] *= 10  # a checkpoint was written
    cost = MeasuredCost.fit(steps, times, interleave_actions=False)
    assert (*_seconds(cost), cost.seconds_per_step) == pytest.approx((B, C, A), rel=0.02)
    assert 0.99 < cost.r2 < 1


def test_steps_can_have_different_numbers_of_samples() -> None:
    steps = [row[: 1 + index % 16] for index, row in enumerate(_steps())]
    times = [A + B * step.sum() + C * (step.astype(float) ** 2).sum() for step in steps]
    assert _seconds(MeasuredCost.fit(steps, times, interleave_actions=False)) == pytest.approx((B, C), rel=1e-6)
    assert (
        MeasuredCost.fit([*steps, np.empty(0, dtype=np.int64)], [*times, A], interleave_actions=False).steps == 201
    )  # an empty rank


def test_coefficients_are_never_negative() -> None:
    steps = _steps()
    cost = MeasuredCost.fit(steps, _times(steps, b=1e-6, c=-1e-11), interleave_actions=False)
    assert cost.quadratic == 0
    assert cost.linear > 0
    cost = MeasuredCost.fit(steps, _times(steps, b=-1e-8, c=C), interleave_actions=False)
    assert cost.linear == 0
    assert _seconds(cost)[1] == pytest.approx(C, rel=0.1)
    assert _seconds(MeasuredCost.fit(steps, _times(steps, c=0), interleave_actions=False)) == pytest.approx(
        (B, 0), rel=1e-5, abs=1e-6 * B
    )
    cost = MeasuredCost.fit(steps, _times(steps, a=-1e-5), interleave_actions=False)
    assert cost.seconds_per_step == 0
    assert _seconds(cost) == pytest.approx((B, C), rel=0.02)


@settings(max_examples=100)
@given(
    b=st.floats(1e-9, 1e-4),
    c=st.floats(1e-14, 1e-8),
    tokens=st.lists(st.integers(1, 131_072), min_size=1, max_size=20),
)
def test_costs_are_proportional_for_every_model(b: float, c: float, tokens: list[int]) -> None:
    # Steps of one sample each, so that sums have no rounding error.
    steps = np.arange(1, 41)[:, np.newaxis] * 3000
    cost = MeasuredCost.fit(steps, _times(steps, b=b, c=c), interleave_actions=False)
    counts = np.array(tokens)
    fitted_b, fitted_c = _seconds(cost)
    seconds = fitted_b * counts + fitted_c * counts.astype(np.float64) ** 2
    assert np.ldexp(cost.of_tokens(counts, 0 * counts).astype(np.float64), -cost.fraction_bits) == pytest.approx(
        seconds, rel=1e-9
    )
    assert seconds == pytest.approx(b * counts + c * counts.astype(np.float64) ** 2, rel=1e-6)
    assert cost.of_tokens(np.array([131_071]), np.array([1])).tolist() == [cost.max_cost]
    assert 2**58 < cost.max_cost < 2**61


def test_a_sample_whose_cost_would_wrap_around_is_refused() -> None:
    steps = _steps()
    cost = MeasuredCost.fit(steps, _times(steps), interleave_actions=False)
    with pytest.raises(ConfigError, match=r"a sample of 1,048,576 tokens does not fit in int64; max_tokens is 131,072"):
        cost({"item_id": np.array([1, 2**20])}, np.zeros(2, dtype=np.int64))
    longer = MeasuredCost.fit(steps, _times(steps), max_tokens=2**20, interleave_actions=False)
    assert longer({"item_id": np.array([2**20])}, np.zeros(1, dtype=np.int64)).tolist() == [longer.max_cost]


GOOD = _steps()
PACKED = np.concatenate([GOOD[:, :8] % 1000, 1000 - GOOD[:, :8] % 1000], axis=1)  # 8,000 tokens each
SIMILAR = np.where(np.arange(16) < np.arange(200)[:, np.newaxis] % 16 + 1, 64, 0)  # 1..16 samples of 64 tokens


@pytest.mark.parametrize(
    ("lengths", "seconds", "message"),
    [
        (GOOD[:19], _times(GOOD[:19]), "19 steps are too few to fit a cost; time at least 20"),
        (GOOD, _times(GOOD)[:-1], r"one time for each step, got 200 steps and \(199,\) times"),
        (
            GOOD,
            np.where(np.arange(200) == 3, -1.0, _times(GOOD)),
            "1 of 200 are not, the first -1.0 seconds of step 3; time",
        ),
        (
            GOOD,
            np.where(np.arange(200) > 7, np.inf, _times(GOOD)),
            "192 of 200 are not, the first inf seconds of step 8",
        ),
        (np.full((200, 4), 100), np.linspace(1, 2, 200), "too similar: their tokens vary by 0.0%, at least 2% is"),
        (PACKED, _times(PACKED), r"vary by 0.0%, .*neither balanced \(strategy=\"none\"\) nor packed"),
        (
            SIMILAR,
            _times(SIMILAR),
            "lengths are too similar: tokens explain all but 0.00% of their attended pairs, at least",
        ),
        (
            GOOD * 1.0,
            _times(GOOD),
            r"lengths must be integers \[samples\] for each step; step 0 has float64 of shape \(16,",
        ),
        (GOOD.sum(axis=1), _times(GOOD), r"step 0 has int64 of shape \(\)"),
        (
            GOOD - 10_000,
            _times(GOOD),
            r"step 0 has a sample of -9,\d+ tokens, which must be between 0 and 131,072",
        ),
        (
            GOOD + 131_072,
            _times(GOOD),
            r"step 0 has a sample of 13\d,\d+ tokens, which must be between 0 and 131,072",
        ),
        (GOOD, np.random.default_rng(0).uniform(1, 2, 200), "200 times, at least 80% is needed; time the forward"),
        (GOOD, 1 - _times(GOOD), "time of the 200 steps does not grow with tokens; time the forward"),
        (
            GOOD,
            _times(GOOD) * np.where(np.arange(200) % 10 < 3, 10, 1),
            "60 of 200 times are far from the fit to the tokens of their steps, at most 25% may be; time the",
        ),
    ],
)
def test_a_poor_fit_is_refused_with_the_reason(lengths: Ints, seconds: NDArray[np.float64], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MeasuredCost.fit(lengths, seconds, interleave_actions=False)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (GOOD[:-1], "candidates must have an array for each step, got 199 for the 200 steps of lengths"),
        (GOOD[:, :-1], r"same shape as lengths, \(16,\) in step 0; it has int64 of shape \(15,\)"),
        (GOOD * 0.5, r"must be integers of the same shape as lengths, .* in step 0; it has float64 of shape \(16,\)"),
        (
            GOOD + (np.arange(200) == 7)[:, np.newaxis],
            r"step 7 has a sample of (\d+) tokens, .* correct candidates, or",
        ),
        (np.where(np.arange(200)[:, np.newaxis] == 7, -1, GOOD), r"step 7 has a sample of \d+ tokens, -1 of them"),
    ],
)
def test_candidates_that_are_not_among_the_tokens_are_refused(candidates: Ints, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MeasuredCost.fit(GOOD, _times(GOOD), candidates=candidates, interleave_actions=False)


@settings(max_examples=100)
@given(
    linear=st.integers(1, 2**50),
    quadratic=st.integers(0, 2**40),
    bits=st.integers(0, 100),
    seconds=st.floats(0, 10),
    contextual=st.lists(st.text(max_size=5), max_size=3).map(tuple),
)
def test_a_saved_cost_is_loaded_equal_and_described_equally(
    tmp_path_factory: pytest.TempPathFactory,
    linear: int,
    quadratic: int,
    bits: int,
    seconds: float,
    contextual: tuple[str, ...],
) -> None:
    cost = MeasuredCost(
        linear=linear,
        quadratic=quadratic,
        fraction_bits=bits,
        seconds_per_step=seconds,
        steps=30,
        r2=0.9,
        interleave_actions=True,
        contextual=contextual,
        max_tokens=5,
    )
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    cost.save(path)
    loaded = MeasuredCost.load(path)
    assert loaded == cost
    assert repr(loaded) == repr(cost)
    assert describe_cost(loaded) == describe_cost(cost)
    assert f"linear={linear}, quadratic={quadratic}, fraction_bits={bits}," in describe_cost(cost)


def _saved(tmp_path: Path) -> Path:
    path = tmp_path / "cost.json"
    MeasuredCost.fit(GOOD, _times(GOOD), interleave_actions=False).save(path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fraction_bits": ...}, "cost.json lacks fraction_bits; fit the cost again"),
        ({"linear": -1}, "cost.json: linear must be finite and not negative, got -1; fit the cost again"),
        ({"linear": 1.5}, r"cost.json: linear has the wrong type, 1.5; fit the cost again"),
        ({"linear": True}, "linear has the wrong type, True"),
        ({"linear": 0, "quadratic": 0}, "linear and quadratic must not both be 0"),
        ({"linear": 2**46}, r"linear 70368744177664 and .* of max_tokens, 131,072, must cost less than 2\^62; fit"),
        ({"fraction_bits": -3}, "fraction_bits must be finite and not negative, got -3"),
        ({"seconds_per_step": -0.5}, "seconds_per_step must be finite and not negative, got -0.5"),
        ({"seconds_per_step": float("nan")}, "seconds_per_step must be finite and not negative, got nan"),
        ({"r2": 1.5}, "r2 must be between 0 and 1, got 1.5"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"contextual": ["sex", 1]}, r"contextual has the wrong type, \['sex', 1\]"),
        ({"quadratic": None}, "quadratic has the wrong type, None"),
        ({"contextual": "sex"}, "contextual has the wrong type, 'sex'"),
        ({"interleave_actions": 1}, "interleave_actions has the wrong type, 1"),
        ({"version": 2}, "has version 2, this evenrank reads 1"),
        ({"version": None}, "has version None, this evenrank reads 1"),
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


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("seconds")
    for name, reason in (("none", "No such file"), ("text", "Expecting value")):
        with pytest.raises(DataError, match=f"{name}.json cannot be read as a measured cost: .*{reason}"):
            MeasuredCost.load(tmp_path / f"{name}.json")


def test_a_file_that_cannot_be_written_leaves_nothing_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"none/cost.json could not be written: No such file or directory"):
        MeasuredCost.load(path).save(tmp_path / "none" / "cost.json")
    with pytest.raises(DataError, match="could not be written"):
        MeasuredCost.load(path).save(tmp_path)  # a folder
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["cost.json"]
