"""Tasks say what each run of a table is, and arrive in its processes as they were made."""

from pathlib import Path

import pytest

from end_to_end.tasks import WorkerTask, tasks_of
from evenrank.core.errors import ConfigError, DataError
from tests.scripts.bench.end_to_end.small_tables import make_table, make_tasks


def test_each_run_has_a_task_for_each_of_its_lengths(tmp_path: Path) -> None:
    tasks = tasks_of(make_table(tmp_path), tmp_path, gpus=4)
    assert [task.title for task in tasks] == [
        "short: baseline",
        "short: halved heads",
        "short: measured cost",
        "long: baseline",
        "long: measured cost",
    ]
    assert {task.gpus for task in tasks} == {4}
    assert tasks[1].result == tmp_path / "short" / "halved-heads.json"
    assert tasks[-1].cost_result == tmp_path / "long" / "baseline.json"


def test_a_task_has_the_workload_of_its_run_alone(tmp_path: Path) -> None:
    baseline, halved, _ = make_tasks(tmp_path)
    assert (baseline.workload.item_rows, halved.workload.item_rows) == (50, 7)
    assert (baseline.data_ranks, halved.data_ranks) == (2, 1)
    assert baseline.workload.lengths == {"short": "uniform:low=1,high=9"}
    assert baseline.distribution == "uniform:low=1,high=9"


def test_runs_and_lengths_can_be_chosen(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    chosen = tasks_of(table, tmp_path, gpus=2, only=["measured-cost", "baseline"], lengths=["long"])
    assert [task.title for task in chosen] == ["long: baseline", "long: measured cost"]


@pytest.mark.parametrize(
    ("only", "lengths", "gpus", "message"),
    [
        (["basline"], [], 2, "--only 'basline' is not in the file; known are baseline, halved-heads, measured-cost"),
        ([], ["shrt"], 2, "--lengths 'shrt' is not in the file; known are short, long"),
        (["halved heads"], ["long"], 2, "none of the runs of --only has lengths of --lengths"),
        ([], [], 3, "run 'halved heads' divides heads among 2 GPUs, of which 3 is no multiple"),
    ],
)
def test_a_choice_that_cannot_run_is_one_line(
    tmp_path: Path, only: list[str], lengths: list[str], gpus: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        tasks_of(make_table(tmp_path), tmp_path, gpus=gpus, only=only, lengths=lengths)
    assert message in str(caught.value)


def test_a_run_that_needs_more_gpus_than_there_are_is_one_line(tmp_path: Path) -> None:
    table = make_table(tmp_path, '[workload]\nlengths.a = "zipf"\n[[run]]\nname = "baseline"\ngpus = 4\n')
    with pytest.raises(
        ConfigError, match=r"run 'baseline' needs 4 GPUs, more than the 2 given; choose other runs with --only"
    ):
        tasks_of(table, tmp_path, gpus=2)


def test_a_loaded_task_is_the_saved_one(tmp_path: Path) -> None:
    for task in make_tasks(tmp_path):
        task.save()
        assert WorkerTask.load(task.task_file) == task


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "evenrank training benchmark task", "version": 2}'])
def test_a_damaged_task_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.task.json"
    file.write_text(text)
    with pytest.raises(DataError, match=r"a\.task\.json .*start the benchmark again") as caught:
        WorkerTask.load(file)
    assert "\n" not in str(caught.value)
