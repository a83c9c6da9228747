import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from evenrank.core.errors import ConfigError, RankError
from evenrank.training import BinaryAUC, ClassificationMetrics, RankingMetrics, RegressionMetrics
from tests.ranks import RankPool

SCORES = st.one_of(
    st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 1.0, 30.0, 31.0, math.inf]),  # ties, and logits of sigmoid 1
    st.floats(width=32, allow_nan=False),
)
SAMPLES = st.lists(st.tuples(SCORES, st.booleans()), max_size=40)


def _auc_of_pairs(samples: Sequence[tuple[float, bool]]) -> float:
    pairs = [(p, n) for p, is_positive in samples for n, other in samples if is_positive and not other]
    wins = sum(Fraction((p > n) * 2 + (p == n), 2) for p, n in pairs)
    return float(wins / len(pairs)) if pairs else math.nan


def _tensors(samples: Sequence[tuple[float, bool]]) -> tuple[Tensor, Tensor]:
    scores = torch.tensor([score for score, _ in samples], dtype=torch.float32)
    return scores[:, None], torch.tensor([target for _, target in samples], dtype=torch.float32)[:, None]


def _same(values: Sequence[float], others: Sequence[float]) -> bool:
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(values, others, strict=True))


@given(samples=SAMPLES, cuts=st.lists(st.integers(0, 40), max_size=3))
def test_auc_equals_its_definition_over_all_pairs(samples: list[tuple[float, bool]], cuts: list[int]) -> None:
    metric = BinaryAUC()
    scores, targets = _tensors(samples)
    for part in range(len(cuts) + 1):  # in several calls, some without samples
        begin, end = [0, *sorted(cuts), len(samples)][part : part + 2]
        metric.update(scores[begin:end], targets[begin:end])
    assert _same(metric.compute(), [_auc_of_pairs(samples)])
    assert _same(metric.compute(), [_auc_of_pairs(samples)])


def test_tasks_have_an_auc_each_that_is_nan_with_a_nan_score_or_one_class() -> None:
    metric = BinaryAUC(4)
    scores = torch.tensor([[1.0, 5, 2, math.nan], [2.0, 5, 1, 0]])
    metric.update(scores, torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]]))
    scores.zero_()  # scores may be overwritten after an update
    metric.update(torch.tensor([[3.0, 4, 0, 1]], dtype=torch.bfloat16), torch.tensor([[True, False, True, True]]))
    assert _same(metric.compute(), [1.0, 0.75, math.nan, math.nan])
    metric.reset()
    assert _same(metric.compute(), [math.nan] * 4)


@given(places=st.lists(st.integers(-1, 12)))
def test_ranking_metrics_equal_their_definitions(places: list[int]) -> None:
    metric = RankingMetrics((3, 1, 8))
    metric.update(torch.tensor([1, 1]))
    metric.reset()
    metric.update(torch.tensor(places[:5], dtype=torch.int64))
    metric.update(torch.tensor(places[5:], dtype=torch.int64))
    expected: dict[str, float] = {}
    for k in (3, 1, 8):
        hits = [place for place in places if 1 <= place <= k]
        sums = {"recall": len(hits), "ndcg": sum(1 / math.log2(p + 1) for p in hits), "mrr": sum(1 / p for p in hits)}
        expected |= {f"{name}@{k}": total / len(places) if places else math.nan for name, total in sums.items()}
    assert metric.compute() == pytest.approx(expected, rel=1e-14, nan_ok=True)


WEIGHTS = st.one_of(st.integers(0, 3).map(float), st.floats(0, 100, width=32))


@given(samples=st.lists(st.tuples(SCORES, st.booleans(), WEIGHTS), max_size=20), cut=st.integers(0, 20))
def test_weighted_auc_counts_each_pair_with_the_product_of_its_weights(samples: list[Any], cut: int) -> None:
    metric = BinaryAUC()
    scores, targets = _tensors([sample[:2] for sample in samples])
    weights = torch.tensor([weight for *_, weight in samples], dtype=torch.float32)
    weights[cut:] = 1  # of samples that are added without weights
    metric.update(scores[:cut], targets[:cut], weights[:cut])
    metric.update(scores[cut:], targets[cut:])
    weighted = [(score, positive, w) for (score, positive, _), w in zip(samples, weights.tolist(), strict=True)]
    pairs = [
        (p, n, Fraction(v * w)) for p, positive, v in weighted if positive for n, other, w in weighted if not other
    ]
    total = sum(weight for *_, weight in pairs)
    wins = sum(weight * Fraction((p > n) * 2 + (p == n), 2) for p, n, weight in pairs)
    expected = float(wins / total) if total else math.nan
    for _ in range(2):
        assert metric.compute() == [pytest.approx(expected, rel=1e-12, nan_ok=True)]


