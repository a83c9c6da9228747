import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from evenrank.core.errors import RankError
from evenrank.training import BinaryAUC, ClassificationMetrics, RankingMetrics, RegressionMetrics
from evenrank.training.metrics import MeanMetrics
from tests.ranks import RankPool

KINDS = ("AUC", "GAUC", "ranking", "classification", "regression")
Samples = dict[str, Any]  # scores and targets [n, tasks]; groups, places and weights [n], or no weights
Values = dict[str, float]


def _part(samples: Samples, chosen: Any) -> Samples:
    return {name: None if values is None else values[chosen] for name, values in samples.items()}


def _metric(kind: str, num_tasks: int, **options: Any) -> Any:
    if kind == "ranking":
        return RankingMetrics((3, 1, 8), **options)
    make: Any = {"classification": ClassificationMetrics, "regression": RegressionMetrics}.get(kind, BinaryAUC)
    return make(num_tasks, **options)


def _add(kind: str, metric: Any, samples: Samples) -> None:
    if kind == "ranking":
        metric.update(samples["places"], samples["weights"])
    else:
        groups = {"groups": samples["groups"]} if kind == "GAUC" else {}
        metric.update(samples["scores"], samples["targets"], samples["weights"], **groups)


def _values(kind: str, metric: Any) -> Values:
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
    metric = _metric(kind, 1)
    _add(kind, metric, samples)
    metric.reset()
    for part, is_weighted in ((slice(cut), weighted != "none"), (slice(cut, None), weighted == "all")):
        _add(kind, metric, _part(samples, part) | ({} if is_weighted else {"weights": None}))
        if not is_weighted:
            samples["weights"][part] = 1
    with np.errstate(invalid="ignore"):  # infinity times a weight of 0
        expected = _defined(kind, samples)
    assert _values(kind, metric) == pytest.approx(expected, rel=1e-12, abs=1e-300, nan_ok=True)
    assert str(_values(kind, metric)) == str(_values(kind, metric))


@pytest.mark.parametrize("score", [math.nan, 0.5])
def test_a_sample_with_nan_counts_for_nothing_if_its_weight_is_0_and_makes_metrics_nan_otherwise(score: float) -> None:
    scores, targets = torch.tensor([[0.3], [score], [0.1], [0.7]]), torch.tensor([[0.0], [math.nan], [1.0], [2.0]])
    is_known = ~targets.isnan()[:, 0]

    def compute(targets: Tensor, weights: Tensor | None, chosen: Any = slice(None)) -> list[float]:
        samples = {"scores": scores, "targets": targets, "groups": torch.zeros(4).long(), "weights": weights}
        found: Values = {}
        for kind in ("AUC", "GAUC", "classification", "regression"):
            metric = _metric(kind, 1)
            _add(kind, metric, _part(samples, chosen))
            found |= _values(kind, metric)
        return [value for name, value in found.items() if name != "base_rate"]  # which is of targets alone

    for weights in (torch.tensor([0.5, 0.0, 1.0, 2.0]), is_known):
        assert compute(targets, weights) == compute(targets, weights, is_known)
    assert all(map(math.isnan, compute(targets, None)))
    assert {*map(math.isnan, compute(targets.nan_to_num(), None))} == {math.isnan(score)}


def _random_samples(*, is_weighted: bool) -> Samples:
    torch.manual_seed(0)
    return {
        "scores": torch.cat([torch.randn(400, 2), torch.randint(0, 5, (400, 2)).float()]),  # half of them have ties
        "targets": torch.rand(800, 2) < torch.tensor([0.3, 0.1]),
        "groups": torch.randint(100, (800,)),
        "places": torch.randint(0, 60, (800,)),
        "weights": torch.rand(800) if is_weighted else None,
    }


def _compute(rank: int, world_size: int, parts: list[Samples], device: str = "cpu") -> dict[str, Values]:
    """Compute all metrics; ranks without samples do not know that others have weights."""
    group: Any = None
    if device == "mesh":
        group, device = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"], "cpu"
        rank = group.get_local_rank()
    elif device == "cuda":
        torch.cuda.set_device(rank)
        group = dist.new_group(backend="nccl") if world_size > 1 else None
    metrics = {kind: _metric(kind, 2, group=group, device=device) for kind in KINDS}
    for kind, metric in metrics.items() if len(parts[rank]["scores"]) else ():
        _add(kind, metric, parts[rank])
    return {kind: _values(kind, metric) for kind, metric in metrics.items()}


