import math
import random
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from evenrank.core.errors import RankError
from evenrank.training import BinaryAUC, ClassificationMetrics, RankingMetrics, RegressionMetrics
from evenrank.training.metrics import MeanMetrics
from tests.ranks import RankPool

KINDS = ("AUC", "GAUC", "ranking", "classification", "regression")
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Samples:
    scores: Tensor  # [n, tasks], as are targets
    targets: Tensor
    groups: Tensor  # [n], as are places and weights
    places: Tensor
    weights: Tensor | None

    def part(self, chosen: Any) -> "Samples":
        return Samples(
            **{f.name: value if (value := getattr(self, f.name)) is None else value[chosen] for f in fields(self)}
        )


def _metric(kind: str, num_tasks: int, **options: Any) -> Any:
    if kind == "ranking":
        return RankingMetrics((3, 1, 8), **options)
    make = {"classification": ClassificationMetrics, "regression": RegressionMetrics}.get(kind, BinaryAUC)
    return make(num_tasks, **options)


def _add(kind: str, metric: Any, samples: Samples) -> None:
    if kind == "ranking":
        metric.update(samples.places, samples.weights)
    else:
        groups = {"groups": samples.groups} if kind == "GAUC" else {}
        metric.update(samples.scores, samples.targets, samples.weights, **groups)


def _values(kind: str, metric: Any) -> dict[str, float]:
    found = metric.compute_grouped() if kind == "GAUC" else metric.compute()
    return found if isinstance(found, dict) else {f"{kind}_{task}": value for task, value in enumerate(found)}


def _average(terms: Floats, weights: Floats) -> float:
    return float(np.sum(terms * weights) / np.sum(weights)) if weights.any() else math.nan


def _gauc(scores: Floats, is_positive: NDArray[np.bool_], groups: NDArray[np.int64], weights: Floats) -> float:
    """Return the GAUC by its definition, over all pairs of each group."""
    total = weight_of_groups = 0.0
    for group in np.unique(groups):
        positives, negatives = (np.flatnonzero((groups == group) & (is_positive == of_class)) for of_class in (1, 0))
        above, below = scores[positives, None], scores[negatives]
        weights_of_pairs = weights[positives, None] * weights[negatives]
        if weights_of_pairs.sum() > 0:
            wins = (weights_of_pairs * ((above > below) + (above == below) / 2)).sum()
            weight = weights[groups == group].sum()
            total += weight * wins / weights_of_pairs.sum()
            weight_of_groups += weight
    return total / weight_of_groups if weight_of_groups else math.nan


def _defined(kind: str, samples: Samples) -> dict[str, float]:
    """Return the metrics of one task by their definitions."""
    scores, targets = (tensor[:, 0].double().numpy() for tensor in (samples.scores, samples.targets))
    assert samples.weights is not None
    weights, positive = samples.weights.double().numpy(), targets > 0
    if kind in ("AUC", "GAUC"):
        groups = samples.groups.numpy() * (kind == "GAUC")
        return {f"{kind}_0": _gauc(scores, positive, groups, weights)}
    if kind == "regression":
        errors = scores - targets
        return {"mse": _average(errors**2, weights), "mae": _average(np.abs(errors), weights)}
    if kind == "ranking":
        found: dict[str, float] = {}
        for k in (3, 1, 8):
            places = samples.places.numpy()
            is_hit, of_hits = (places >= 1) & (places <= k), np.maximum(places, 1)
            terms = {"recall": is_hit * 1.0, "ndcg": is_hit / np.log2(of_hits + 1), "mrr": is_hit / of_hits}
            found |= {f"{name}@{k}": _average(of_samples, weights) for name, of_samples in terms.items()}
        return found
    rate, log_loss_of_rate = _average(positive.astype(float), weights), math.nan
    log_loss = _average(np.logaddexp(0, np.where(positive, -scores, scores)), weights)
    if 0 < rate < 1:
        log_loss_of_rate = _average(-np.log(np.where(positive, rate, 1 - rate)), weights)
    accuracy = _average(((scores > 0) == positive).astype(float), weights)
    entropy = log_loss / log_loss_of_rate
    return {"accuracy": accuracy, "log_loss": log_loss, "base_rate": rate, "normalized_entropy": entropy}


