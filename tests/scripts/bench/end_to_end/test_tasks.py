"""A task arrives in the processes of a run as it was made."""

from pathlib import Path

import pytest

from end_to_end.experiments import Run, Workload
from end_to_end.tasks import WorkerTask
from evenrank.core.errors import DataError
from trainer.config import TrainConfig


def make_task(folder: Path) -> WorkerTask:
    run = Run(
        name="two heads' halves",
        settings=TrainConfig(hidden=32, heads=4, tensor_parallel=2, learning_rate=1),
        adds_to="baseline",
        cost="baseline",
        gpus=4,
        lengths=("short", "long"),
        item_rows=7,
    )
    return WorkerTask(
        run=run,
        workload=Workload(lengths={"short": "uniform:low=1,high=9"}, item_rows=7),
        lengths="short",
        result=folder / "two-heads-halves.json",
        cost_result=folder / "baseline.json",
    )


def test_a_loaded_task_is_the_saved_one(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    task.save()
    assert WorkerTask.load(tmp_path / "two-heads-halves.task.json") == task


def test_a_task_knows_its_distribution_and_the_ranks_that_balance(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    assert (task.distribution, task.data_ranks) == ("uniform:low=1,high=9", 2)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "evenrank training benchmark task", "version": 2}'])
def test_a_damaged_task_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.task.json"
    file.write_text(text)
    with pytest.raises(DataError, match=r"a\.task\.json .*start the benchmark again") as caught:
        WorkerTask.load(file)
    assert "\n" not in str(caught.value)
