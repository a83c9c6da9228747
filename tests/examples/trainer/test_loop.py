import dataclasses
import shutil
import signal
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from evenrank.core.errors import ConfigError, DataError, RankError
from evenrank.core.settings import check_use, rules_of
from evenrank.dataloader.codes import read_codes
from evenrank.datasets import open_store, read_manifest
from evenrank.training import BinaryAUC, ClassificationMetrics
from tests.conftest import make_small_dataset
from tests.examples.trainer.jobs import (
    SHARDED,
    Trained,
    check_failures,
    log_lines,
    run,
    settings,
    together,
    train_on_cpu,
)
from tests.ranks import RankPool
from trainer.config import TrainConfig
from trainer.data import check_names
from trainer.evaluation import ActionEvaluation
from trainer.job import run_job


def test_a_job_that_dies_within_a_window_finishes_it(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    def job(out: str, **more: Any) -> dict[str, Any]:
        options = {"window": 4, "strategy": "karmarkar-karp", "dropout": 0.3}
        return settings(tmp_path / out, small_dataset, batch_size=12, **options, **more)

    samples, losses = together(ranks.run(2, run, job("whole")))
    ranks.run(2, run, job("parts", checkpoint_every=3), 6)
    shutil.copytree(tmp_path / "parts", tmp_path / "other ranks")
    rest, rest_losses = together(ranks.run(2, run, job("parts")))
    assert list(rest) == list(range(4, len(samples) + 1))
    assert rest == {step: samples[step] for step in rest}
    assert rest_losses == {step: losses[step] for step in rest_losses}
    elsewhere, _ = together(ranks.run(3, run, job("other ranks")))
    done = [samples[step] for step in (1, 2, 3)]
    assert sorted(chain(*done, *elsewhere.values())) == sorted(chain(*samples.values()))


OF_ACTIONS = ("auc", "gauc", "accuracy", "normalized_entropy")
ROUTED = {**SHARDED, "pipeline": "none", "routing": "roundrobin"}


@pytest.mark.parametrize(
    ("options", "metrics"),
    [
        (
            {"num_tasks": 2, "user_id": True, "balance": "all-gather"},
            {f"{name}_{task}" for name in OF_ACTIONS for task in "01"},
        ),
        ({"task": "retrieval", "k": 5, "precision": "bf16", **ROUTED}, {"recall@5", "ndcg@5"}),
        ({"model": "semantic-ids", "code_levels": 2, "codebook_size": 8}, {"recall@10", "ndcg@10"}),
    ],
    ids=["several tasks", "retrieval, routed", "semantic ids"],
)
def test_every_task_trains_and_is_measured(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, options: dict[str, Any], metrics: set[str]
) -> None:
    ranks.run(2, run, settings(tmp_path, small_dataset, batch_size=12, learning_rate=0.01, **options))
    (evaluation,) = log_lines(tmp_path, "eval")
    assert evaluation.keys() - {"kind", "step"} == metrics
    assert all(0 <= evaluation[name] <= (2 if "entropy" in name else 1) for name in metrics)
    losses = [line["loss"] for line in log_lines(tmp_path, "train")]
    assert losses[-1] < losses[0]


def test_a_signal_ends_all_ranks_the_next_run_evaluates(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    def job(out: str) -> dict[str, Any]:
        return settings(tmp_path / out, small_dataset, batch_size=12, eval_every=4, max_steps=8, epochs=2, **SHARDED)

    ranks.run(2, run, job("whole"))
    steps: list[int]
    for signal_at, steps in ((3, [1, 2, 3, 4]), (7, [5, 6, 7, 8]), (0, []), (0, [])):
        parts = ranks.run(2, run, job("parts"), 0, signal_at)
        assert [list(part.samples) for part in parts] == [steps] * 2
        assert [part.stopped_by for part in parts] == [signal.SIGTERM if signal_at else None] * 2
        if signal_at == 3:
            assert log_lines(tmp_path / "parts", "eval") == []
    assert [line["step"] for line in log_lines(tmp_path / "parts", "eval")] == [4, 8]
    assert log_lines(tmp_path / "parts", "eval") == log_lines(tmp_path / "whole", "eval")


def test_a_job_resumes_with_its_own_data_and_codes_alone(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    num_items = read_manifest(small_dataset).vocabulary_sizes["item_id"]
    table = np.arange(2 * num_items).reshape(2, num_items) % 30
    first, moved, other = tmp_path / "first.npy", tmp_path / "moved.npy", tmp_path / "other"
    make_small_dataset(other, seed=8)
    np.save(first, table)

    def job(steps: int, codes: Path, data: Path = small_dataset, **more: Any) -> dict[str, Any]:
        options = {"model": "semantic-ids", "batch_size": 12, "max_steps": steps, "codes": str(codes), **more}
        return settings(tmp_path / "out", data, **options)

    ranks.run(2, run, job(1, first))
    codes = read_codes(first).describe()
    names = [f"synthetic {read_manifest(data).content_hash[:16]}" for data in (small_dataset, other)]
    message = "was saved with {} = {!r}, this job has {!r}; choose another --out"
    check_failures(ranks.try_run(2, run, job(2, first, other)), message.format("dataset", *names))
    first.rename(moved)
    assert list(ranks.run(2, run, job(2, moved, seed=3))[0].samples) == [2]
    np.save(moved, table[:, ::-1])
    message = message.format("codes", codes, read_codes(moved).describe())
    check_failures(ranks.try_run(2, run, job(3, moved)), message)


Evaluated = tuple[Tensor, Tensor, Tensor]  # logits, targets, users


def _run_watched(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Trained, list[list[Evaluated]]]:
    """Run a job; return what it trained, and the labels of each step of each evaluation on this rank."""
    evaluations: list[list[Evaluated]] = []
    reset, update = ActionEvaluation._measure, BinaryAUC.update

    def begin(evaluation: ActionEvaluation) -> dict[str, float]:
        evaluations.append([])
        return reset(evaluation)

    def note(metric: BinaryAUC, scores: Tensor, targets: Tensor, *, groups: Tensor) -> None:
        evaluations[-1].append((scores.clone(), targets, groups))
        update(metric, scores, targets, groups=groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActionEvaluation, "_measure", begin)
        patch.setattr(BinaryAUC, "update", note)
        return run(rank, world_size, options), evaluations


@pytest.mark.parametrize(
    "options",
    [{}, {"balance": "all-to-all"}, {**SHARDED, "num_workers": 0}],
    ids=["no exchange", "balancer", "read ahead by a pipeline"],
)
def test_eval_steps_bound_each_evaluation_and_change_nothing_else(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    def job(out: str, **more: Any) -> tuple[Any, list[list[list[Evaluated]]], list[dict[str, Any]]]:
        of_job = settings(tmp_path / out, small_dataset, batch_size=8, eval_every=3, max_steps=7, **options, **more)
        parts = ranks.run(2, _run_watched, of_job)
        trained = together([trained for trained, _ in parts])
        return trained, [evaluations for _, evaluations in parts], log_lines(tmp_path / out, "eval")

    trained, evaluations, whole = job("whole")
    num_steps = len(evaluations[0][0])
    assert num_steps > 2
    bounded, bounded_evaluations, lines = job("bounded", eval_steps=2)
    assert bounded == trained
    store = open_store(small_dataset, "eval")
    labels = np.repeat(store.columns["user_id"][: 2 * 2 * 8], store.lengths[: 2 * 2 * 8].clip(max=40))
    assert [len(of_rank) for of_rank in bounded_evaluations] == [3, 3]  # after steps 3, 6 and 7
    for index, line in enumerate(lines):
        of_ranks = [of_rank[index] for of_rank in bounded_evaluations]
        assert [len(steps) for steps in of_ranks] == [2, 2]
        logits, targets, users = map(torch.cat, zip(*(step for steps in of_ranks for step in steps), strict=True))
        assert sorted(users.tolist()) == sorted(labels.tolist())
        auc, of_labels = BinaryAUC(), ClassificationMetrics()
        auc.update(logits, targets, groups=users)
        of_labels.update(logits, targets)
        expected = {"auc": auc.compute()[0], "gauc": auc.compute_grouped()[0], **of_labels.compute()}
        assert {name: line[name] for name in OF_ACTIONS} == {name: expected[name] for name in OF_ACTIONS}
    _, _, more_than_all = job("more than all", eval_steps=num_steps + 1)
    assert more_than_all == whole
    assert lines != whole


def _run_differently(rank: int, world_size: int, options: dict[str, Any]) -> None:
    run(rank, world_size, {**options, "eval_steps": 2 + rank})


def test_eval_steps_that_differ_between_ranks_are_an_error_on_all_ranks(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    failures = ranks.try_run(2, _run_differently, settings(tmp_path, small_dataset, max_steps=1))
    check_failures(failures, "eval_steps differs between ranks: 2 on rank 0, 3 on rank 1", kinds=[RankError])


class _Watched(TrainConfig):
    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        _Watched.seen.add(name)
        return super().__getattribute__(name)


def _settings_looked_at(rank: int, world_size: int, options: dict[str, Any]) -> set[str]:
    """Run a job; return the settings that it has looked at after it has checked them."""
    config = _Watched(**options)
    _Watched.seen.clear()
    check_names(config)
    train_on_cpu(rank, world_size, config)
    return set(_Watched.seen)


@pytest.mark.parametrize(
    "options",
    [
        {"num_tasks": 2, **SHARDED},
        {"balance": "all-to-all"},
        {"task": "retrieval", "balance": "none"},
        {"model": "semantic-ids"},
        {"time_windows": "1w"},
    ],
    ids=["several tasks, sharded", "ranking", "retrieval", "semantic ids", "windows of time"],
)
def test_no_option_is_ignored(ranks: RankPool, small_dataset: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    options = settings(tmp_path, small_dataset, batch_size=12, max_steps=1, hidden=8, layers=1, **options)
    (seen,) = ranks.run(1, _settings_looked_at, options)
    rules, chosen = rules_of(TrainConfig), dataclasses.asdict(TrainConfig(**options))
    for name in rules.keys() - seen:
        with pytest.raises(ConfigError, match="applies to"):
            check_use(rules, chosen, [name])


@pytest.mark.parametrize("ways", [("all-to-all", "no-exchange"), ("no-exchange", "none", "all-to-all")])
def test_a_job_resumes_with_another_way_to_balance_as_if_it_had_always_had_it(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, ways: tuple[str, ...]
) -> None:
    def job(out: str, balance: str, steps: int) -> dict[str, Any]:
        return settings(tmp_path / out, small_dataset, balance=balance, batch_size=12, max_steps=steps, epochs=2)

    samples, losses = together(ranks.run(2, run, job("whole", ways[-1], 3 * len(ways))))
    resumed: dict[int, list[int]] = {}
    last: dict[int, float] = {}
    for number, way in enumerate(ways, 1):
        more, last = together(ranks.run(2, run, job("parts", way, 3 * number)))
        assert list(more) == [3 * number - 2, 3 * number - 1, 3 * number]
        resumed |= more
    assert resumed == samples
    assert last == pytest.approx({step: losses[step] for step in last}, rel=1e-5)


def test_a_job_without_data_makes_a_dataset_once(ranks: RankPool, tmp_path: Path) -> None:
    options = {"out": str(tmp_path), "batch_size": 8}
    ranks.run(2, run, {**options, "max_steps": 1})
    manifest = tmp_path / "synthetic" / "manifest.json"
    made = manifest.stat().st_mtime_ns
    resumed = ranks.run(2, run, {**options, "max_steps": 2})
    assert [list(part.samples) for part in resumed] == [[2], [2]]
    assert manifest.stat().st_mtime_ns == made


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"data": "missing"}, DataError, "missing"),
        ({"codes": "missing.npy", "model": "semantic-ids"}, DataError, "missing.npy"),
        ({"task": "retrieval", "pipeline": "sparse-dist"}, ConfigError, "use --pipeline none"),
        ({"pipeline": "fast"}, ConfigError, "no pipeline is called 'fast'; known are none, sparse-dist, prefetch"),
        ({"task": "retrieval", "time_windows": "1d"}, ConfigError, "use --task ranking or --model semantic-ids with"),
        ({"attention": "flash"}, ConfigError, "no attention is called 'flash'; known are padded, triton, auto"),
        ({"out": "/dev/null/out"}, DataError, "Not a directory"),
    ],
)
def test_a_mistake_is_an_error_of_one_line_on_all_ranks(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, options: dict[str, Any], kind: Any, message: str
) -> None:
    failures = ranks.try_run(2, run, {**settings(tmp_path, small_dataset), **options})
    check_failures(failures, message, kinds=[kind, RankError])


def test_an_unknown_name_is_an_error_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="no strategy is called 'best'; known are none, "):
        run_job(TrainConfig(strategy="best"))
    with pytest.raises(
        ConfigError, match="must be a number of hours, days or weeks, such as 6h, 1d or 1w, got 'daily'"
    ):
        run_job(TrainConfig(time_windows="daily"))
