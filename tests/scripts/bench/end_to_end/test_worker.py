import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from end_to_end.experiments import Run, Workload
from end_to_end.results import RunResult
from end_to_end.tasks import WorkerTask
from end_to_end.worker import measured
from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import HSTUCost
from tests.ranks import RankPool
from tests.scripts.bench.end_to_end import made_up
from trainer.config import TrainConfig
from trainer.world import World, divide

STEPS = {"steps": 8, "rounds": 2, "warmup_steps": 4, "skipped_steps": 1}
WORKLOAD = Workload(
    lengths={"skewed": "lognormal:mean=12,std=20,high=64"}, item_rows=500, user_rows=300, num_batches=3, **STEPS
)
SIZES = {"hidden": 16, "heads": 2, "layers": 1, "embedding_dim": 8, "max_history_length": 64}
SETTINGS = {**SIZES, "num_tasks": 2, "user_id": True, "batch_size": 6, "attention": "padded"}


def make_task(gpus: int, **settings: Any) -> WorkerTask:
    run = Run(name="a run", settings=TrainConfig(**{**SETTINGS, **settings}), gpus=gpus)
    return WorkerTask(run=run, workload=WORKLOAD, lengths="skewed", result=Path("not written"), cost_result=None)


def run(rank: int, world_size: int, settings: dict[str, Any]) -> RunResult:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    task = make_task(world_size, **settings)
    world = World(rank=rank, size=world_size, device=torch.device("cpu"))
    return measured(task, divide(world, task.run.settings.tensor_parallel))


@pytest.fixture(scope="module")
def balanced(ranks: RankPool) -> list[RunResult]:
    return ranks.run(2, run, {"balance": "all-to-all"})


@pytest.fixture(scope="module")
def read(ranks: RankPool) -> list[RunResult]:
    return ranks.run(2, run, {"balance": "no-exchange"})


@pytest.fixture(scope="module")
def unbalanced(ranks: RankPool) -> Any:
    return ranks.run(2, run, {"balance": "none"})[0]


def test_balancing_changes_who_trains_samples(balanced: list[RunResult], unbalanced: RunResult, tmp_path: Path) -> None:
    for rank, result in enumerate(balanced):
        # Background times are each rank's own.
        of_rank: dict[str, Any] = {"plan_seconds": np.zeros(0), "gather_seconds": np.zeros(0)}
        balance = dataclasses.replace(made_up.given(result.balance), **of_rank)
        dataclasses.replace(result, balance=balance).save(tmp_path / str(rank))
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()
    before, after = made_up.given(unbalanced.balanced), made_up.given(balanced[0].balanced)
    for name in ("tokens", "pairs", "predictions", "loads"):
        np.testing.assert_array_equal(getattr(before, name).sum(0), getattr(after, name).sum(0))
    for batch in range(WORKLOAD.num_batches):
        loaded, trained = (np.sort(work.sample_tokens[:, batch], axis=None) for work in (before, after))
        np.testing.assert_array_equal(loaded, trained)
    assert after.loads.max(0).sum() < before.loads.max(0).sum()


def test_batches_are_the_same_with_no_exchange(balanced: list[RunResult], read: list[RunResult]) -> None:
    for kind in ("balanced", "even", "balance"):
        exchanged, own = (made_up.given(getattr(result[0], kind)) for result in (balanced, read))
        for name in (field.name for field in dataclasses.fields(own) if not field.name.endswith("_seconds")):
            np.testing.assert_array_equal(getattr(own, name), getattr(exchanged, name))
    assert not made_up.given(read[0].balance).gather_seconds.any()


