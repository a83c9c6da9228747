import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance import MeasuredCost
from evenrank.dataloader.balance.agreement import describe_cost
from evenrank.datasets.distributions import Lognormal
from evenrank.datasets.errors import ConfigError, DataError

A, B, C = 0.004, 3e-7, 2e-10  # seconds of a step, of a token, of a pair of tokens


def _steps(count: int = 200, seed: int = 0, batch_size: int = 16) -> np.ndarray:
    lengths = Lognormal(mean=512, std=512).sample(np.random.default_rng(seed), count * batch_size)
    return lengths.reshape(count, batch_size)


def _times(steps: np.ndarray, a: float = A, b: float = B, c: float = C, noise: float = 0.0) -> np.ndarray:
    tokens = steps.astype(np.float64)
    exact = a + b * tokens.sum(axis=1) + c * (tokens**2).sum(axis=1)
    return exact * (1 + noise * np.random.default_rng(1).standard_normal(len(steps)))


def _seconds(cost: MeasuredCost) -> tuple[float, float]:
    return float(np.ldexp(cost.linear, -cost.fraction_bits)), float(np.ldexp(cost.quadratic, -cost.fraction_bits))


def test_exact_times_give_the_coefficients_back() -> None:
    steps = _steps()
    cost = MeasuredCost.fit(steps, _times(steps))
    assert _seconds(cost) == pytest.approx((B, C), rel=1e-6)
    assert cost.seconds_per_step == pytest.approx(A, rel=1e-6)
    assert cost.steps == 200
    assert cost.r2 == pytest.approx(1.0)


def test_noise_and_far_outliers_do_not_bend_the_fit() -> None:
    steps = _steps(400)
    times = _times(steps, noise=0.01)
    times[::20] *= 10  # a checkpoint was written
    cost = MeasuredCost.fit(steps, times)
    tokens = np.array([64, 512, 4096])
    expected = B * tokens + C * tokens**2
    assert np.ldexp(cost.of_tokens(tokens).astype(np.float64), -cost.fraction_bits) == pytest.approx(expected, rel=0.05)


def test_steps_may_have_different_numbers_of_samples() -> None:
    steps = [row[: 1 + index % 16] for index, row in enumerate(_steps())]
    times = [A + B * step.sum() + C * (step.astype(float) ** 2).sum() for step in steps]
    assert _seconds(MeasuredCost.fit(steps, times)) == pytest.approx((B, C), rel=1e-6)


@pytest.mark.parametrize(("b", "c"), [(B, 0.0), (0.0, C)])
def test_a_model_without_one_of_the_terms_gets_nothing_for_it(b: float, c: float) -> None:
    steps = _steps()
    found = _seconds(MeasuredCost.fit(steps, _times(steps, b=b, c=c)))
    assert found == pytest.approx((b, c), rel=1e-5, abs=1e-6 * (b or c))


def test_coefficients_are_never_negative() -> None:
    steps = _steps()
    cost = MeasuredCost.fit(steps, _times(steps, b=1e-6, c=-1e-11))
    assert cost.quadratic == 0
    assert cost.linear > 0


def test_costs_are_whole_numbers_in_proportion_and_leave_room_for_adding_up() -> None:
    steps = _steps()
    cost = MeasuredCost.fit(steps, _times(steps), interleave_actions=True)
    lengths = {"item_id": np.array([1, 40, 65_536]), "action": np.array([0, 40, 65_536])}
    costs = cost(lengths, np.zeros(3, dtype=np.int64))
    assert costs.dtype == np.int64
    tokens = np.array([1, 80, 131_072])
    assert costs / costs[-1] == pytest.approx((B * tokens + C * tokens**2) / (B * 2**17 + C * 2**34), rel=1e-6)
    assert 2**58 < cost.max_cost <= 2**60
    assert cost.max_cost == costs[-1]


GOOD = _steps()


@pytest.mark.parametrize(
    ("lengths", "seconds", "message"),
    [
        (GOOD[:19], _times(GOOD[:19]), "19 steps are too few to fit a cost to; time at least 20"),
        (GOOD, _times(GOOD)[:-1], r"one time for each step, got 200 steps and \(199,\) times"),
        (GOOD, np.where(np.arange(200) == 3, -1.0, _times(GOOD)), "times must be positive and finite, got -1.0"),
        (GOOD, np.where(np.arange(200) == 3, np.nan, _times(GOOD)), "times must be positive and finite, got nan"),
        (np.full((200, 4), 100), np.linspace(1, 2, 200), r"too much alike: their tokens vary by 0.0%; time steps that"),
        (GOOD, np.random.default_rng(0).uniform(1, 2, 200), "tokens, at least 80% are needed; time forward"),
        (GOOD, 1 - _times(GOOD), "the 200 steps does not grow with tokens, at least 80% are needed"),
    ],
)
def test_a_poor_fit_is_refused_with_the_reason(lengths: np.ndarray, seconds: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MeasuredCost.fit(lengths, seconds)


@settings(max_examples=100)
@given(
    linear=st.integers(0, 2**50),
    quadratic=st.integers(0, 2**40),
    bits=st.integers(-10, 100),
    seconds=st.floats(0, 10),
    contextual=st.lists(st.text(max_size=5), max_size=3).map(tuple),
)
def test_what_is_saved_is_loaded_and_ranks_see_that_it_is_the_same(
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
        contextual=contextual,
        max_tokens=5,
    )
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    cost.save(path)
    loaded = MeasuredCost.load(path)
    assert loaded == cost
    assert describe_cost(loaded) == describe_cost(cost)


def _saved(tmp_path: Path) -> Path:
    path = tmp_path / "cost.json"
    MeasuredCost.fit(GOOD, _times(GOOD)).save(path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear": -1}, "linear is -1; fit the cost again"),
        ({"linear": 1.5}, r"linear is 1.5; fit"),
        ({"quadratic": None}, "quadratic is None"),
        ({"contextual": "sex"}, "contextual is 'sex'"),
        ({"interleave_actions": 1}, "interleave_actions is 1"),
        ({"version": 2}, "has version 2, this evenrank reads 1"),
        ({"format": "other"}, "is not a measured cost"),
    ],
)
def test_a_file_that_was_meddled_with_is_refused_by_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = _saved(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=message):
        MeasuredCost.load(path)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.json could not be read as a measured cost: .*No such file"):
        MeasuredCost.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("seconds")
    with pytest.raises(DataError, match=r"text.json could not be read as a measured cost: Expecting value"):
        MeasuredCost.load(tmp_path / "text.json")


def test_a_file_that_cannot_be_written_leaves_nothing_and_the_old_one_whole(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"none/cost.json could not be written: No such file or directory"):
        MeasuredCost.load(path).save(tmp_path / "none" / "cost.json")
    with pytest.raises(DataError, match="could not be written"):
        MeasuredCost.load(path).save(tmp_path)  # a folder
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["cost.json"]
