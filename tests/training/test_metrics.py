import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from evenrank.training import BinaryAUC, ClassificationMetrics, RankingMetrics, RegressionMetrics
from evenrank.training.metrics import MeanMetrics

KINDS = ("AUC", "GAUC", "ranking", "classification", "regression")
Samples = dict[str, Any]  # scores and targets [n, tasks]; groups, places and weights [n], or no weights
Values = dict[str, float]


def part_of(samples: Samples, chosen: Any) -> Samples:
    return {name: None if values is None else values[chosen] for name, values in samples.items()}


def metric_of(kind: str, num_tasks: int, **options: Any) -> Any:
    if kind == "ranking":
        return RankingMetrics((3, 1, 8), **options)
    make: Any = {"classification": ClassificationMetrics, "regression": RegressionMetrics}.get(kind, BinaryAUC)
    return make(num_tasks, **options)


def add(kind: str, metric: Any, samples: Samples) -> None:
    if kind == "ranking":
        metric.update(samples["places"], samples["weights"])
    else:
        groups = {"groups": samples["groups"]} if kind == "GAUC" else {}
        metric.update(samples["scores"], samples["targets"], samples["weights"], **groups)


def values_of(kind: str, metric: Any) -> Values:
    found = metric.compute_grouped() if kind == "GAUC" else metric.compute()
    return found if isinstance(found, dict) else {f"{kind}_{task}": value for task, value in enumerate(found)}


def _average(terms: Any, weights: Any) -> float:
    return float(np.sum(terms * weights) / np.sum(weights)) if weights.any() else math.nan


def _gauc(scores: Any, is_positive: Any, groups: Any, weights: Any) -> float:
    """Return the GAUC by its definition, over all pairs of each group."""
    of_groups, total_weights = [0.0], [0.0]
    for group in np.unique(groups):
        positives, negatives = (np.flatnonzero((groups == group) & (is_positive == of_class)) for of_class in (1, 0))
        above, below = scores[positives, None], scores[negatives]
        of_pairs = weights[positives, None] * weights[negatives]
        if of_pairs.sum() > 0:
            wins = (of_pairs * ((above > below) + (above == below) / 2)).sum() / of_pairs.sum()
            total_weights.append(weights[groups == group].sum())
            of_groups.append(total_weights[-1] * wins)
    return sum(of_groups) / sum(total_weights) if sum(total_weights) else math.nan


def _defined(kind: str, samples: Samples) -> Values:
    """Return the metrics of one task by their definitions."""
    scores, targets = (samples[name][:, 0].double().numpy() for name in ("scores", "targets"))
    weights, groups, places = (samples[name].double().numpy() for name in ("weights", "groups", "places"))
    positive = targets > 0
    if kind in ("AUC", "GAUC"):
        return {f"{kind}_0": _gauc(scores, positive, groups * (kind == "GAUC"), weights)}
    if kind == "regression":
        return {"mse": _average((scores - targets) ** 2, weights), "mae": _average(np.abs(scores - targets), weights)}
    if kind == "ranking":
        found = {}
        for k in (3, 1, 8):
            is_hit, of_hits = (places >= 1) & (places <= k), np.maximum(places, 1)
            for name, terms in (("recall", 1.0), ("ndcg", 1 / np.log2(of_hits + 1)), ("mrr", 1 / of_hits)):
                found[f"{name}@{k}"] = _average(is_hit * terms, weights)
        return found
    rate, of_rate = _average(positive.astype(float), weights), math.nan
    log_loss = _average(np.logaddexp(0, np.where(positive, -scores, scores)), weights)
    if 0 < rate < 1:
        of_rate = _average(-np.log(np.where(positive, rate, 1 - rate)), weights)
    accuracy = _average(((scores > 0) == positive).astype(float), weights)
    return {"accuracy": accuracy, "log_loss": log_loss, "base_rate": rate, "normalized_entropy": log_loss / of_rate}


SCORES = st.sampled_from([-math.inf, -800.0, -1.0, -0.0, 0.0, 1e-30, 1.0, 30.0, 31.0, math.inf])  # also ties
WEIGHTS = st.one_of(st.integers(0, 3).map(float), st.floats(0.125, 100, width=32))
GROUPS = st.sampled_from([0, 1, 2, 7, -1, -(2**40), 2**63 - 1])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), cut=st.integers(0, 40), weighted=st.sampled_from(["none", "all", "first"]))
def test_metrics_equal_their_definitions(kind: str, data: st.DataObject, cut: int, weighted: str) -> None:
    is_regression = kind == "regression"
    scores = st.floats(-1e30, 1e30) if is_regression else SCORES | st.floats(-50, 50, width=32)
    sample = st.tuples(scores, scores if is_regression else st.integers(-1, 2), GROUPS, st.integers(-1, 12), WEIGHTS)
    columns = [*zip(*data.draw(st.lists(sample, min_size=1, max_size=40)), strict=True)]
    of_scores, of_targets = (torch.float64, torch.float64) if is_regression else (torch.float32, torch.int64)
    types = (of_scores, of_targets, torch.int64, torch.int64, torch.float32)
    tensors = [torch.tensor(column, dtype=dtype) for column, dtype in zip(columns, types, strict=True)]
    names = ("scores", "targets", "groups", "places", "weights")
    samples: Samples = dict(zip(names, [tensors[0][:, None], tensors[1][:, None], *tensors[2:]], strict=True))
    metric = metric_of(kind, 1)
    add(kind, metric, samples)
    metric.reset()
    for part, is_weighted in ((slice(cut), weighted != "none"), (slice(cut, None), weighted == "all")):
        add(kind, metric, part_of(samples, part) | ({} if is_weighted else {"weights": None}))
        if not is_weighted:
            samples["weights"][part] = 1
    with np.errstate(invalid="ignore"):  # infinity times a weight of 0
        expected = _defined(kind, samples)
    assert values_of(kind, metric) == pytest.approx(expected, rel=1e-12, abs=1e-300, nan_ok=True)
    assert str(values_of(kind, metric)) == str(values_of(kind, metric))