def test_work_and_balance_agree(balanced: list[RunResult], unbalanced: RunResult) -> None:
    for result in (balanced[0], unbalanced):
        work, balance = made_up.given(result.balanced), made_up.given(result.balance)
        np.testing.assert_array_equal(balance.tokens, work.tokens.sum(0))
        np.testing.assert_array_equal(balance.samples, [12, 12, 12])
        np.testing.assert_array_equal(work.tokens, work.sample_tokens.sum(2))
        # History tokens see those before them and themselves; none are candidates.
        sizes = work.sample_tokens
        np.testing.assert_array_equal(work.pairs, (sizes * (sizes + 1) // 2).sum(2))
        np.testing.assert_array_equal(work.predictions, ((sizes - 1) // 2).sum(2))  # all but the user, every other one
        cost = HSTUCost(**{name: value for name, value in (result.cost or {}).items() if name != "name"})
        np.testing.assert_array_equal(work.loads, cost.of_tokens(sizes, np.zeros_like(sizes)).sum(2))
    assert not made_up.given(unbalanced.balance).moved_samples.any()
    assert made_up.given(balanced[0].balance).moved_samples.all()


def test_even_batches_cost_the_mean(balanced: list[RunResult]) -> None:
    even, work = made_up.given(balanced[0].even), made_up.given(balanced[0].balanced)
    np.testing.assert_array_equal(even.sample_tokens[0], even.sample_tokens[1])
    np.testing.assert_allclose(even.loads[0], work.loads.mean(0), rtol=0.02)  # rounded to whole events of 6 samples


@pytest.mark.parametrize("results", ["balanced", "read"])
def test_kinds_of_batches_take_turns_another_one_first(results: str, request: pytest.FixtureRequest) -> None:
    segments = request.getfixturevalue(results)[0].segments
    rounds = (("live", "prepared", "even"), ("prepared", "even", "live"))
    expected = [(number, kind) for number, kinds in enumerate(rounds) for kind in kinds]
    assert [(segment.round, segment.kind) for segment in segments] == expected
    first = {"live": WORKLOAD.warmup_steps, "prepared": WORKLOAD.warmup_steps, "even": WORKLOAD.warmup_steps}
    for segment in segments:
        first[segment.kind] += WORKLOAD.skipped_steps
        assert segment.batch[0] == first[segment.kind] % WORKLOAD.num_batches
        first[segment.kind] += len(segment.batch)
        assert segment.marks.shape == (2, 4, 5)
        assert (np.diff(segment.marks, axis=2) >= 0).all()
        np.testing.assert_array_equal(segment.marks[:, 1:, 0], segment.marks[:, :-1, 4])
        np.testing.assert_array_equal(np.diff(segment.batch) % WORKLOAD.num_batches, 1)


def test_another_number_of_processes_than_the_task_says_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the task is for 4 processes, not 2; start so many with torchrun"):
        measured(make_task(4), World(rank=0, size=2, device=torch.device("cpu")))


@pytest.mark.parametrize("balance_by", ["all-to-all", "no-exchange"])
def test_ranks_that_divide_heads_train_the_same_batches(ranks: RankPool, balance_by: str) -> None:
    sharded = {"embeddings": "sharded", "min_sharded_rows": 1, "pipeline": "sparse-dist", "routing": "roundrobin"}
    settings = {"tensor_parallel": 2, "balance": balance_by, **sharded}
    result = ranks.run(4, run, settings)[0]
    assert {name: result.settings[name] for name in settings} == settings
    assert (result.gpus, result.data_ranks) == (4, 2)
    work, balance, even = (made_up.given(part) for part in (result.balanced, result.balance, result.even))
    np.testing.assert_array_equal(work.sample_tokens[0], work.sample_tokens[1])
    np.testing.assert_array_equal(work.sample_tokens[2], work.sample_tokens[3])
    np.testing.assert_array_equal(work.loads[::2].T, balance.after)
    np.testing.assert_array_equal(even.sample_tokens[0], even.sample_tokens[3])


@pytest.mark.parametrize("options", [{"balance": "all-to-all"}, {"embeddings": "sharded", "min_sharded_rows": 1}])
def test_a_cost_is_fitted_before_a_run_is_measured(ranks: RankPool, options: dict[str, Any]) -> None:
    first, second = ranks.run(2, run, {**options, "refit_every": 6})
    # Of such a small model, times say anything: the cost may be fitted or stay.
    assert first.cost == second.cost
    assert made_up.given(first.cost)["name"] in ("HSTUCost", "MeasuredCost")
    assert len(first.segments) == 3 * WORKLOAD.rounds
    assert all(np.isfinite(segment.marks).all() for segment in first.segments)
