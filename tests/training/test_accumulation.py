from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from evenrank.core.errors import ConfigError, RankError
from evenrank.dataloader import JaggedBatch
from evenrank.training import accumulate
from tests.ranks import RankPool


def _batches(world_loss_tokens: list[int | None]) -> list[JaggedBatch]:
    return [
        JaggedBatch(batch_size=1, num_real=0, step=step, loss_tokens=1, world_loss_tokens=count)
        for step, count in enumerate(world_loss_tokens)
    ]


def test_each_batch_has_the_loss_tokens_of_its_whole_optimizer_step_and_none_is_pulled_before_it() -> None:
    pulled: list[JaggedBatch] = []

    def pulling() -> Iterator[JaggedBatch]:
        for batch in _batches([5, 3, 2, 0, 7]):
            pulled.append(batch)
            yield batch

    iterator = accumulate(pulling(), 2)
    assert pulled == []
    for counts, num_pulled in (([(0, 8), (1, 8)], 2), ([(2, 2), (3, 2)], 4), ([(4, 7)], 5)):
        group = next(iterator)
        assert len(pulled) == num_pulled
        assert [(batch.step, batch.world_loss_tokens) for batch in group] == counts
        assert all((batch.loss_tokens, batch.world_task_tokens) == (1, None) for batch in group)
    assert list(iterator) == []


def _count_tasks(rank: int, world_size: int, counts: Tensor) -> list[list[list[int]]]:
    dp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    mine = counts[dp.get_local_rank()]
    groups: Any = accumulate(_batches([9, 9, 9]), 2, task_tokens=lambda batch: mine[batch.step], group=dp)
    return [[batch.world_task_tokens.tolist() for batch in group] for group in groups]


def test_loss_tokens_of_tasks_are_counted_over_the_ranks_and_steps_of_an_optimizer_step(ranks: RankPool) -> None:
    # [data-parallel ranks, steps, tasks]
    counts = torch.tensor([[[1, 0, 7], [2, 0, 0], [4, 0, 1]], [[10, 0, 0], [20, 0, 3], [0, 5, 0]]])
    for tokens in ranks.run(4, _count_tasks, counts):
        assert tokens == [[[33, 0, 10], [33, 0, 10]], [[4, 5, 1]]]


def test_floats_are_sums_of_weights_added_up_in_float64() -> None:
    sums = torch.tensor([[0.5, 2**24], [0.25, 1]], dtype=torch.float32)
    ((first, second),) = accumulate(_batches([9, 9]), 2, task_tokens=lambda batch: sums[batch.step])
    assert first.world_task_tokens is second.world_task_tokens
    assert first.world_task_tokens is not None
    assert first.world_task_tokens.tolist() == [0.75, 2**24 + 1]


def _raises_unlike_others(rank: int, world_size: int) -> None:
    """Accumulate other numbers of steps, count other tasks, or count them on one rank alone."""
    ones = torch.ones(2 + rank, dtype=torch.int64)
    for num_steps, task_tokens, message in (
        (1 + rank, None, "num_steps differs between ranks: 1 on rank 0, 2 on rank 1"),
        (1, lambda batch: ones, r"the shape of task_tokens differs between ranks: \[2\] on rank 0, \[3\] on rank 1"),
        (1, None if rank else lambda batch: ones, "task_tokens differs between ranks: given on rank 0, None on rank 1"),
    ):
        with pytest.raises(RankError, match=f"^{message}$"):
            list(accumulate(_batches([1, 1]), num_steps, task_tokens=task_tokens))


def test_what_differs_between_ranks_is_an_error_on_all_before_they_wait_for_each_other(ranks: RankPool) -> None:
    ranks.run(2, _raises_unlike_others)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_steps must be at least 1, got 0"):
        list(accumulate(_batches([1]), 0))
    wrong: Any = "dp"
    with pytest.raises(ConfigError, match="group must be a process group or a device mesh, got str"):
        accumulate(_batches([1]), 1, group=wrong)
    with pytest.raises(ConfigError, match="a batch has no world_loss_tokens; balance the loader, or use a Balancer"):
        list(accumulate(_batches([3, None]), 2))
    for tokens, got in (
        (torch.tensor(3), r"torch.int64 \[\]"),
        (torch.ones(1, 2), r"torch.float32 \[1, 2\]"),
        ([3], "list"),
    ):
        with pytest.raises(ConfigError, match=rf"task_tokens must return a tensor \[tasks\], got {got}; add up boolea"):
            list(accumulate(_batches([1]), 1, task_tokens=Mock(return_value=tokens)))
