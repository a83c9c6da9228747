"""Jobs on ranks: what they train, evaluate, log, and how they go on after a crash, a signal, or on other ranks."""

import dataclasses
import json
import shutil
import signal
from collections import Counter
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.settings import check_use, help_texts, rules_of
from evenrank.dataloader.balance.metrics.log import LogRecord, RunRecord, parse_line
from evenrank.datasets import open_store
from evenrank.training import BinaryAUC, ClassificationMetrics
from tests.conftest import make_small_dataset
from tests.datasets.crafted import windows_of
from tests.examples.trainer.jobs import SHARDED, Trained, log_lines, run, settings, together, train_on_cpu
from tests.ranks import RankPool
from trainer import TrainConfig, World
from trainer.job import _lock
from trainer.monitors import JobLog, line_of

OF_ACTIONS = ("auc", "gauc", "accuracy", "normalized_entropy")


def test_a_job_that_dies_within_a_window_goes_on_bit_for_bit_and_on_other_ranks_trains_each_sample_once(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    def job(out: str, **more: Any) -> dict[str, Any]:
        options = {"window": 4, "strategy": "karmarkar-karp", "dropout": 0.3, "warmup_steps": 5}
        return settings(tmp_path / out, small_dataset, batch_size=12, **options, **more)

    samples, losses = together(ranks.run(2, run, job("whole")))
    ranks.run(2, run, job("parts", checkpoint_every=3), 6)
    shutil.copytree(tmp_path / "parts", tmp_path / "other ranks")
    rest, rest_losses = together(ranks.run(2, run, job("parts")))
    assert list(rest) == list(range(4, len(samples) + 1))  # the checkpoint of step 6 was never begun
    assert rest == {step: samples[step] for step in rest}
    assert rest_losses == {step: losses[step] for step in rest_losses}
    assert log_lines(tmp_path / "parts", "eval") == log_lines(tmp_path / "whole", "eval")
    elsewhere, _ = together(ranks.run(3, run, job("other ranks")))
    done = [samples[step] for step in (1, 2, 3)]
    assert sorted(chain(*done, *elsewhere.values())) == sorted(chain(*samples.values()))


@pytest.mark.parametrize("options", [{}, {"balance": "all-to-all", **SHARDED}], ids=["replicated", "sharded"])
def test_a_job_has_the_losses_of_one_rank_and_resumes_on_others(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    def train(out: str, num_ranks: int, max_steps: int, balance: str = "none") -> Any:
        more = {"epochs": 2, "learning_rate": 0.01, "log_every": 1, "balance": balance, **options}
        job = settings(tmp_path / out, small_dataset, batch_size=12 // num_ranks, max_steps=max_steps, **more)
        return together(ranks.run(num_ranks, run, job))

    samples, losses = train("whole", 1, 21)
    parts = [train("parts", 2, 4), train("parts", 3, 20, "no-exchange"), train("parts", 1, 21)]
    assert [(min(part), max(part)) for part, _ in parts] == [(1, 4), (5, 20), (21, 21)]
    for part_samples, part_losses in parts:
        assert part_samples == {step: samples[step] for step in part_samples}
        assert part_losses == pytest.approx({step: losses[step] for step in part_losses}, rel=1e-4)
    whole, divided = (
        {(line["step"], name): line[name] for line in log_lines(tmp_path / out, "train") for name in ("tokens", "loss")}
        for out in ("whole", "parts")
    )
    assert divided == pytest.approx(whole, rel=1e-4)
    ends = [log_lines(tmp_path / out, "eval")[-1] for out in ("whole", "parts")]
    assert ends[1] == pytest.approx(ends[0], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "metrics"),
    [
        (
            {"num_tasks": 2, "user_id": True, "balance": "all-gather"},
            {f"{name}_{one}" for name in OF_ACTIONS for one in "01"},
        ),
        ({"max_num_candidates": 3, "positive_action": 2, "precision": "bf16", "recompute": True}, set(OF_ACTIONS)),
    ],
    ids=["several tasks", "candidates"],
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


def test_a_signal_ends_all_ranks_and_the_next_run_evaluates(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    def job(out: str) -> dict[str, Any]:
        return settings(tmp_path / out, small_dataset, batch_size=12, eval_every=4, max_steps=8, epochs=2, **SHARDED)

    ranks.run(2, run, job("whole"))
    steps: list[int]
    for signal_at, steps in ((3, [1, 2, 3, 4]), (7, [5, 6, 7, 8]), (0, []), (0, [])):
        parts = ranks.run(2, run, job("parts"), 0, signal_at)
        assert [list(part.samples) for part in parts] == [steps] * 2
        assert [part.stopped_by for part in parts] == [[signal.SIGTERM if signal_at else None]] * 2
        if signal_at == 3:
            assert log_lines(tmp_path / "parts", "eval") == []
    assert [line["step"] for line in log_lines(tmp_path / "parts", "eval")] == [4, 8]
    assert log_lines(tmp_path / "parts", "eval") == log_lines(tmp_path / "whole", "eval")


@pytest.mark.parametrize("options", [{"balance": "all-to-all"}, {**SHARDED, "num_workers": 0}])
def test_an_evaluation_has_the_metrics_of_its_steps_and_changes_no_training(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    def job(out: str, **more: Any) -> list[Trained]:
        of_job = settings(tmp_path / out, small_dataset, batch_size=8, eval_every=3, max_steps=7, **options, **more)
        parts: list[Trained] = ranks.run(2, run, of_job)
        return parts

    whole, bounded = job("whole"), job("bounded", eval_steps=2)
    assert together(bounded) == together(whole)
    assert len(whole[0].evaluated[0]) > 2
    store = open_store(small_dataset, "eval")
    labels = np.repeat(store.columns["user_id"][: 2 * 2 * 8], store.lengths[: 2 * 2 * 8].clip(max=40))
    lines = log_lines(tmp_path / "bounded", "eval")
    assert [line["step"] for line in lines] == [3, 6, 7]
    for index, line in enumerate(lines):
        of_ranks = [part.evaluated[index] for part in bounded]
        assert [len(steps) for steps in of_ranks] == [2, 2]
        logits, targets, users = map(torch.cat, zip(*chain(*of_ranks), strict=True))
        assert sorted(users.tolist()) == sorted(labels.tolist())
        auc, of_labels = BinaryAUC(), ClassificationMetrics()
        auc.update(logits, targets, groups=users)
        of_labels.update(logits, targets)
        expected = {"auc": auc.compute()[0], "gauc": auc.compute_grouped()[0], **of_labels.compute()}
        assert {name: line[name] for name in OF_ACTIONS} == {name: expected[name] for name in OF_ACTIONS}


def test_each_window_of_time_is_evaluated_before_it_is_trained_also_after_a_crash_on_other_ranks(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    more = {"time_windows": "1w", "max_num_candidates": 2}
    options = settings(tmp_path / "whole", small_dataset, batch_size=16, **more)
    parts = ranks.run(2, run, options)
    store, lines = open_store(small_dataset), log_lines(tmp_path / "whole", "eval")
    windows = windows_of(store, 2, every="1w")
    last, cuts = windows.count - 1, [windows.of_epoch(window, [store])[0] for window in range(windows.count)]
    samples, _ = together(parts)
    # The events of windows are targets once each.
    times = store.columns["timestamp_ms"]
    trained: list[int] = []
    for window, sample in chain(*samples.values()):
        cut = cuts[window]
        assert cut.num_targets is not None
        trained += range(cut.ends[sample] - cut.num_targets[sample], cut.ends[sample])
    begins = [windows.times(window)[0].timestamp() * 1000 for window in range(1, windows.count)]
    assert sorted(trained) == np.flatnonzero(times < begins[-1]).tolist()
    assert [line["window"] for line in lines] == list(range(1, last + 1))
    for number, line in enumerate(lines):
        dates = [datetime.fromisoformat(line[name]).replace(tzinfo=UTC) for name in ("begin", "end")]
        assert dates == list(windows.times(line["window"]))
        is_in = (times >= begins[number]) & (times < dates[1].timestamp() * 1000)
        rows = np.searchsorted(store.offsets, np.flatnonzero(is_in), side="right") - 1
        users = Counter(user for part in parts for _, _, of_step in part.evaluated[number] for user in of_step.tolist())
        assert users == Counter(store.columns["user_id"][rows].tolist())
        assert line["targets"] == is_in.sum()
    died_at = lines[0]["step"] + 2
    options |= {"out": str(tmp_path / "parts"), "checkpoint_every": died_at - 1}
    first, _ = together(ranks.run(2, run, options, died_at))
    rest, _ = together(ranks.run(3, run, options))
    done = [first[step] for step in range(1, died_at)]
    assert sorted(chain(*done, *rest.values())) == sorted(chain(*samples.values()))
    assert [line["window"] for line in log_lines(tmp_path / "parts", "eval")] == [line["window"] for line in lines]


def test_a_job_resumes_with_its_own_data_and_settings_alone(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    make_small_dataset(tmp_path / "other", seed=8)
    ranks.run(2, run, settings(tmp_path / "out", small_dataset, max_steps=1))
    ends = "this job has 2; choose another --out, or the settings of that job"
    for options, message in (
        ({"data": str(tmp_path / "other")}, "load one that save_dmp wrote, of this model and optimizer"),
        ({"positive_action": 2}, f"was saved with positive_action = 1, {ends}"),
    ):
        failures = ranks.try_run(2, run, {**settings(tmp_path / "out", small_dataset), **options})
        assert [failure.type_name for failure in failures] == ["StateError"] * 2
        for failure in failures:
            assert failure.message.endswith(message)


def _run_differently(rank: int, world_size: int, options: dict[str, Any]) -> None:
    run(rank, world_size, {**options, "eval_steps": 2 + rank})


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        (_run_differently, {}, "eval_steps differs between ranks: 2 on rank 0, 3 on rank 1"),
        (run, {"data": "missing"}, "missing is not a dataset: no such folder"),
        (run, {"attention": "flash"}, "must be one of padded, triton, auto, got 'flash'"),
        (run, {"time_windows": "daily"}, "must be a number of hours, days or weeks, such as 6h, 1d or 1w, got 'daily'"),
        (run, {"out": "/dev/null/out"}, "Not a directory"),
    ],
)
def test_a_mistake_is_an_error_of_one_line_on_all_ranks(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, job: Any, options: dict[str, Any], message: str
) -> None:
    for failure in ranks.try_run(2, job, {**settings(tmp_path, small_dataset), **options}):
        assert message in failure.message
        assert "\n" not in failure.message


class _Watched(TrainConfig):
    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        _Watched.seen.add(name)
        return super().__getattribute__(name)


def _settings_looked_at(rank: int, world_size: int, options: dict[str, Any]) -> set[str]:
    """Run a job; return the settings that it has looked at after it has checked them."""
    config = _Watched(**options)
    _Watched.seen.clear()
    train_on_cpu(rank, world_size, config)
    return set(_Watched.seen)


@pytest.mark.parametrize("options", [{"num_tasks": 2, **SHARDED}, {"balance": "all-to-all"}, {"time_windows": "1w"}])
def test_no_setting_is_ignored(ranks: RankPool, small_dataset: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    options = settings(tmp_path, small_dataset, batch_size=12, max_steps=1, hidden=8, layers=1, **options)
    (seen,) = ranks.run(1, _settings_looked_at, options)
    rules, chosen = rules_of(TrainConfig), dataclasses.asdict(TrainConfig(**options))
    for name in rules.keys() - seen:
        with pytest.raises(ConfigError, match="applies to"):
            check_use(rules, chosen, [name])
    assert all(help_texts(TrainConfig)[name].endswith(".") for name in rules)


def test_steps_are_measured_on_all_ranks_compared_and_profiled(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"batch_size": 8, "log_every": 1, "epochs": 2, "compare_every": 3, "eval_every": 5, "profile": "2:4"}
    ranks.run(2, run, settings(tmp_path, small_dataset, checkpoint_every=7, refit_every=6, **options))
    first, *others = [parse_line(line) for line in (tmp_path / "balance.jsonl").read_bytes().splitlines()]
    records = [record for record in others if isinstance(record, LogRecord)]
    assert isinstance(first, RunRecord)
    assert (first.ranks, first.options["job"]["batch_size"], first.options["refit_every"]) == (2, 8, 6)
    assert [record.seen for record in records] == list(range(1, len(records) + 1))
    # Not the first step, nor those that begin with a checkpoint or an evaluation.
    unmeasured = [record.seen for record in records if record.compute_seconds is None]
    assert unmeasured[:4] == [1, 6, 8, 11]
    for record in records:
        assert record.is_balanced == ((record.step + record.epoch) % 3 != 1)
        if record.compute_seconds is not None and record.wait_seconds is not None:
            assert len(record.compute_seconds) == 2
            assert (record.compute_seconds > 0).all()
            assert (record.wait_seconds >= 0).all()
    last = log_lines(tmp_path, "train")[-1]
    assert last["measured_speedup"] == pytest.approx(last["compared_step_seconds"] / last["step_seconds"])
    trace = json.loads((tmp_path / "profile" / "steps-2-4.trace.json").read_text())
    spans = {event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#")}
    assert spans == {"ProfilerStep#2", "ProfilerStep#3"}
    ranks.run(1, run, settings(tmp_path, small_dataset, max_steps=len(records) + 2, log_every=2, epochs=3))
    assert sorted(path.name for path in tmp_path.glob("balance*")) == ["balance-2.jsonl", "balance.jsonl"]


def test_a_second_job_on_a_folder_is_refused(tmp_path: Path) -> None:
    with (
        _lock(tmp_path),
        pytest.raises(DataError, match=f"{tmp_path} is in use by another job; wait for it, or choose"),
    ):
        _lock(tmp_path).__enter__()


def test_lines_of_the_log_are_readable_complete_and_json(tmp_path: Path) -> None:
    numbers = {"loss": 0.69315, "step_ms": 14.26, "tokens": 1234567, "tflops": 212.34, "mfu": 0.2146}
    line = "step 300 | loss 0.6932 | tokens 1,234,567 | 14.3 ms | 212.3 TFLOP/s | MFU"
    assert line_of(300, numbers) == f"{line} 21.5 %"
    times = {"measured_idle_after": 0.021, "step_seconds": 0.0141, "measured_idle_before": 0.254}
    times |= {"compared_step_seconds": 0.0179, "measured_speedup": 1.27}
    measured = "idle 2.1 % of 14.1 ms | unbalanced 25.4 % of 17.9 ms, speed-up 1.27x"
    assert line_of(300, {**numbers, "mfu": float("nan"), **times}) == f"{line} unknown | {measured}"
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind": "train", "step": 1, "loss": 0.5}\n{"kind": "tra')  # of a job that was killed
    with JobLog(tmp_path, World(rank=0, size=1, device=torch.device("cpu"))) as log:
        log.record("eval", 2, {"auc": float("nan"), "loss": 0.25})
    assert log_lines(tmp_path, "eval") == [{"kind": "eval", "step": 2, "auc": None, "loss": 0.25}]
    assert len(path.read_text().splitlines()) == 2