@given(samples=st.lists(st.tuples(st.integers(-1, 5), WEIGHTS), max_size=9), cut=st.integers(0, 9))
def test_weighted_ranking_metrics_are_weighted_means(samples: list[tuple[int, float]], cut: int) -> None:
    metric = RankingMetrics((3,))
    places = torch.tensor([place for place, _ in samples], dtype=torch.int64)
    weights = torch.tensor([weight for _, weight in samples], dtype=torch.float32)
    weights[cut:] = 1
    metric.update(places[cut:])
    metric.update(places[:cut], weights[:cut])
    of_places = list(zip(places.tolist(), weights.tolist(), strict=True))
    total = math.fsum(weights.tolist())
    sums = {
        "recall": math.fsum(w for place, w in of_places if 1 <= place <= 3),
        "ndcg": math.fsum(w / math.log2(place + 1) for place, w in of_places if 1 <= place <= 3),
        "mrr": math.fsum(w / place for place, w in of_places if 1 <= place <= 3),
    }
    expected = {f"{name}@3": value / total if total else math.nan for name, value in sums.items()}
    assert metric.compute() == pytest.approx(expected, rel=1e-12, nan_ok=True)


def _compute_weighted(rank: int, world_size: int, parts: list[tuple[Tensor, ...]]) -> list[float]:
    """Compute metrics where ranks without samples do not know that others have weights."""
    auc, ranking = BinaryAUC(2), RankingMetrics((10,))
    scores, targets, places, weights = parts[rank]
    if len(scores):
        auc.update(scores, targets, weights)
        ranking.update(places, weights)
    return [*auc.compute(), *ranking.compute().values()]


def test_weighted_metrics_are_those_of_all_ranks(ranks: RankPool) -> None:
    samples = (*_random_samples(), torch.rand(800, dtype=torch.float64))
    expected = _compute_weighted(0, 1, [samples])
    assert len({*expected, *_compute(samples[:3])[0]}) == len(expected) + 2  # weights make a difference
    owners = torch.randint(1, 3, (800,))
    parts = [tuple(tensor[owners == rank] for tensor in samples) for rank in range(3)]
    assert ranks.run(3, _compute_weighted, parts) == [pytest.approx(expected, rel=1e-12)] * 3


def _compute_with_a_wrong_weight(rank: int, world_size: int, weight: float) -> list[str]:
    scores, targets, weights = torch.rand(3, 1), torch.tensor([[1], [0], [1]]), torch.tensor([1, weight, 2])
    if rank < world_size - 1:
        weights[1] = 0
    auc, ranking = BinaryAUC(), RankingMetrics()
    others = ClassificationMetrics(), RegressionMetrics()
    for metric in (auc, *others):
        metric.update(scores, targets, weights)
    ranking.update(targets[:, 0], weights)
    messages = []
    for compute in (auc.compute, auc.compute_grouped, *(metric.compute for metric in (ranking, *others))):
        with pytest.raises(RankError) as error:
            compute()
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_a_weight_that_is_no_number_of_at_least_0_is_an_error_on_every_rank(ranks: RankPool, weight: float) -> None:
    message = "rank 1 has weights below 0, infinite or NaN; pass finite ones of at least 0"
    assert ranks.run(2, _compute_with_a_wrong_weight, weight) == [[message] * 5] * 2


@pytest.mark.parametrize("target", [math.nan, 1.0])
@pytest.mark.parametrize("score", [math.nan, 0.5])
def test_a_score_or_target_that_is_nan_makes_metrics_nan(score: float, target: float) -> None:
    auc, others = BinaryAUC(), (ClassificationMetrics(), RegressionMetrics())
    for metric in (auc, *others):
        metric.update(torch.tensor([[score], [0.1], [0.7]]), torch.tensor([[target], [0.0], [1.0]]))
    of_others = {name: value for metric in others for name, value in metric.compute().items() if name != "base_rate"}
    assert {math.isnan(value) for value in (*auc.compute(), *auc.compute_grouped(), *of_others.values())} == {
        math.isnan(score) or math.isnan(target)
    }


@pytest.mark.parametrize("score", [math.nan, 0.5])
def test_missing_targets_of_weight_0_count_for_nothing(score: float) -> None:
    scores, targets = torch.tensor([[0.3], [score], [0.1], [0.7]]), torch.tensor([[0.0], [math.nan], [1.0], [2.0]])
    is_known = ~targets.isnan()[:, 0]

    def compute(*samples: Tensor) -> list[float]:
        auc, others = BinaryAUC(), (ClassificationMetrics(), RegressionMetrics())
        for metric in (auc, *others):
            metric.update(*samples)
        of_others = [value for metric in others for value in metric.compute().values()]
        return [*auc.compute(), *auc.compute_grouped(), *of_others]

    weights = torch.tensor([0.5, 0.0, 1.0, 2.0])
    assert compute(scores, targets, weights) == compute(*(part[is_known] for part in (scores, targets, weights)))
    assert compute(scores, targets, is_known) == compute(scores[is_known], targets[is_known])


