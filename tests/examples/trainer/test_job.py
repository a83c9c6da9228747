"""Jobs on ranks: what they train, evaluate, log, and how they go on after a crash, a signal, or on other ranks."""

import contextlib
import dataclasses
import json
import os
import signal
import warnings
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec.distributed import comm

from evenrank.core.errors import ConfigError
from evenrank.core.settings import check_use, help_texts, rules_of
from evenrank.dataloader.balance.metrics.log import LogRecord, RunRecord, parse_line
from evenrank.datasets import open_store
from evenrank.training import BinaryAUC, ClassificationMetrics
from tests.conftest import make_small_dataset
from tests.datasets.crafted import windows_of
from tests.ranks import RankPool
from trainer import TrainConfig, World
from trainer.job import Training, _lock, train
from trainer.monitors import JobLog, Monitors, line_of

SHARDED = {"embeddings": "sharded", "min_sharded_rows": 300, "pipeline": "sparse-dist"}
SETTINGS = {"hidden": 16, "heads": 2, "layers": 1, "embedding_dim": 8, "max_history_length": 40, "log_every": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a rank did in one run of a job."""

    samples: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by step, epoch and id of its samples
    losses: dict[int, float] = field(default_factory=dict)  # by step, this rank's share; the mean over ranks counts
    # By evaluation and step, logits, targets and users.
    evaluated: list[list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=list)
    stopped_by: list[int | None] = field(default_factory=list)
    looked_at: set[str] = field(default_factory=set)  # settings, after they were checked


class _Watched(TrainConfig):
    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        _Watched.seen.add(name)
        return super().__getattribute__(name)


class CrashError(Exception):
    """Stands for anything that ends a job in the middle of an epoch."""


def run_job_on_rank(
    rank: int, world_size: int, options: dict[str, Any], crash_at: int = 0, signal_at: int = 0
) -> Trained:
    """Run a job with options that differ from `SETTINGS` on this rank.

    After step `crash_at` it dies on all ranks; after step `signal_at` the last rank receives SIGTERM.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trained = Trained()
    note, evaluate, update = Monitors.note, Training._evaluate, BinaryAUC.update

    def note_step(monitors: Monitors, step: int, done: Any) -> None:
        note(monitors, step, done)
        ids = done.batch.sample_ids[: done.batch.num_real].tolist()
        trained.samples[step] = [(done.batch.epoch, one) for one in ids]
        trained.losses[step] = float(done.loss)
        if step == signal_at and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == crash_at:
            raise CrashError

    def note_evaluation(training: Training) -> None:
        trained.evaluated.append([])
        evaluate(training)

    def note_evaluated(metric: BinaryAUC, scores: Tensor, targets: Tensor, *, groups: Tensor) -> None:
        trained.evaluated[-1].append((scores.clone(), targets, groups))
        update(metric, scores, targets, groups=groups)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(CrashError):
        patch.setattr(Monitors, "note", note_step)
        patch.setattr(Training, "_evaluate", note_evaluation)
        patch.setattr(BinaryAUC, "update", note_evaluated)
        # TorchRec keeps these for the life of a process; the ranks of an earlier job would not take part again.
        comm._INTRA_PG = comm._CROSS_PG = None
        config = _Watched(**SETTINGS | options)
        _Watched.seen = trained.looked_at
        trained.stopped_by.append(train(config, World(rank=rank, size=world_size, device=torch.device("cpu"))))
    return trained


def _check_no_setting_is_ignored(options: dict[str, Any], looked_at: set[str]) -> None:
    rules = rules_of(TrainConfig)
    for name in rules.keys() - looked_at:
        with pytest.raises(ConfigError, match="applies to"):
            check_use(rules, dataclasses.asdict(TrainConfig(**SETTINGS | options)), [name])


def together(parts: list[Trained]) -> tuple[dict[int, list[tuple[int, int]]], dict[int, float]]:
    """Return the samples of all ranks and the loss, by step."""
    steps = parts[0].samples.keys()
    samples = {step: sorted(sample for part in parts for sample in part.samples[step]) for step in steps}
    return samples, {step: sum(part.losses[step] for part in parts) / len(parts) for step in steps}


def _settings(out: Path, data: Path, **options: Any) -> dict[str, Any]:
    return {"out": str(out), "data": str(data), **options}


def log_lines(out: Path, kind: str) -> list[dict[str, Any]]:
    """Return the complete lines of a kind in the log of a job."""
    path = out / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("options", [{}, {"balance": "all-to-all", **SHARDED}], ids=["replicated", "sharded"])
def test_a_job_has_the_losses_of_one_rank_and_resumes_on_others(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    def train(out: str, num_ranks: int, max_steps: int, balance: str = "none") -> Any:
        more = {"epochs": 2, "learning_rate": 0.01, "log_every": 1, "balance": balance, **options}
        job = _settings(tmp_path / out, small_dataset, batch_size=12 // num_ranks, max_steps=max_steps, **more)
        return together(ranks.run(num_ranks, run_job_on_rank, job))

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
    assert losses[21] < losses[1]


def test_a_signal_ends_all_ranks_and_the_next_run_goes_on_bit_for_bit_and_evaluates(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    random = {"window": 4, "strategy": "karmarkar-karp", "dropout": 0.3, "warmup_steps": 5}

    def run(out: str, *stops: int) -> list[Trained]:
        options = {"batch_size": 12, "eval_every": 4, "max_steps": 8, "epochs": 2, **random, **SHARDED}
        parts: list[Trained] = ranks.run(
            2, run_job_on_rank, _settings(tmp_path / out, small_dataset, **options), *stops
        )
        return parts

    samples, losses = together(run("whole"))
    for signal_at, steps in ((3, [1, 2, 3, 4]), (7, [5, 6, 7, 8]), (0, []), (0, [])):
        parts = run("parts", 0, signal_at)
        of_steps = {step: samples[step] for step in steps}, {step: losses[step] for step in steps}
        assert together(parts) == of_steps
        assert [part.stopped_by for part in parts] == [[signal.SIGTERM if signal_at else None]] * 2
        if signal_at == 3:
            assert log_lines(tmp_path / "parts", "eval") == []
    assert [line["step"] for line in log_lines(tmp_path / "parts", "eval")] == [4, 8]
    assert log_lines(tmp_path / "parts", "eval") == log_lines(tmp_path / "whole", "eval")


@pytest.mark.parametrize(
    "options",
    [
        {"balance": "all-to-all"},
        {**SHARDED, "num_workers": 0, "num_tasks": 2, "user_id": True, "balance": "all-gather"},
        {"max_num_candidates": 3, "positive_action": 2, "precision": "bf16", "recompute": True},
    ],
    ids=["history", "several tasks", "candidates"],
)
def test_an_evaluation_has_the_metrics_of_its_steps_and_changes_no_training(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    def job(out: str, **more: Any) -> list[Trained]:
        of_all = {"batch_size": 8, "eval_every": 3, "max_steps": 7}
        parts: list[Trained] = ranks.run(
            2, run_job_on_rank, _settings(tmp_path / out, small_dataset, **of_all, **options, **more)
        )
        return parts

    whole, bounded = job("whole"), job("bounded", eval_steps=2)
    _check_no_setting_is_ignored(options, whole[0].looked_at)
    assert together(bounded) == together(whole)
    assert len(whole[0].evaluated[0]) > 2
    store = open_store(small_dataset, "eval")
    most = options.get("max_num_candidates", 40)
    rows = np.flatnonzero(store.lengths >= options.get("max_num_candidates", 0))[: 2 * 2 * 8]
    evaluated = np.repeat(store.columns["user_id"][rows], store.lengths[rows].clip(max=most))
    lines, num_tasks = log_lines(tmp_path / "bounded", "eval"), options.get("num_tasks", 1)
    assert [line["step"] for line in lines] == [3, 6, 7]
    for index, line in enumerate(lines):
        of_ranks = [part.evaluated[index] for part in bounded]
        assert [len(steps) for steps in of_ranks] == [2, 2]
        logits, targets, users = map(torch.cat, zip(*chain(*of_ranks), strict=True))
        assert sorted(users.tolist()) == sorted(evaluated.tolist())
        auc, of_labels = BinaryAUC(num_tasks), ClassificationMetrics(num_tasks)
        auc.update(logits, targets, groups=users)
        of_labels.update(logits, targets)
        known, by_task = of_labels.compute(), zip(auc.compute(), auc.compute_grouped(), strict=True)
        expected = {name: known[name] for name in known if name.startswith(("accuracy", "normalized_entropy"))}
        for task, (of_all, of_users) in enumerate(by_task):
            suffix = "" if num_tasks == 1 else f"_{task}"
            expected |= {f"auc{suffix}": of_all, f"gauc{suffix}": of_users}
        assert {name: line[name] for name in line.keys() - {"kind", "step"}} == expected


def test_each_window_of_time_is_evaluated_before_it_is_trained_also_after_a_crash_on_other_ranks(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    more = {"time_windows": "1w", "max_num_candidates": 2}
    options = _settings(tmp_path / "whole", small_dataset, batch_size=16, **more)
    parts = ranks.run(2, run_job_on_rank, options)
    _check_no_setting_is_ignored(options, parts[0].looked_at)
    store, lines = open_store(small_dataset), log_lines(tmp_path / "whole", "eval")
    windows = windows_of(store, 2, every="1w")
    samples, _ = together(parts)
    times = store.columns["timestamp_ms"]
    begins = [windows.times(window)[0].timestamp() * 1000 for window in range(1, windows.count)]
    assert [line["window"] for line in lines] == list(range(1, windows.count))
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
    first, _ = together(ranks.run(2, run_job_on_rank, options, died_at))
    rest, _ = together(ranks.run(3, run_job_on_rank, options))
    done = [first[step] for step in range(1, died_at)]
    assert sorted(chain(*done, *rest.values())) == sorted(chain(*samples.values()))
    assert [line["window"] for line in log_lines(tmp_path / "parts", "eval")] == [line["window"] for line in lines]


def _run_differently(rank: int, world_size: int, options: dict[str, Any]) -> None:
    run_job_on_rank(rank, world_size, {**options, "eval_steps": 2 + rank})


def test_a_mistake_is_an_error_of_one_line_on_all_ranks(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    make_small_dataset(tmp_path / "other", seed=8)
    ranks.run(2, run_job_on_rank, _settings(tmp_path / "out", small_dataset, max_steps=1))
    ends = "this job has 2; choose another --out, or the settings of that job"
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (
            run_job_on_rank,
            {"data": str(tmp_path / "other")},
            "load one that save_dmp wrote, of this model and optimizer",
        ),
        (run_job_on_rank, {"positive_action": 2}, f"was saved with positive_action = 1, {ends}"),
        (
            run_job_on_rank,
            {"out": str(tmp_path / "new"), "data": "missing"},
            "missing is not a dataset: no such folder",
        ),
        (run_job_on_rank, {"out": "/dev/null/out"}, "Not a directory"),
        (_run_differently, {}, "eval_steps differs between ranks: 2 on rank 0, 3 on rank 1"),
        (
            run_job_on_rank,
            {"out": str(tmp_path)},
            f"{tmp_path} is in use by another job; wait for it, or choose another folder",
        ),
    ]
    with _lock(tmp_path):
        for job, options, message in cases:
            for failure in ranks.try_run(2, job, {**_settings(tmp_path / "out", small_dataset), **options}):
                assert message in failure.message
                assert "\n" not in failure.message


def test_steps_are_measured_on_all_ranks_compared_and_profiled(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    options = {"batch_size": 8, "log_every": 1, "epochs": 2, "compare_every": 3, "eval_every": 5, "profile": "2:4"}
    ranks.run(2, run_job_on_rank, _settings(tmp_path, small_dataset, checkpoint_every=7, refit_every=6, **options))
    first, *others = [parse_line(line) for line in (tmp_path / "balance.jsonl").read_bytes().splitlines()]
    records = [record for record in others if isinstance(record, LogRecord)]
    assert isinstance(first, RunRecord)
    assert (first.ranks, first.options["job"]["batch_size"], first.options["refit_every"]) == (2, 8, 6)
    assert [record.seen for record in records] == list(range(1, len(records) + 1))
    assert all(record.is_balanced == ((record.step + record.epoch) % 3 != 1) for record in records)
    # Not the first step, nor those that begin with a checkpoint or an evaluation.
    assert [record.seen for record in records if record.compute_seconds is None][:4] == [1, 6, 8, 11]
    for record in records:
        if record.compute_seconds is not None and record.wait_seconds is not None:
            assert [seconds > 0 for seconds in record.compute_seconds] == [True] * 2
            assert min(record.wait_seconds) >= 0
    last = log_lines(tmp_path, "train")[-1]
    assert last["measured_speedup"] == pytest.approx(last["compared_step_seconds"] / last["step_seconds"])
    trace = json.loads((tmp_path / "profile" / "steps-2-4.trace.json").read_text())
    spans = {event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#")}
    assert spans == {"ProfilerStep#2", "ProfilerStep#3"}
    ranks.run(1, run_job_on_rank, _settings(tmp_path, small_dataset, max_steps=len(records) + 2, log_every=2, epochs=3))
    assert sorted(path.name for path in tmp_path.glob("balance*")) == ["balance-2.jsonl", "balance.jsonl"]


def test_lines_of_the_log_are_readable_complete_and_json(tmp_path: Path) -> None:
    assert all(text.endswith(".") for text in help_texts(TrainConfig).values())
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
