import dataclasses
from pathlib import Path
from typing import Any

import pytest

from end_to_end.tasks import WorkerTask, check_names, make_plan, tasks_of
from evenrank.core.errors import ConfigError
from tests.scripts.bench.end_to_end.small_tables import make_table, make_tasks, result_of


def test_each_run_has_a_task_for_each_of_its_lengths(tmp_path: Path) -> None:
    tasks = tasks_of(make_table(tmp_path), tmp_path, gpus=4)
    short = ["short: baseline", "short: halved heads", "short: measured cost"]
    assert [task.title for task in tasks] == [*short, "long: baseline", "long: measured cost"]
    only = ["measured-cost", "baseline"]
    assert tasks_of(make_table(tmp_path), tmp_path, gpus=4, only=only, lengths=["long"]) == tasks[3:]
    assert tasks[1].result == tmp_path / "short" / "halved-heads.json"
    assert tasks[-1].cost_result == tmp_path / "long" / "baseline.json"
    baseline, halved, _ = make_tasks(tmp_path)
    assert (baseline.workload.item_rows, halved.workload.item_rows) == (50, 7)
    assert (baseline.data_ranks, halved.data_ranks) == (2, 1)
    assert baseline.distribution == "uniform:low=1,high=9"


@pytest.mark.parametrize(
    ("only", "lengths", "gpus", "message"),
    [
        (["basline"], [], 2, "--only 'basline' is not in the file; known are baseline, halved-heads, measured-cost"),
        ([], ["shrt"], 2, "--lengths 'shrt' is not in the file; known are short, long"),
        (["halved heads"], ["long"], 2, "none of the runs of --only has lengths of --lengths"),
        ([], [], 3, "run 'halved heads' divides heads among 2 GPUs, of which 3 is no multiple"),
    ],
)
def test_choices_that_cannot_run(tmp_path: Path, only: list[str], lengths: list[str], gpus: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tasks_of(make_table(tmp_path), tmp_path, gpus=gpus, only=only, lengths=lengths)
    assert message in str(caught.value)
    table = make_table(tmp_path, '[workload]\nlengths.a = "zipf"\n[[run]]\nname = "a"\ngpus = 4\n')
    with pytest.raises(ConfigError, match="'a' needs 4 GPUs, more than the 2 given; choose other runs with --only"):
        tasks_of(table, tmp_path, gpus=2)


def test_complete_results_are_kept_and_others_made_again(tasks: tuple[WorkerTask, ...]) -> None:
    for task in tasks[:2]:
        result = result_of(task)  # of a run that would read or write data elsewhere
        dataclasses.replace(result, settings={**result.settings, "out": "elsewhere"}).save(task.result)
    plan = make_plan(tasks)
    assert (plan.kept, plan.to_run, plan.again) == (tasks[:2], tasks[2:], {})
    result_of(tasks[0], failure="out of memory").save(tasks[0].result)
    result_of(tasks[2]).save(tasks[2].result)
    plan = make_plan(tasks)
    assert plan.to_run == (tasks[0], tasks[2])
    of_cost = "its cost is fitted to 'baseline', which is run again"
    assert plan.again == {tasks[0].result: "it failed: out of memory", tasks[2].result: of_cost}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": {"seed": 1}}, "settings.seed was 1 and is 0"),
        ({"workload": {"gone": 1}}, "workload.gone was 1 and is None"),
        ({"cost": {"name": "MeasuredCost"}}, "cost was 'measured' and is 'of the model'"),
    ],
)
def test_results_of_others_are_replaced(tasks: tuple[WorkerTask, ...], changes: dict[str, Any], reason: str) -> None:
    result = result_of(tasks[0])
    values: dict[str, Any] = {name: getattr(result, name) | change for name, change in changes.items()}
    dataclasses.replace(result, **values).save(tasks[0].result)
    assert make_plan(tasks[:1]).again == {tasks[0].result: reason}


def test_a_cost_without_times_to_fit_to_is_one_line(tasks: tuple[WorkerTask, ...]) -> None:
    message = "'measured cost' needs the times of 'baseline' with the lengths 'short': "
    with pytest.raises(ConfigError, match=message + "it has no result"):
        make_plan(tasks[2:])
    result_of(tasks[0], failure="out of memory").save(tasks[0].result)
    with pytest.raises(ConfigError, match=message + "out of memory"):
        make_plan(tasks[2:])


def test_results_that_are_replaced_are_set_aside_before_the_first_run(tasks: tuple[WorkerTask, ...]) -> None:
    """So an interrupted --rerun goes on, without --rerun, with what is left."""
    for task in tasks:
        result_of(task).save(task.result)
    plan = make_plan(tasks, rerun=True)
    assert plan.to_run == tasks
    assert set(plan.again.values()) == {"--rerun"}
    plan.start()
    assert [task.result.with_suffix(".json.old").exists() for task in tasks] == [True] * 3
    assert [WorkerTask.load(task.task_file) for task in tasks] == list(tasks)
    assert make_plan(tasks).to_run == tasks


@pytest.mark.parametrize("setting", ["strategy", "balance", "attention", "pipeline"])
def test_names_that_do_not_exist_are_found_before_anything_runs(tasks: tuple[WorkerTask, ...], setting: str) -> None:
    check_names(tasks)
    changed: dict[str, Any] = {"balance": "no-exchange", setting: "fastest"}
    with pytest.raises(ConfigError, match=rf"^run '{tasks[1].run.name}': .*fastest"):
        check_names([tasks[0], _with_settings(tasks[1], **changed)])


def test_steps_whose_samples_change_cannot_be_compared(tasks: tuple[WorkerTask, ...]) -> None:
    with pytest.raises(ConfigError, match="window = 4 changes batches, which are compared; leave it out"):
        check_names([_with_settings(tasks[1], balance="no-exchange", window=4)])


def _with_settings(task: WorkerTask, **changed: Any) -> WorkerTask:
    settings = dataclasses.replace(task.run.settings, **changed)
    return dataclasses.replace(task, run=dataclasses.replace(task.run, settings=settings))
