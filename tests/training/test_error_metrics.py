import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from evenrank.core.errors import ConfigError, RankError
from evenrank.training import ClassificationMetrics, RegressionMetrics
from tests.ranks import RankPool

Floats = NDArray[np.float64]
LOGITS = st.one_of(st.sampled_from([-math.inf, -800.0, -0.0, 0.0, 1e-30, 40.0, math.inf]), st.floats(-50, 50, width=32))
WEIGHTS = st.one_of(st.integers(0, 3).map(float), st.floats(0.125, 100, width=32))
SAMPLES = st.lists(st.tuples(LOGITS, st.integers(-1, 2), WEIGHTS), max_size=40)


def _average(terms: Floats, weights: Floats) -> float:
    return float(np.sum(terms * weights) / np.sum(weights)) if weights.any() else math.nan


def _classification(logits: Floats, targets: Floats, weights: Floats) -> dict[str, float]:
    """Return the metrics of one task by their definitions: float64 [n] each."""
    is_positive = targets > 0
    base_rate = _average(is_positive.astype(float), weights)
    log_loss = _average(np.logaddexp(0, np.where(is_positive, -logits, logits)), weights)
    log_loss_of_base_rate = math.nan
    if 0 < base_rate < 1:
        log_loss_of_base_rate = _average(-np.log(np.where(is_positive, base_rate, 1 - base_rate)), weights)
    return {
        "accuracy": _average(((logits > 0) == is_positive).astype(float), weights),
        "log_loss": log_loss,
        "base_rate": base_rate,
        "normalized_entropy": log_loss / log_loss_of_base_rate,
    }


def _columns(samples: list[tuple[Any, ...]]) -> tuple[Floats, Floats, Floats]:
    values = np.array(samples, dtype=np.float64).reshape(-1, 3)
    return values[:, 0], values[:, 1], values[:, 2]


@given(samples=SAMPLES, cut=st.integers(0, 40), is_weighted=st.booleans())
def test_classification_metrics_equal_their_definitions(
    samples: list[tuple[Any, ...]], cut: int, is_weighted: bool
) -> None:
    logits, targets, weights = _columns(samples)
    if not is_weighted:
        weights = np.ones_like(weights)
    metric = ClassificationMetrics()
    for part in (slice(cut), slice(cut, None)):  # one of them without samples, perhaps
        given_weights = torch.tensor(weights[part]) if is_weighted else None
        scores = torch.tensor(logits[part, None], dtype=torch.float32, requires_grad=True)
        metric.update(scores, torch.tensor(targets[part, None], dtype=torch.int64), given_weights)
    with np.errstate(invalid="ignore"):  # infinity times a weight of 0
        expected = _classification(logits, targets, weights)
    assert metric.compute() == pytest.approx(expected, rel=1e-12, abs=1e-300, nan_ok=True)
    assert str(metric.compute()) == str(metric.compute())


@given(samples=st.lists(st.tuples(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30), WEIGHTS), max_size=40))
def test_regression_metrics_equal_their_definitions(samples: list[tuple[Any, ...]]) -> None:
    predictions, targets, weights = _columns(samples)
    metric = RegressionMetrics()
    metric.update(torch.tensor(predictions)[:, None], torch.tensor(targets)[:, None], torch.tensor(weights))
    errors = predictions - targets
    expected = {"mse": _average(errors**2, weights), "mae": _average(np.abs(errors), weights)}
    assert metric.compute() == pytest.approx(expected, rel=1e-12, abs=1e-300, nan_ok=True)


def test_tasks_have_metrics_each_that_are_nan_with_a_nan_score_or_without_samples() -> None:
    metric = ClassificationMetrics(3)
    assert all(math.isnan(value) for value in metric.compute().values())
    logits = torch.tensor([[2.0, math.nan, 0.0], [-1.0, 1.0, 0.0]], dtype=torch.bfloat16)
    metric.update(logits, torch.tensor([[True, True, True], [True, False, True]]))
    metrics = metric.compute()
    assert [metrics[f"accuracy_{task}"] for task in range(3)] == pytest.approx([0.5, math.nan, 0.0], nan_ok=True)
    log_loss = (math.log1p(math.exp(-2)) + math.log1p(math.exp(1))) / 2
    assert [metrics[f"log_loss_{task}"] for task in range(3)] == pytest.approx(
        [log_loss, math.nan, math.log(2)], nan_ok=True
    )
    assert [metrics[f"base_rate_{task}"] for task in range(3)] == [1.0, 0.5, 1.0]
    assert all(math.isnan(metrics[f"normalized_entropy_{task}"]) for task in range(3))  # of one class, NaN, one class
    metric.reset()
    assert all(math.isnan(value) for value in metric.compute().values())