Samples = tuple[Tensor, Tensor, Tensor]  # scores, targets, places


def _random_samples() -> Samples:
    torch.manual_seed(0)
    scores = torch.cat([torch.randn(400, 2), torch.randint(0, 5, (400, 2)).float()])  # half of them have ties
    return scores, torch.rand(800, 2) < torch.tensor([0.3, 0.01]), torch.randint(0, 60, (800,))


def _compute(samples: Samples, group: Any = None, device: str = "cpu") -> tuple[list[float], dict[str, float]]:
    auc, ranking = BinaryAUC(2, group=group, device=device), RankingMetrics(group=group, device=device)
    auc.update(*samples[:2])
    ranking.update(samples[2])
    return auc.compute(), ranking.compute()


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_distribution_over_ranks_gives_equal_bits(ranks: RankPool, world_size: int) -> None:
    samples = _random_samples()
    expected = _compute(samples)
    owners = torch.randint(0, world_size, (len(samples[0]),))
    only_last = torch.full_like(owners, world_size - 1)  # all others have no samples
    for owner in (owners, only_last):
        parts = [tuple(tensor[owner == rank] for tensor in samples) for rank in range(world_size)]
        assert ranks.run(world_size, _compute_part, parts, "cpu") == [expected] * world_size


def _compute_part(rank: int, world_size: int, parts: list[Samples], kind: str) -> tuple[list[float], dict[str, float]]:
    if kind == "mesh":
        dp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
        return _compute(parts[dp.get_local_rank()], dp)
    if kind == "cpu":
        return _compute(parts[rank])
    torch.cuda.set_device(rank)
    return _compute(parts[rank], dist.new_group(backend="nccl"), "cuda")


def test_metrics_cover_one_dimension_of_a_device_mesh(ranks: RankPool) -> None:
    samples = _random_samples()
    parts = [tuple(tensor[rank::2] for tensor in samples) for rank in range(2)]
    assert ranks.run(4, _compute_part, parts, "mesh") == [_compute(samples)] * 4


def _compute_differently(rank: int, world_size: int) -> None:
    for metric, message in (
        (BinaryAUC(rank + 1), "num_tasks differs between ranks: 1 on rank 0, 2 on rank 1"),
        (RankingMetrics((10, 20 + rank)), r"ks differs between ranks: \[10, 20\] on rank 0, \[10, 21\] on rank 1"),
        (BinaryAUC() if rank else RankingMetrics(), "metric differs between ranks: RankingMetrics on rank 0, Bi"),
    ):
        with pytest.raises(RankError, match=message):
            metric.compute()


def test_differences_between_ranks_are_errors_on_all_ranks(ranks: RankPool) -> None:
    ranks.run(2, _compute_differently)


@pytest.mark.gpu
def test_a_gpu_gives_equal_bits_and_updates_without_synchronizing() -> None:
    samples = _random_samples()
    on_gpu = [tensor.cuda() for tensor in samples]
    auc, ranking = BinaryAUC(2, device="cuda"), RankingMetrics(device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        auc.update(*on_gpu[:2])
        ranking.update(on_gpu[2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (auc.compute(), ranking.compute()) == _compute(samples)


@pytest.mark.multi_gpu
def test_gpus_over_nccl_give_equal_bits(gpu_ranks: RankPool) -> None:
    samples = _random_samples()
    first_has_none = [tuple(tensor[:0] for tensor in samples), samples]
    halves = [tuple(tensor[rank::2] for tensor in samples) for rank in range(2)]
    for parts in (first_has_none, halves):
        assert gpu_ranks.run(2, _compute_part, parts, "cuda") == [_compute(samples)] * 2


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: BinaryAUC(0), "num_tasks must be at least 1, got 0"),
        (lambda: BinaryAUC(2).update(torch.zeros(3), torch.zeros(3)), r"\[n, 2\], got scores \[3\] and targets \[3\]"),
        (lambda: BinaryAUC(2).update(torch.zeros(3, 2), torch.zeros(4, 2)), r"scores \[3, 2\] and targets \[4, 2\]"),
        (lambda: RankingMetrics((5, 0)), "ks must be at least 1, got 0"),
        (
            lambda: RankingMetrics().update(torch.ones(3).int(), torch.ones(2)),
            r"weights must be \[3\], one per .*\[2\]",
        ),
        (lambda: RankingMetrics().update(torch.zeros(2)), r"places must be integers \[n\], got torch.float32 \[2\]"),
    ],
)
def test_wrong_arguments_are_refused(use: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        use()