SCORES = st.sampled_from([-math.inf, -800.0, -1.0, -0.0, 0.0, 1e-30, 1.0, 30.0, 31.0, math.inf])  # also ties
WEIGHTS = st.one_of(st.integers(0, 3).map(float), st.floats(0.125, 100, width=32))
GROUPS = st.sampled_from([0, 1, 2, 7, -1, -(2**63), 2**63 - 1])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), cut=st.integers(0, 40), weighted=st.sampled_from(["none", "all", "first"]))
def test_metrics_equal_their_definitions(kind: str, data: st.DataObject, cut: int, weighted: str) -> None:
    is_regression = kind == "regression"
    scores = st.floats(-1e30, 1e30) if is_regression else SCORES | st.floats(-50, 50, width=32)
    sample = st.tuples(scores, scores if is_regression else st.integers(-1, 2), GROUPS, st.integers(-1, 12), WEIGHTS)
    rows = data.draw(st.lists(sample, max_size=40))
    of_scores, targets, groups, places, weights = zip(*rows, strict=True) if rows else [()] * 5
    samples = Samples(
        scores=torch.tensor(of_scores, dtype=torch.float64 if is_regression else torch.float32)[:, None],
        targets=torch.tensor(targets, dtype=torch.float64 if is_regression else torch.int64)[:, None],
        groups=torch.tensor(groups, dtype=torch.int64),
        places=torch.tensor(places, dtype=torch.int64),
        weights=torch.tensor(weights),
    )
    metric = _metric(kind, 1)
    _add(kind, metric, samples)
    metric.reset()
    assert samples.weights is not None
    for part, is_weighted in ((slice(cut), weighted != "none"), (slice(cut, None), weighted == "all")):
        _add(kind, metric, samples.part(part) if is_weighted else replace(samples.part(part), weights=None))
        if not is_weighted:
            samples.weights[part] = 1
    with np.errstate(invalid="ignore"):  # infinity times a weight of 0
        expected = _defined(kind, samples)
    assert _values(kind, metric) == pytest.approx(expected, rel=1e-12, abs=1e-300, nan_ok=True)
    assert str(_values(kind, metric)) == str(_values(kind, metric))


def test_tasks_have_an_auc_each_that_is_nan_with_a_nan_score_or_one_class() -> None:
    metric = BinaryAUC(4)
    scores = torch.tensor([[1.0, 5, 2, math.nan], [2.0, 5, 1, 0]])
    metric.update(scores, torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]]))
    scores.zero_()  # scores may be overwritten after an update
    metric.update(torch.tensor([[3.0, 4, 0, 1]], dtype=torch.bfloat16), torch.tensor([[True, False, True, True]]))
    assert metric.compute() == pytest.approx([1.0, 0.75, math.nan, math.nan], rel=0, nan_ok=True)
    assert metric.compute_grouped() == pytest.approx(metric.compute(), rel=0, nan_ok=True)  # without groups


def test_groups_of_one_class_are_left_out_and_ties_count_half() -> None:
    metric, groups = BinaryAUC(), torch.tensor([4, 4, 5, 5, 5, 6, 6])
    scores = torch.tensor([[0.1], [0.9], [0.5], [0.5], [0.7], [0.3], [0.2]])
    metric.update(scores, torch.tensor([[0], [1], [0], [1], [0], [1], [1]]), groups=groups)
    groups.zero_()  # groups may be overwritten after an update
    assert metric.compute_grouped() == [(2 * 1 + 3 * 0.25) / 5]
    sixth = torch.tensor([6], dtype=torch.int32)
    metric.update(torch.tensor([[0.0]]), torch.tensor([[0]]), torch.tensor([5.0]), groups=sixth)
    assert metric.compute_grouped() == [(2 * 1 + 3 * 0.25 + 7 * 1) / 12]


