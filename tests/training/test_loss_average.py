import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from evenrank.core.errors import ConfigError
from evenrank.dataloader import JaggedBatch
from evenrank.training import LossAverage
from tests.ranks import RankPool

Step = list[tuple[float, int]]  # of each task, the sum of the loss and the loss tokens


def _batch(loss_tokens: int = 0) -> JaggedBatch:
    # What all ranks have is nothing to average by: it may be that of several steps.
    return JaggedBatch(batch_size=1, num_real=0, loss_tokens=loss_tokens, world_loss_tokens=10**6)


def _average(rank: int, world_size: int, dp_size: int, num_tasks: int, steps: list[list[Step]]) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (dp_size, world_size // dp_size), mesh_dim_names=("dp", "tp"))
    average = LossAverage(num_tasks, group=mesh["dp"])
    averages = []
    for half in (0, 1):  # the steps before a reset and those after it
        for step in steps[mesh["dp"].get_local_rank()][half::2]:
            sums, tokens = zip(*step, strict=True)
            average.update(torch.tensor(sums), _batch(), task_tokens=torch.tensor(tokens))
        averages.append(average.compute())
        assert repr(average.compute()) == repr(averages[-1])  # also if it is NaN
        average.reset()
    return averages


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[int, int, list[list[Step]]]:
    """Draw the number of data-parallel ranks and of tasks, and the steps of each rank, possibly none."""
    dp_size, num_tasks = draw(st.sampled_from([4, 2])), draw(st.integers(1, 3))
    of_task = st.tuples(st.floats(-100, 100, width=32), st.integers(0, 1000))
    steps = st.lists(st.lists(of_task, min_size=num_tasks, max_size=num_tasks), max_size=4)
    return dp_size, num_tasks, draw(st.lists(steps, min_size=dp_size, max_size=dp_size))


@given(world=_worlds())
@settings(max_examples=15)
def test_averages_are_of_all_data_parallel_ranks(ranks: RankPool, world: tuple[int, int, list[list[Step]]]) -> None:
    dp_size, num_tasks, steps_of_ranks = world
    results = ranks.run(4, _average, dp_size, num_tasks, steps_of_ranks)
    for half in (0, 1):
        steps = [step for of_rank in steps_of_ranks for step in of_rank[half::2]]
        for task in range(num_tasks):
            tokens = sum(step[task][1] for step in steps)
            expected = math.fsum(step[task][0] for step in steps) / tokens if tokens else math.nan
            for averages in results:
                assert averages[half][task] == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)


def test_each_loss_token_of_a_batch_counts_for_all_tasks_unless_others_are_given() -> None:
    average = LossAverage(2)
    assert all(math.isnan(mean) for mean in average.compute())
    average.update(torch.tensor([6.0, 2.0]), _batch(4))
    assert average.compute() == [1.5, 0.5]
    average.update(torch.tensor([4.0, 2.0]), _batch(4), task_tokens=torch.tensor([1, 0]))
    assert average.compute() == [10 / 5, 4 / 4]
    scalar = LossAverage()
    scalar.update(torch.tensor(2.0**25, requires_grad=True) * 2, _batch(0))
    for _ in range(64):  # small losses, without loss of precision
        scalar.update(torch.tensor(1.0), _batch(1))
    assert scalar.compute() == [(2**26 + 64) / 64]


def test_other_numbers_of_tasks_are_refused() -> None:
    average = LossAverage(2)
    for num_tasks in (1, 3):
        with pytest.raises(ConfigError, match=rf"loss_sums must have one entry per task, 2, got \[{num_tasks}\]"):
            average.update(torch.ones(num_tasks), _batch(1))
        with pytest.raises(ConfigError, match=rf"task_tokens must have one entry per task, 2, got \[{num_tasks}\]"):
            average.update(torch.ones(2), _batch(1), task_tokens=torch.ones(num_tasks))
    with pytest.raises(ConfigError, match="num_tasks must be at least 1, got 0"):
        LossAverage(0)
    with pytest.raises(ConfigError, match="loss_sums are on meta, but added up on cpu; pass its device="):
        LossAverage().update(torch.ones(1, device="meta"), _batch(1))


def _disagree(rank: int, world_size: int) -> None:
    LossAverage(1 + rank)


def test_ranks_with_different_numbers_of_tasks_learn_of_it_at_once(ranks: RankPool) -> None:
    for failure in ranks.try_run(2, _disagree):
        assert failure.type_name == "RankError"
        assert failure.message == "num_tasks differs between ranks: 1 on rank 0, 2 on rank 1"
