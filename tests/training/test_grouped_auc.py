import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenrank.core.errors import ConfigError, RankError
from evenrank.training import BinaryAUC
from tests.ranks import RankPool

GROUPS = st.sampled_from([0, 1, 2, 7, -1, -(2**63), 2**63 - 1])
SCORES = st.one_of(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf]), st.floats(width=32, allow_nan=False))
WEIGHTS = st.one_of(st.integers(0, 3).map(float), st.floats(0.125, 100, width=32))
SAMPLE = st.tuples(GROUPS, SCORES, st.booleans(), WEIGHTS)
Samples = tuple[Tensor, Tensor, Tensor, Tensor | None]  # scores, targets, groups, weights


def _gauc(samples: list[tuple[Any, ...]]) -> float:
    """Return the GAUC by its definition, over all pairs of each group."""
    groups, scores, is_positive, weights = (np.array(column) for column in zip(*samples, strict=True))
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


def _tensors(samples: list[tuple[Any, ...]], *, is_weighted: bool) -> Samples:
    scores = torch.tensor([score for _, score, *_ in samples], dtype=torch.float32)[:, None]
    targets = torch.tensor([is_positive for *_, is_positive, _ in samples], dtype=torch.bool)[:, None]
    groups = torch.tensor([group for group, *_ in samples], dtype=torch.int64)
    weights = torch.tensor([weight for *_, weight in samples], dtype=torch.float32) if is_weighted else None
    return scores, targets, groups, weights


def _add(metric: BinaryAUC, samples: Samples) -> None:
    scores, targets, groups, weights = samples
    metric.update(scores, targets, weights, groups=groups)


@given(samples=st.lists(SAMPLE, min_size=1, max_size=40), is_weighted=st.booleans(), cut=st.integers(0, 40))
def test_gauc_equals_its_definition_over_all_pairs(samples: list[tuple[Any, ...]], is_weighted: bool, cut: int) -> None:
    metric = BinaryAUC()
    for part in (samples[:cut], samples[cut:]):
        _add(metric, _tensors(part, is_weighted=is_weighted))
    if not is_weighted:
        samples = [(*sample[:3], 1.0) for sample in samples]
    first, again = metric.compute_grouped(), metric.compute_grouped()
    assert first == [pytest.approx(_gauc(samples), rel=1e-12, nan_ok=True)]
    assert str(first) == str(again)


def _compute(rank: int, world_size: int, parts: list[Samples], num_tasks: int = 1) -> list[float]:
    metric = BinaryAUC(num_tasks)
    if len(parts[rank][0]):  # a rank without samples does not know of weights
        _add(metric, parts[rank])
    return metric.compute_grouped()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@settings(max_examples=10)
@given(samples=st.lists(st.tuples(SAMPLE, st.integers(0, 3)), max_size=30), is_weighted=st.booleans())
def test_samples_of_a_group_on_any_ranks_give_equal_bits(
    ranks: RankPool, world_size: int, samples: list[tuple[tuple[Any, ...], int]], is_weighted: bool
) -> None:
    expected = _compute(0, 1, [_tensors([sample for sample, _ in samples], is_weighted=is_weighted)])
    parts = [
        _tensors([sample for sample, owner in reversed(samples) if owner % world_size == rank], is_weighted=is_weighted)
        for rank in range(world_size)
    ]
    assert str(ranks.run(world_size, _compute, parts)) == str([expected] * world_size)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_tasks_of_many_groups_have_equal_bits_on_three_ranks(ranks: RankPool, is_weighted: bool) -> None:
    torch.manual_seed(0)
    samples = torch.randn(3000, 2), torch.rand(3000, 2) < 0.3, torch.randint(400, (3000,)), torch.rand(3000)
    owners = torch.randint(1, 3, (3000,))  # rank 0 has no samples

    def part(chosen: Tensor) -> Samples:
        scores, targets, groups, weights = (tensor[chosen] for tensor in samples)
        return scores, targets, groups, weights if is_weighted else None

    expected = _compute(0, 1, [part(torch.arange(3000))], 2)
    assert 0.4 < expected[0] < 0.6
    assert expected[0] != expected[1]
    parts = [part(torch.flatten((owners == rank).nonzero())) for rank in range(3)]
    assert ranks.run(3, _compute, parts, 2) == [expected] * 3


