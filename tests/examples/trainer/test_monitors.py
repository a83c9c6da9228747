import json
import logging
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from evenrank.core.errors import DataError, RankError
from evenrank.dataloader.balance.metrics.log import LogRecord, RunRecord, parse_line
from evenrank.training import MemoryUsage
from tests.examples.trainer.jobs import SHARDED, Trained, check_failures, log_lines, run, settings
from tests.ranks import RankPool
from trainer import monitors
from trainer.embedding_caches import CacheUse
from trainer.logs import JobLog


def _balance_log(path: Path) -> tuple[RunRecord, list[LogRecord]]:
    first, *others = [parse_line(line) for line in path.read_bytes().splitlines()]
    assert isinstance(first, RunRecord)
    return first, [other for other in others if isinstance(other, LogRecord)]


def _lines_of(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Run a job; return what this rank prints, and what it logs through the logger of the package."""
    printed: list[str] = []
    logged: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("evenrank")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "handlers", [handler])
        patch.setattr(JobLog, "say", lambda _, text: printed.append(text))
        run(rank, world_size, options)
    return printed, logged


def _numbers(record: LogRecord) -> tuple[float, float]:
    """Return the measured idle share and the seconds of the one step of a record."""
    assert record.compute_seconds is not None
    assert record.wait_seconds is not None
    compute, seconds = record.compute_seconds, float((record.compute_seconds + record.wait_seconds).mean())
    return float(compute.max() - compute.mean()) / seconds, seconds


@pytest.mark.parametrize(
    ("num_ranks", "data_ranks", "options"),
    [
        (2, 2, {}),
        (2, 2, {"balance": "all-to-all"}),
        (2, 2, SHARDED),
        (2, 2, {"task": "retrieval"}),
        (4, 2, {"tensor_parallel": 2}),
        (4, 2, {"tensor_parallel": 2, **SHARDED}),
    ],
    ids=["replicated", "all-to-all", "sharded, in a pipeline", "retrieval", "divided heads", "divided and sharded"],
)
def test_the_steps_of_all_ranks_are_measured(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, num_ranks: int, data_ranks: int, options: dict[str, Any]
) -> None:
    more = {"batch_size": 12, "log_every": 1, "max_steps": 8, "eval_every": 5, "checkpoint_every": 3, **options}
    ranks.run(num_ranks, run, settings(tmp_path, small_dataset, **more))
    _, records = _balance_log(tmp_path / "balance.jsonl")
    assert [record.seen for record in records] == list(range(1, 9))
    # Not the first step, nor those that begin with a checkpoint or an evaluation.
    assert [record.seen for record in records if record.compute_seconds is not None] == [2, 3, 5, 8]
    for record in records:
        if record.compute_seconds is not None and record.wait_seconds is not None:
            assert len(record.compute_seconds) == data_ranks
            assert (record.compute_seconds > 0).all()
            assert (record.wait_seconds >= 0).all()
    known = [_numbers(record) for record in records if record.compute_seconds is not None]
    means = []  # over the steps that were known when a line was written
    for end in range(1, len(known) + 1):
        total = sum(seconds for _, seconds in known[:end])
        idle = sum(share * seconds for share, seconds in known[:end]) / total
        means.append((pytest.approx(idle), pytest.approx(total / end)))
    logged = [line for line in log_lines(tmp_path, "train") if "step_seconds" in line]
    assert logged
    for line in logged:
        assert (line["measured_idle_after"], line["step_seconds"]) in means


def test_some_steps_stay_unbalanced_and_are_compared(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    options = settings(tmp_path, small_dataset, batch_size=8, log_every=1, epochs=2, compare_every=3)
    (printed, _), _ = ranks.run(2, _lines_of, options)
    run_record, records = _balance_log(tmp_path / "balance.jsonl")
    assert [record.seen for record in records if not record.is_balanced] == [
        record.seen for record in records if (record.step + record.epoch) % 3 == 1
    ]
    assert all((record.before == record.after).all() for record in records if not record.is_balanced)
    assert run_record.options["job"]["compare_every"] == run_record.options["compare_every"] == 3
    assert run_record.options["job"]["batch_size"] == 8
    last = log_lines(tmp_path, "train")[-1]
    ratios = []  # of the steps that were known at some step
    for end in range(1, len(records) + 1):
        recent = [record for record in records[:end] if record.compute_seconds is not None]
        unbalanced, balanced = (
            [_numbers(record)[1] for record in recent if record.is_balanced is kind] for kind in (False, True)
        )
        if unbalanced and balanced:
            ratios.append(fmean(unbalanced) / fmean(balanced))
    assert last["measured_speedup"] in [pytest.approx(ratio) for ratio in ratios]
    assert last["measured_speedup"] == pytest.approx(last["compared_step_seconds"] / last["step_seconds"])
    idle, unbalanced = 100 * last["measured_idle_after"], 100 * last["measured_idle_before"]
    assert printed[-2].partition(" | idle ")[2] == (
        f"{idle:.1f} % of {1e3 * last['step_seconds']:.1f} ms | unbalanced {unbalanced:.1f} % of "
        f"{1e3 * last['compared_step_seconds']:.1f} ms, speed-up {last['measured_speedup']:.2f}x"
    )


def test_each_run_has_a_balance_log(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    for num_ranks, steps in ((2, 4), (1, 8)):
        ranks.run(num_ranks, run, settings(tmp_path, small_dataset, batch_size=8, max_steps=steps, log_every=2))
    (first, _), (second, records) = (_balance_log(tmp_path / name) for name in ("balance.jsonl", "balance-2.jsonl"))
    assert (first.ranks, second.ranks) == (2, 1)
    assert first.id != second.id
    assert [record.seen for record in records] == [2, 4]


def test_the_loads_of_all_ranks_are_logged_once(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    options = {"batch_size": 12, "max_steps": 4, "log_every": 2, "log_loads": True, "tensor_parallel": 2}
    logged = [lines for _, lines in ranks.run(4, _lines_of, settings(tmp_path, small_dataset, **options))]
    assert [len(lines) for lines in logged] == [2, 0, 0, 0]
    for step, line in zip((0, 2), logged[0], strict=True):
        assert line.startswith(f"epoch 0 step {step}: idle ")
        assert [len(loads.split()) for loads in line.partition("; loads ")[2].split(" -> ")] == [2, 2]


class _Memory:
    """Stands for the memory of a GPU of each rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def check(self) -> MemoryUsage:
        return MemoryUsage(allocated=10 + self._rank, reserved=20, free=30 - self._rank, total=50)


class _Caches:
    """Stands for the caches of tables of each rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def read(self) -> list[CacheUse]:
        return [CacheUse(tables=name, hits=3 * self._rank, misses=misses) for name, misses in (("a", 1), ("b", 0))]


def _with_a_gpu(rank: int, world_size: int, options: dict[str, Any]) -> Trained:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitors, "_watch_memory", lambda *_: _Memory(rank))
        patch.setattr(monitors, "EmbeddingCaches", lambda _: _Caches(rank))
        patch.setattr(monitors, "_peak_flops", lambda *_: 1e9)
        return run(rank, world_size, options)


def test_mfu_memory_caches_and_attention_of_all_ranks_are_in_the_log(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    options = {"batch_size": 6, "max_steps": 12, "log_every": 6, "track_attention": 2, "layers": 2}
    ranks.run(2, _with_a_gpu, settings(tmp_path, small_dataset, **options))
    for line in log_lines(tmp_path, "train"):
        assert len(line["rank_mfu"]) == 2
        assert line["mfu"] == pytest.approx(sum(line["rank_mfu"]) / 2)
    memory = {"allocated": [10, 11], "reserved": [20, 20], "free": [30, 29], "total": [50, 50]}
    assert log_lines(tmp_path, "memory") == [{"kind": "memory", "step": step, **memory} for step in (6, 12)]
    of_tables = [
        {"tables": "a", "hits": 3, "misses": 2, "hit_rate": 0.6},
        {"tables": "b", "hits": 3, "misses": 0, "hit_rate": 1.0},
    ]
    assert log_lines(tmp_path, "embedding_cache") == [
        {"kind": "embedding_cache", "step": step, **values} for step in (6, 12) for values in of_tables
    ]
    rows = log_lines(tmp_path, "attention")
    layers = [f"module.dense.encoder.layers.{layer}.attention" for layer in (0, 1)]
    assert [(row["rank"], row["layer"]) for row in rows] == [(rank, layer) for rank in (0, 1) for layer in layers]
    assert {(row["step"], row["calls"]) for row in rows} == {(12, 10)}
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in rows)


def _profiled(path: Path) -> dict[str, int]:
    """Return how often names occur in a trace, among the spans of steps and of optimizers."""
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    return {text: sum(name.startswith(text) for name in names) for text in ("ProfilerStep#", "Optimizer.step#")}


def test_a_profile_has_the_steps_of_its_window_in_this_run(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    def job(steps: int, window: str) -> dict[str, Any]:
        return settings(tmp_path, small_dataset, batch_size=8, max_steps=steps, profile=window)

    (printed, _), (of_rank_1, _) = ranks.run(2, _lines_of, job(5, "2:4"))
    folder = tmp_path / "profile"
    assert [path.name for path in folder.iterdir()] == ["steps-3-4.trace.json"]
    assert _profiled(folder / "steps-3-4.trace.json") == {"ProfilerStep#": 2, "Optimizer.step#": 2}
    ranks.run(2, run, job(8, "0:9"))  # ends within its window
    assert _profiled(folder / "steps-6-8.trace.json") == {"ProfilerStep#": 3, "Optimizer.step#": 3}
    assert f"profile: {folder / 'steps-3-4.trace.json'}" in printed
    assert not [line for line in of_rank_1 if "profile" in line]
    (printed, _), _ = ranks.run(2, _lines_of, job(9, "1:2"))  # ends before it
    assert printed[-1] == "no profile: this run ended after 1 steps, before those of --profile"
    assert len(list(folder.iterdir())) == 2


def test_a_profile_that_has_no_folder_is_an_error_on_all_ranks(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "profile").write_text("precious")
    failures = ranks.try_run(2, run, settings(tmp_path, small_dataset, profile="2:4"))
    check_failures(failures, f"{tmp_path / 'profile'}: File exists", kinds=[DataError, RankError])
    assert (tmp_path / "profile").read_text() == "precious"


@pytest.mark.parametrize("balance", ["no-exchange", "all-to-all"])
def test_the_cost_is_fitted_while_a_job_trains(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, balance: str
) -> None:
    options = {"batch_size": 2, "log_every": 2, "balance": balance, "refit_every": 20}
    ranks.run(2, run, settings(tmp_path, small_dataset, **options))
    run_record, records = _balance_log(tmp_path / "balance.jsonl")
    assert run_record.options["refit_every"] == 20
    assert records[-1].seen > 40  # with two fits, to times that may say anything