@pytest.mark.parametrize("score", [math.nan, 0.5])
def test_a_sample_with_nan_counts_for_nothing_if_its_weight_is_0_and_makes_metrics_nan_otherwise(score: float) -> None:
    scores, targets = torch.tensor([[0.3], [score], [0.1], [0.7]]), torch.tensor([[0.0], [math.nan], [1.0], [2.0]])
    is_known = ~targets.isnan()[:, 0]

    def compute(targets: Tensor, weights: Tensor | None, chosen: Any = slice(None)) -> list[float]:
        samples = {"scores": scores, "targets": targets, "groups": torch.zeros(4).long(), "weights": weights}
        found: Values = {}
        for kind in ("AUC", "GAUC", "classification", "regression"):
            metric = metric_of(kind, 1)
            add(kind, metric, part_of(samples, chosen))
            found |= values_of(kind, metric)
        return [value for name, value in found.items() if name != "base_rate"]  # which is of targets alone

    for weights in (torch.tensor([0.5, 0.0, 1.0, 2.0]), is_known):
        assert compute(targets, weights) == compute(targets, weights, is_known)
    assert all(map(math.isnan, compute(targets, None)))
    assert {*map(math.isnan, compute(targets.nan_to_num(), None))} == {math.isnan(score)}


def test_groups_of_one_class_are_left_out() -> None:
    auc = BinaryAUC()  # more groups than half of the samples, of which the last one alone has both classes
    auc.update(torch.tensor([[0.5], [0.1], [0.9]]), torch.tensor([[1], [0], [1]]), groups=torch.tensor([3, 7, 7]))
    assert auc.compute_grouped() == [1]


def assert_same(found: dict[str, Values], expected: dict[str, Values], *inexact: str) -> None:
    """Compare bits, but for the kinds of metrics that are exact up to rounding."""
    for kind in KINDS:
        assert found[kind] == (pytest.approx(expected[kind], rel=1e-12) if kind in inexact else expected[kind]), kind


def random_samples(*, is_weighted: bool) -> Samples:
    torch.manual_seed(0)
    return {
        "scores": torch.cat([torch.randn(400, 2), torch.randint(0, 5, (400, 2)).float()]),  # half of them have ties
        "targets": torch.rand(800, 2) < torch.tensor([0.3, 0.1]),
        "groups": torch.randint(100, (800,)),
        "places": torch.randint(0, 60, (800,)),
        "weights": torch.rand(800) if is_weighted else None,
    }


def compute_all(samples: Samples, **options: Any) -> dict[str, Values]:
    """Compute all metrics; ranks without samples do not know that others have weights."""
    metrics = {kind: metric_of(kind, 2, **options) for kind in KINDS}
    for kind, metric in metrics.items() if len(samples["scores"]) else ():
        add(kind, metric, samples)
    return {kind: values_of(kind, metric) for kind, metric in metrics.items()}


@pytest.mark.gpu
def test_a_gpu_gives_equal_bits_and_updates_without_synchronizing() -> None:
    samples = random_samples(is_weighted=False)
    on_gpu = {name: None if values is None else values.cuda() for name, values in samples.items()}
    metrics = {kind: metric_of(kind, 2, device="cuda") for kind in KINDS}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for kind, metric in metrics.items():
            add(kind, metric, on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same({kind: values_of(kind, metrics[kind]) for kind in KINDS}, compute_all(samples), "classification")


TERMS = st.floats(0, 1e9) | st.sampled_from([0.0, 5e-324, 2.0**-1022, 1.0, 2.0**52 - 1])


@given(st.lists(st.tuples(TERMS, st.floats(0, 1e3, allow_subnormal=False))), st.booleans(), st.randoms())
@example([(2.0**1023, 1), (2.0**1023, 1), (1.7e308, 1)], False, random.Random(0))  # whose sum overflows
@example([(5e-324, 1), (5e-324, 1), (1e-323, 1)], False, random.Random(0))
def test_means_are_exact_up_to_one_rounding_and_have_equal_bits_in_any_order(
    samples: list[tuple[float, float]], is_weighted: bool, random: random.Random
) -> None:
    def mean() -> float:
        metric = MeanMetrics(["a"], {}, None, "cpu")
        terms, weights = torch.tensor(samples, dtype=torch.float64).view(-1, 2).T
        metric.add_terms(terms[:, None].requires_grad_(), weights if is_weighted else None)
        metric.add_terms(torch.empty(0, 1, dtype=torch.float64))
        return metric.compute()["a"]

    expected = mean()
    total = sum(Fraction(weight) if is_weighted else 1 for _, weight in samples)
    terms = sum(Fraction(term * weight) if is_weighted else Fraction(term) for term, weight in samples)
    assert expected == pytest.approx(float(terms / total) if total else math.nan, rel=0, abs=0, nan_ok=True)
    random.shuffle(samples)
    assert str(mean()) == str(expected)
