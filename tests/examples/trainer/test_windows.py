import shutil
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evenrank.dataloader import build_loader
from evenrank.datasets import SequenceStore, open_store, read_manifest
from evenrank.training import BinaryAUC
from tests.datasets.crafted import windows_of
from tests.examples.trainer.jobs import log_lines, run, settings
from tests.ranks import RankPool
from trainer.checkpoints import complete_checkpoints, step_of
from trainer.config import TrainConfig
from trainer.data import find_split
from trainer.evaluation import Evaluation
from trainer.monitors import Monitors
from trainer.tasks import semantic_ids
from trainer.windows import plot_windows
from trainer.world import World

WINDOWS = {"time_windows": "1w", "max_num_candidates": 2}
Sample = tuple[int, int]  # window, sample id
Steps = list[tuple[str, list[Sample]]]  # "train" or "eval", in the order of time


def _samples(batch: Any) -> list[Sample]:
    return [(batch.epoch, sample) for sample in batch.sample_ids[: batch.num_real].tolist()]


def _run_watched(rank: int, world_size: int, options: dict[str, Any], crash_at: int = 0) -> tuple[Steps, list[int]]:
    """Run a job; return the samples of this rank's steps, and the user of each label that it evaluated."""
    seen: Steps = []
    users: list[int] = []
    note, steps, update = Monitors.note, Evaluation._steps, BinaryAUC.update

    def note_step(monitors: Monitors, step: int, done: Any) -> None:
        seen.append(("train", _samples(done.batch)))
        note(monitors, step, done)

    def note_evaluated(evaluation: Evaluation) -> Any:
        for batch in steps(evaluation):
            seen.append(("eval", _samples(batch)))
            yield batch

    def note_users(metric: BinaryAUC, scores: Tensor, targets: Tensor, *, groups: Tensor) -> None:
        users.extend(groups.tolist())
        update(metric, scores, targets, groups=groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitors, "note", note_step)
        patch.setattr(Evaluation, "_steps", note_evaluated)
        patch.setattr(BinaryAUC, "update", note_users)
        run(rank, world_size, options, crash_at)
    return seen, users


class _Targets:
    """The targets of samples, as events of the dataset."""

    def __init__(self, data: Path) -> None:
        self.store = open_store(data)
        self.windows = windows_of(self.store, 2, every="1w")
        self._cuts: dict[int, SequenceStore] = {}

    def of(self, samples: list[Sample]) -> list[int]:
        events: list[int] = []
        for window, sample in samples:
            cut = self._cuts.setdefault(window, self.windows.of_epoch(window, [self.store])[0])
            assert cut.num_targets is not None
            events += range(cut.ends[sample] - cut.num_targets[sample], cut.ends[sample])
        return events

    def in_windows(self, first: int, last: int) -> list[int]:
        begin, end = (self.windows.times(index)[0] for index in (first, last + 1))
        times = self.store.columns["timestamp_ms"]
        is_in = (times >= begin.timestamp() * 1000) & (times < end.timestamp() * 1000)
        return [int(event) for event in np.flatnonzero(is_in)]


def _merged(parts: list[tuple[Steps, list[int]]]) -> Steps:
    """Return the samples of all ranks in each step."""
    steps = zip(*(of_rank for of_rank, _ in parts), strict=True)
    return [(step[0][0], [sample for _, samples in step for sample in samples]) for step in steps]


@pytest.mark.parametrize("balance", ["no-exchange", "all-to-all", "all-gather", "none"])
def test_each_window_is_evaluated_once_before_it_is_trained(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, balance: str
) -> None:
    options = settings(tmp_path, small_dataset, batch_size=16, balance=balance, **WINDOWS)
    parts = ranks.run(2, _run_watched, options)
    targets = _Targets(small_dataset)
    times, last = targets.store.columns["timestamp_ms"], targets.windows.count - 1
    trained: list[int] = []
    evaluated: list[int] = []
    for kind, samples in _merged(parts):
        events = targets.of(samples)
        if kind == "train":
            trained += events
        else:
            assert times[trained].max() < times[events].min()
            evaluated += events
    assert sorted(trained) == targets.in_windows(0, last - 1)
    assert sorted(evaluated) == targets.in_windows(1, last)
    rows = np.searchsorted(targets.store.offsets, evaluated, side="right") - 1
    assert Counter(user for _, users in parts for user in users) == Counter(
        targets.store.columns["user_id"][rows].tolist()
    )

    lines = log_lines(tmp_path, "eval")
    assert [line["window"] for line in lines] == list(range(1, last + 1))
    assert [line["targets"] for line in lines] == [
        len(targets.in_windows(window, window)) for window in range(1, last + 1)
    ]
    for line in lines:
        begin_and_end = [datetime.fromisoformat(line[name]).replace(tzinfo=UTC) for name in ("begin", "end")]
        assert begin_and_end == list(targets.windows.times(line["window"]))
        assert 0 < line["auc"] < 1
    assert (tmp_path / "windows.png").read_bytes().startswith(b"\x89PNG")