@pytest.mark.parametrize("score", [math.nan, 0.5])
def test_a_sample_with_nan_counts_for_nothing_if_its_weight_is_0_and_makes_metrics_nan_otherwise(score: float) -> None:
    scores, targets = torch.tensor([[0.3], [score], [0.1], [0.7]]), torch.tensor([[0.0], [math.nan], [1.0], [2.0]])
    ids, is_known = torch.zeros(4, dtype=torch.int64), ~targets.isnan()[:, 0]

    def compute(targets: Tensor, weights: Tensor | None, chosen: Any = slice(None)) -> list[float]:
        samples = Samples(scores=scores, targets=targets, groups=ids, places=ids, weights=weights).part(chosen)
        found: dict[str, float] = {}
        for kind in (kind for kind in KINDS if kind != "ranking"):
            metric = _metric(kind, 1)
            _add(kind, metric, samples)
            found |= _values(kind, metric)
        return [value for name, value in found.items() if name != "base_rate"]  # which is of targets alone

    for weights in (torch.tensor([0.5, 0.0, 1.0, 2.0]), is_known):
        assert compute(targets, weights) == compute(targets, weights, is_known)
        assert not any(map(math.isnan, compute(targets, weights)))
    assert all(map(math.isnan, compute(targets, None)))
    assert {*map(math.isnan, compute(targets.nan_to_num(), None))} == {math.isnan(score)}


def _random_samples(*, is_weighted: bool) -> Samples:
    torch.manual_seed(0)
    return Samples(
        scores=torch.cat([torch.randn(400, 2), torch.randint(0, 5, (400, 2)).float()]),  # half of them have ties
        targets=torch.rand(800, 2) < torch.tensor([0.3, 0.1]),
        groups=torch.randint(100, (800,)),
        places=torch.randint(0, 60, (800,)),
        weights=torch.rand(800) if is_weighted else None,
    )


def _compute(rank: int, world_size: int, parts: list[Samples], device: str = "cpu") -> dict[str, dict[str, float]]:
    """Compute all metrics; ranks without samples do not know that others have weights."""
    group: Any = None
    if device == "mesh":
        group, device = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"], "cpu"
        rank = group.get_local_rank()
    elif device == "cuda" and world_size > 1:
        torch.cuda.set_device(rank)
        group = dist.new_group(backend="nccl")
    found = {}
    for kind in KINDS:
        metric = _metric(kind, 2, group=group, device=device)
        if len(parts[rank].scores):
            _add(kind, metric, parts[rank])
        found[kind] = _values(kind, metric)
    return found


def _assert_same(found: dict[str, dict[str, float]], expected: dict[str, dict[str, float]], inexact: str = "") -> None:
    """Compare bits, but for the kind of metric that is exact up to rounding."""
    for kind in KINDS:
        assert found[kind] == (pytest.approx(expected[kind], rel=1e-12) if kind == inexact else expected[kind]), kind


@pytest.mark.parametrize(("world_size", "device"), [(1, "cpu"), (3, "cpu"), (4, "mesh")])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_any_distribution_over_ranks_gives_equal_bits(
    ranks: RankPool, world_size: int, device: str, is_weighted: bool
) -> None:
    samples = _random_samples(is_weighted=is_weighted)
    expected = _compute(0, 1, [samples])
    if is_weighted:  # which makes a difference
        plain = _compute(0, 1, [replace(samples, weights=None)])
        assert all(
            {*plain[kind].values()}.isdisjoint(expected[kind].values()) for kind in ("AUC", "GAUC", "regression")
        )
    num_owners = 2 if device == "mesh" else world_size
    owners = torch.randint(num_owners, (800,))
    for owner in (owners, torch.full_like(owners, num_owners - 1)):  # all others have no samples
        order = torch.randperm(800)
        parts = [samples.part(order[owner == rank]) for rank in range(num_owners)]
        for found in ranks.run(world_size, _compute, parts, device):
            _assert_same(found, expected, "AUC" if is_weighted else "")


@pytest.mark.gpu
def test_a_gpu_gives_equal_bits_and_updates_without_synchronizing() -> None:
    samples = _random_samples(is_weighted=False)
    on_gpu = replace(
        samples, **{name: getattr(samples, name).cuda() for name in ("scores", "targets", "groups", "places")}
    )
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
    first_has_none = [samples.part(slice(0)), samples]
    halves = [samples.part(slice(rank, None, 2)) for rank in range(2)]
    for parts in (first_has_none, halves):
        for found in gpu_ranks.run(2, _compute, parts, "cuda"):
            _assert_same(found | {"classification": expected["classification"]}, expected, "AUC" if is_weighted else "")


