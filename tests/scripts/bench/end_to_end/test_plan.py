"""A table goes on where it was interrupted, and results of other settings are replaced."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from end_to_end.tasks import WorkerTask, check_names, make_plan
from evenrank.core.errors import ConfigError
from tests.scripts.bench.end_to_end.small_tables import make_tasks, result_of


@pytest.fixture
def tasks(tmp_path: Path) -> tuple[WorkerTask, ...]:
    return make_tasks(tmp_path)


def test_complete_results_are_kept(tasks: tuple[WorkerTask, ...]) -> None:
    for task in tasks[:2]:
        result_of(task).save(task.result)
    plan = make_plan(tasks)
    assert (plan.kept, plan.to_run, plan.again) == (tasks[:2], tasks[2:], {})


def test_a_run_that_failed_is_run_again(tasks: tuple[WorkerTask, ...]) -> None:
    result_of(tasks[0], failure="out of memory").save(tasks[0].result)
    plan = make_plan(tasks)
    assert plan.to_run == tasks
    assert plan.again == {tasks[0].result: "it failed: out of memory"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": {"seed": 1}}, "settings.seed was 1 and is 0"),
        ({"workload": {"seed": 1}}, "workload.seed was 1 and is 0"),
        ({"workload": {"gone": 1}}, "workload.gone was 1 and is None"),
        ({"gpus": 8}, "gpus was 8 and is 2"),
        ({"cost": {"name": "MeasuredCost"}}, "cost was 'measured' and is 'of the model'"),
    ],
)
def test_a_result_of_another_task_is_replaced(
    tasks: tuple[WorkerTask, ...], changes: dict[str, Any], reason: str
) -> None:
    result = result_of(tasks[0])
    values: dict[str, Any] = {
        name: {**getattr(result, name), **change} if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    result = dataclasses.replace(result, **values)
    result.save(tasks[0].result)
    assert make_plan(tasks[:1]).again == {tasks[0].result: reason}


def test_where_it_would_read_or_write_data_is_no_other_task(tasks: tuple[WorkerTask, ...]) -> None:
    result = result_of(tasks[0])
    dataclasses.replace(result, settings={**result.settings, "out": "elsewhere"}).save(tasks[0].result)
    assert make_plan(tasks[:1]).kept == tasks[:1]


def test_a_cost_is_fitted_again_to_times_that_are_new(tasks: tuple[WorkerTask, ...]) -> None:
    for task in tasks[1:]:
        result_of(task).save(task.result)
    plan = make_plan(tasks)
    assert plan.to_run == (tasks[0], tasks[2])
    assert plan.again == {tasks[2].result: "its cost is fitted to 'baseline', which is run again"}


@pytest.mark.parametrize("failure", [None, "out of memory"])
def test_a_cost_without_times_to_fit_to_is_one_line(tasks: tuple[WorkerTask, ...], failure: str | None) -> None:
    if failure:
        result_of(tasks[0], failure=failure).save(tasks[0].result)
    reason = failure or "it has no result"
    with pytest.raises(ConfigError) as caught:
        make_plan(tasks[2:])
    assert f"'measured cost' needs the times of 'baseline' with the lengths 'short': {reason}; " in str(caught.value)


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
    changed: dict[str, Any] = {setting: "fastest", **({} if setting == "balance" else {"balance": "all-to-all"})}
    settings = dataclasses.replace(tasks[1].run.settings, **changed)
    wrong = dataclasses.replace(tasks[1], run=dataclasses.replace(tasks[1].run, settings=settings))
    with pytest.raises(ConfigError, match=rf"^run '{tasks[1].run.name}': .*fastest"):
        check_names([tasks[0], wrong])