def _assert_same(found: dict[str, Values], expected: dict[str, Values], *inexact: str) -> None:
    """Compare bits, but for the kinds of metrics that are exact up to rounding."""
    for kind in KINDS:
        assert found[kind] == (pytest.approx(expected[kind], rel=1e-12) if kind in inexact else expected[kind]), kind


@pytest.mark.parametrize(("world_size", "device"), [(1, "cpu"), (3, "cpu"), (4, "mesh")])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_any_distribution_over_ranks_gives_equal_bits(
    ranks: RankPool, world_size: int, device: str, is_weighted: bool
) -> None:
    samples = _random_samples(is_weighted=is_weighted)
    expected, num_owners = _compute(0, 1, [samples]), 2 if device == "mesh" else world_size
    if is_weighted:  # which makes a difference
        plain = _compute(0, 1, [samples | {"weights": None}])
        assert all(
            {*plain[kind].values()}.isdisjoint(expected[kind].values()) for kind in ("AUC", "GAUC", "regression")
        )
    owners = torch.randint(num_owners, (800,))
    for owner in (owners, torch.full_like(owners, num_owners - 1)):  # all others have no samples
        order = torch.randperm(800)
        parts = [_part(samples, order[owner == rank]) for rank in range(num_owners)]
        for found in ranks.run(world_size, _compute, parts, device):
            _assert_same(found, expected, *["AUC"] * is_weighted)


@pytest.mark.gpu
def test_a_gpu_gives_equal_bits_and_updates_without_synchronizing() -> None:
    samples = _random_samples(is_weighted=False)
    on_gpu = {name: None if values is None else values.cuda() for name, values in samples.items()}
    metrics = {kind: _metric(kind, 2, device="cuda") for kind in KINDS}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for kind, metric in metrics.items():
            _add(kind, metric, on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = {kind: _values(kind, metric) for kind, metric in metrics.items()}
    _assert_same(found, _compute(0, 1, [samples]), "classification")  # of logarithms


@pytest.mark.multi_gpu
@pytest.mark.parametrize("is_weighted", [False, True])
def test_gpus_over_nccl_give_equal_bits(gpu_ranks: RankPool, is_weighted: bool) -> None:
    samples = _random_samples(is_weighted=is_weighted)
    expected = _compute(0, 1, [samples])
    first_has_none = [_part(samples, slice(0)), samples]
    for parts in (first_has_none, [_part(samples, slice(rank, None, 2)) for rank in range(2)]):
        for found in gpu_ranks.run(2, _compute, parts, "cuda"):
            _assert_same(found, expected, "classification", *["AUC"] * is_weighted)


def _disagree(rank: int, world_size: int) -> None:
    """Compute what differs between ranks, and with weights that cannot be, or a NaN, on one of them."""
    num_tasks = "num_tasks differs between ranks: 1 on rank 0, 2 on rank 1"
    for kind, metric, message in (
        ("AUC", BinaryAUC(rank + 1), num_tasks),
        ("GAUC", BinaryAUC(rank + 1), num_tasks),
        ("regression", RegressionMetrics(rank + 1), num_tasks),
        (
            "ranking",
            RankingMetrics((10, 20 + rank)),
            r"ks differs between ranks: \[10, 20\] on rank 0, \[10, 21\] on",
        ),
        (
            "AUC",
            BinaryAUC() if rank else RankingMetrics(),
            "metric differs between ranks: RankingMetrics on rank 0, Bi",
        ),
    ):
        with pytest.raises(RankError, match=message):
            _values(kind, metric)
    ids = torch.tensor([1, 0, 1])
    samples = {"scores": torch.rand(3, 1), "targets": ids[:, None], "groups": ids, "places": ids}
    for weight in (-1, math.nan, math.inf):
        weights = torch.tensor([1, weight if rank == world_size - 1 else 0, 2])
        for kind in KINDS:
            metric = _metric(kind, 1)
            _add(kind, metric, samples | {"weights": weights})
            with pytest.raises(
                RankError, match=r"^rank 1 has weights below 0, infinite or NaN; pass finite ones of at"
            ):
                _values(kind, metric)
    auc = BinaryAUC(2)
    scores = torch.tensor([[0.1, 0.1], [0.9, math.nan if rank == 0 else 0.9]])
    auc.update(scores, torch.tensor([[0, 0], [1, rank]]), groups=torch.tensor([3, 3]) + rank)  # a NaN of one class
    assert auc.compute_grouped() == pytest.approx([1, math.nan], nan_ok=True)


def test_what_differs_between_ranks_is_an_error_on_all_and_a_nan_on_one_is_seen_by_all(ranks: RankPool) -> None:
    ranks.run(2, _disagree)


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