def test_a_job_that_dies_within_a_window_trains_the_rest_of_it_on_other_ranks(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    options = settings(tmp_path / "whole", small_dataset, batch_size=16, keep=99, **WINDOWS)
    whole = _merged(ranks.run(2, _run_watched, options))
    boundaries = [line["step"] for line in log_lines(tmp_path / "whole", "eval")]
    assert [step_of(path) for path in complete_checkpoints(tmp_path / "whole" / "checkpoints")] == boundaries
    died_at = boundaries[0] + 2
    assert died_at < boundaries[1]
    options |= {"out": str(tmp_path / "parts"), "checkpoint_every": died_at - 1}
    first = [samples for kind, samples in _merged(ranks.run(2, _run_watched, options, died_at)) if kind == "train"]
    shutil.copytree(tmp_path / "parts", tmp_path / "same ranks")
    rest = _merged(ranks.run(3, _run_watched, options))
    trained = [sample for samples in first[: died_at - 1] for sample in samples]
    trained += [sample for kind, samples in rest if kind == "train" for sample in samples]
    assert sorted(trained) == sorted(sample for kind, samples in whole if kind == "train" for sample in samples)
    windows = [line["window"] for line in log_lines(tmp_path / "parts", "eval")]
    assert windows == [line["window"] for line in log_lines(tmp_path / "whole", "eval")]

    ranks.run(2, _run_watched, options | {"out": str(tmp_path / "same ranks")})
    assert log_lines(tmp_path / "same ranks", "eval") == log_lines(tmp_path / "whole", "eval")


def test_the_end_of_a_job_within_a_window_is_evaluated_on_the_next_one_also_by_its_next_run(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    options = settings(tmp_path, small_dataset, batch_size=16, max_steps=1, **WINDOWS)  # of 2 in the first window
    ranks.run(2, run, options)
    log = tmp_path / "log.jsonl"
    lines = log_lines(tmp_path, "eval")
    assert [(line["step"], line["window"]) for line in lines] == [(1, 1)]
    log.write_text("")  # as if it had died before it evaluated
    ranks.run(2, run, options)
    assert log_lines(tmp_path, "eval") == lines


def test_semantic_ids_are_trained_on_the_targets_of_windows_alone(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"model": "semantic-ids", "code_levels": 2, "codebook_size": 8, "time_windows": "1w"}
    job = settings(tmp_path, small_dataset, batch_size=64, **options)
    parts = ranks.run(2, _run_watched, job)
    trained = [samples for kind, samples in _merged(parts) if kind == "train"]
    targets = _Targets(small_dataset)
    assert sum(map(len, trained)) == len(targets.in_windows(0, targets.windows.count - 2))
    assert [line["window"] for line in log_lines(tmp_path, "eval")] == list(range(1, targets.windows.count))
    config = TrainConfig(**options)
    task = semantic_ids(config, read_manifest(small_dataset), World(rank=0, size=1, device=torch.device("cpu")))
    split, order = find_split(config, is_trained=True)
    loader = build_loader(small_dataset, task.read(batch_size=8, split=split, order=order), rank=0, world_size=1)
    num_samples = loader.num_samples  # of the first window
    assert sum(batch.loss_tokens for batch in loader) == 2 * num_samples


def test_the_plot_has_the_last_line_of_each_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plotted = []
    axes = pytest.importorskip("matplotlib.axes")
    plot = axes.Axes.plot

    def note(self: Any, times: list[datetime], values: list[float], **options: Any) -> Any:
        plotted.append((times, values))
        return plot(self, times, values, **options)

    monkeypatch.setattr(axes.Axes, "plot", note)
    lines = [
        {"window": window, "begin": begin, "end": end, "targets": 9, "auc": auc}
        for window, begin, end, auc in (
            (1, "2015-01-06", "2015-01-06T12:00:00", 0.5),
            (2, "2015-01-06T12:00:00", "2015-01-07", 0.25),
            (2, "2015-01-06T12:00:00", "2015-01-07", None),
            (1, "2015-01-06", "2015-01-06T12:00:00", 0.75),
        )
    ]
    plot_windows(lines, tmp_path / "windows.png")
    ((times, values),) = plotted
    assert times == [datetime(2015, 1, 6, 6), datetime(2015, 1, 6, 18)]
    assert torch.tensor(values).nan_to_num(-1).tolist() == [0.75, -1]
    assert (tmp_path / "windows.png").read_bytes().startswith(b"\x89PNG")