def test_groups_of_one_class_are_left_out_and_ties_count_half() -> None:
    metric = BinaryAUC()
    scores = torch.tensor([[0.1], [0.9], [0.5], [0.5], [0.7], [0.3], [0.2]])
    groups = torch.tensor([4, 4, 5, 5, 5, 6, 6])
    metric.update(scores, torch.tensor([[0], [1], [0], [1], [0], [1], [1]]), groups=groups)
    groups.zero_()  # groups may be overwritten after an update
    assert metric.compute_grouped() == [(2 * 1 + 3 * 0.25) / 5]
    metric.update(
        torch.tensor([[0.0]]), torch.tensor([[0]]), torch.tensor([5.0]), groups=torch.tensor([6], dtype=torch.int32)
    )
    assert metric.compute_grouped() == [(2 * 1 + 3 * 0.25 + 7 * 1) / 12]
    metric.reset()
    assert metric.compute_grouped() == pytest.approx([math.nan], nan_ok=True)


def test_without_groups_gauc_is_auc() -> None:
    metric = BinaryAUC(2)
    scores, targets = torch.rand(50, 2), torch.rand(50, 2) < 0.5
    metric.update(scores, targets)
    assert metric.compute_grouped() == metric.compute()


def _compute_with_nan(rank: int, world_size: int) -> list[float]:
    metric = BinaryAUC(2)
    scores, targets = torch.tensor([[0.1, 0.1], [0.9, math.nan]]), torch.tensor([[0, 0], [1, 0]])
    if rank == 0:
        metric.update(scores, targets, groups=torch.tensor([3, 3]))  # a NaN of one class
    else:
        metric.update(scores[:1].repeat(2, 2)[:, :2], torch.tensor([[0, 0], [1, 1]]), groups=torch.tensor([8, 8]))
    return metric.compute_grouped()


def test_a_nan_score_on_any_rank_makes_the_gauc_of_its_task_nan(ranks: RankPool) -> None:
    for values in ranks.run(2, _compute_with_nan):
        assert values == pytest.approx([0.75, math.nan], nan_ok=True)


def _compute_differently(rank: int, world_size: int) -> None:
    with pytest.raises(RankError, match="num_tasks differs between ranks: 1 on rank 0, 2 on rank 1"):
        BinaryAUC(rank + 1).compute_grouped()
    assert dist.get_rank() == rank


def test_differences_between_ranks_are_errors_on_all_ranks(ranks: RankPool) -> None:
    ranks.run(2, _compute_differently)


@pytest.mark.gpu
def test_a_gpu_gives_equal_bits_and_updates_without_synchronizing() -> None:
    torch.manual_seed(0)
    scores, targets, groups = torch.randn(500, 1), torch.rand(500, 1) < 0.3, torch.randint(50, (500,))
    on_gpu = scores.cuda(), targets.cuda(), groups.cuda()
    metric = BinaryAUC(device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        metric.update(*on_gpu[:2], groups=on_gpu[2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert metric.compute_grouped() == _compute(0, 1, [(scores, targets, groups, None)])


def _compute_on_gpus(rank: int, world_size: int, parts: list[Samples]) -> list[float]:
    torch.cuda.set_device(rank)
    metric = BinaryAUC(2, group=dist.new_group(backend="nccl"), device="cuda")
    _add(metric, parts[rank])
    return metric.compute_grouped()


@pytest.mark.multi_gpu
def test_gpus_over_nccl_give_equal_bits(gpu_ranks: RankPool) -> None:
    torch.manual_seed(0)
    samples = torch.randn(500, 2), torch.rand(500, 2) < 0.3, torch.randint(50, (500,)), torch.rand(500)
    expected = _compute(0, 1, [samples], 2)
    first_has_none = [tuple(tensor[:0] for tensor in samples), samples]
    halves = [tuple(tensor[rank::2] for tensor in samples) for rank in range(2)]
    for parts in (first_has_none, halves):
        assert gpu_ranks.run(2, _compute_on_gpus, parts) == [expected] * 2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (torch.zeros(2, dtype=torch.int64), r"groups must be integers \[3\], got torch.int64 \[2\]"),
        (torch.zeros(3), r"groups must be integers \[3\], got torch.float32 \[3\]"),
    ],
)
def test_wrong_groups_are_refused(groups: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BinaryAUC().update(torch.zeros(3, 1), torch.zeros(3, 1), groups=groups)