def _disagree(rank: int, world_size: int) -> None:
    """Compute what differs between ranks, with a NaN or with weights that cannot be on one of them."""
    num_tasks, of_kind = "num_tasks differs between ranks: 1 on rank 0, 2 on rank 1", "metric differs between ranks: Ra"
    for call, message in (
        (BinaryAUC(rank + 1).compute, num_tasks),
        (BinaryAUC(rank + 1).compute_grouped, num_tasks),
        (RegressionMetrics(rank + 1).compute, num_tasks),
        (
            RankingMetrics((10, 20 + rank)).compute,
            r"ks differs between ranks: \[10, 20\] on rank 0, \[10, 21\] on rank",
        ),
        ((BinaryAUC() if rank else RankingMetrics()).compute, of_kind),
    ):
        with pytest.raises(RankError, match=message):
            call()
    for weight in (-1, math.nan, math.inf):
        weights = torch.tensor([1, weight if rank == world_size - 1 else 0, 2])
        for kind in KINDS:
            metric, one = _metric(kind, 1), torch.tensor([1, 0, 1])
            _add(
                kind,
                metric,
                Samples(scores=torch.rand(3, 1), targets=one[:, None], groups=one, places=one, weights=weights),
            )
            with pytest.raises(
                RankError, match=r"^rank 1 has weights below 0, infinite or NaN; pass finite ones of at l"
            ):
                _values(kind, metric)
    metric = BinaryAUC(2)
    scores, targets = torch.tensor([[0.1, 0.1], [0.9, math.nan]]), torch.tensor([[0, 0], [1, 0]])
    if rank == 0:
        metric.update(scores, targets, groups=torch.tensor([3, 3]))  # a NaN of one class
    else:
        metric.update(scores[:1].repeat(2, 1), torch.tensor([[0, 0], [1, 1]]), groups=torch.tensor([8, 8]))
    assert metric.compute_grouped() == pytest.approx([0.75, math.nan], nan_ok=True)


def test_what_differs_between_ranks_is_an_error_on_all_and_a_nan_on_one_is_seen_by_all(ranks: RankPool) -> None:
    ranks.run(2, _disagree)


def _means(terms: list[float], weights: list[float] | None) -> list[float]:
    """Return the weighted means of terms, and of ones."""
    metric = MeanMetrics(["a", "b"], {}, None, "cpu")
    columns = torch.tensor([[term, 1.0] for term in terms], dtype=torch.float64, requires_grad=True).view(-1, 2)
    metric.add_terms(columns, None if weights is None else torch.tensor(weights, dtype=torch.float64))
    metric.add_terms(torch.empty(0, 2, dtype=torch.float64))
    return list(metric.compute().values())


TERMS = st.floats(0, 1e9) | st.sampled_from([0.0, 5e-324, 2.0**-1022, 1.0, 2.0**52 - 1])


@given(st.lists(st.tuples(TERMS, st.floats(0, 1e3, allow_subnormal=False))), st.booleans(), st.randoms())
@example([(2.0**1023, 1), (2.0**1023, 1), (1.7e308, 1)], False, random.Random(0))  # whose sum overflows
@example([(5e-324, 1), (5e-324, 1), (1e-323, 1)], False, random.Random(0))
def test_means_are_exact_up_to_one_rounding_and_have_equal_bits_in_any_order(
    samples: list[tuple[float, float]], is_weighted: bool, random: random.Random
) -> None:
    def means() -> list[float]:
        return _means([term for term, _ in samples], [weight for _, weight in samples] if is_weighted else None)

    expected = means()
    weighted = [(Fraction(term * weight), Fraction(weight)) for term, weight in samples]
    if not is_weighted:
        weighted = [(Fraction(term), Fraction(1)) for term, _ in samples]
    total = sum(weight for _, weight in weighted)
    exact = [float(sum(term for term, _ in weighted) / total), 1.0] if total else [math.nan] * 2
    assert expected == pytest.approx(exact, rel=0, abs=0, nan_ok=True)
    random.shuffle(samples)
    assert str(means()) == str(expected)