def test_a_loss_has_the_same_bits_at_any_place_of_a_call() -> None:
    torch.manual_seed(0)
    for logit in torch.randn(300, 1, 1, dtype=torch.float64) * 5:
        once, often = ClassificationMetrics(), ClassificationMetrics()
        once.update(logit, torch.zeros(1, 1))
        often.update(logit.expand(69, 1), torch.zeros(69, 1))  # most of them in vectors of the CPU
        assert often.compute()["log_loss"] == once.compute()["log_loss"]  # the mean of equal numbers is that number


def test_predicting_the_base_rate_has_a_normalized_entropy_of_1() -> None:
    targets = torch.arange(20)[:, None] % 4 == 0
    metric = ClassificationMetrics()
    metric.update(torch.full((20, 1), math.log(0.25 / 0.75), dtype=torch.float64), targets)
    assert metric.compute()["normalized_entropy"] == pytest.approx(1, rel=1e-15)


Part = tuple[Tensor, Tensor, Tensor | None]  # scores, targets, weights


def _compute(rank: int, world_size: int, parts: list[Part]) -> list[dict[str, float]]:
    metrics = ClassificationMetrics(2), RegressionMetrics(2)
    scores, targets, weights = parts[rank]
    for metric in metrics:
        if len(scores):  # a rank without samples does not know of weights
            metric.update(scores, targets, weights)
    return [metric.compute() for metric in metrics]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_any_distribution_over_ranks_gives_equal_bits(ranks: RankPool, world_size: int, is_weighted: bool) -> None:
    torch.manual_seed(0)
    samples = torch.randn(701, 2) * 5, (torch.rand(701, 2) < 0.3).float(), torch.rand(701)

    def part(chosen: Tensor) -> Part:
        scores, targets, weights = (tensor[chosen] for tensor in samples)
        return scores, targets, weights if is_weighted else None

    expected = _compute(0, 1, [part(torch.arange(701))])
    owners = torch.randint(world_size, (701,))
    only_last = torch.full_like(owners, world_size - 1)  # all others have no samples
    for owner in (owners, only_last):
        order = torch.randperm(701)
        chosen = [order[owner == rank] for rank in range(world_size)]
        assert ranks.run(world_size, _compute, [part(of_rank) for of_rank in chosen]) == [expected] * world_size


def _compute_differently(rank: int, world_size: int) -> None:
    for metric, message in (
        (RegressionMetrics(rank + 1), "num_tasks differs between ranks: 1 on rank 0, 2 on rank 1"),
        (
            ClassificationMetrics() if rank else RegressionMetrics(),
            "metric differs between ranks: RegressionMetrics on",
        ),
    ):
        with pytest.raises(RankError, match=message):
            metric.compute()


def test_differences_between_ranks_are_errors_on_all_ranks(ranks: RankPool) -> None:
    ranks.run(2, _compute_differently)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_and_updates_without_synchronizing() -> None:
    torch.manual_seed(0)
    samples = torch.randn(500, 2), (torch.rand(500, 2) < 0.3).float(), torch.rand(500)
    on_gpu = [tensor.cuda() for tensor in samples]
    metrics = ClassificationMetrics(2, device="cuda"), RegressionMetrics(2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for metric in metrics:
            metric.update(*on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    classification, regression = _compute(0, 1, [samples])
    assert metrics[0].compute() == pytest.approx(classification, rel=1e-14)  # logarithms
    assert metrics[1].compute() == regression


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: ClassificationMetrics(0), "num_tasks must be at least 1, got 0"),
        (lambda: RegressionMetrics(2).update(torch.zeros(3), torch.zeros(3)), r"be \[n, 2\], got scores \[3\] and tar"),
        (lambda: RegressionMetrics().update(torch.zeros(3, 1), torch.zeros(3, 1), torch.ones(2)), r"be \[3\], one per"),
    ],
)
def test_wrong_arguments_are_refused(use: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        use()
