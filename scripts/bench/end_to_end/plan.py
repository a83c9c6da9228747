"""`Plan`: which runs of a table are still to be made, and why runs that have results are made again."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from end_to_end.experiments import HSTU_COST, UNUSED_SETTINGS, resolved
from end_to_end.results import RunResult
from end_to_end.tasks import WorkerTask
from evenrank.core.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to do for a table."""

    to_run: tuple[WorkerTask, ...]
    kept: tuple[WorkerTask, ...]
    """Complete already."""
    again: Mapping[Path, str]
    """Why results are replaced, by their path."""

    def start(self) -> None:
        """Write the tasks, and set the results aside that are to be replaced, as NAME.json.old.

        They are set aside at once, so that a table that is interrupted goes on with those that are left to run.
        """
        for task in self.to_run:
            task.result.parent.mkdir(parents=True, exist_ok=True)
            if task.result.exists():
                task.result.replace(task.result.with_suffix(".json.old"))
            task.save()


def make_plan(tasks: Sequence[WorkerTask], *, rerun: bool = False) -> Plan:
    """Return what is left to do: runs without a result, that failed, or whose result is not of this task.

    Args:
        tasks: in the order in which they are to run.
        rerun: run all again.

    Raises:
        ConfigError: a cost is to be fitted to the times of a run that has no result and is not among the tasks.

    """
    to_run: list[WorkerTask] = []
    kept: list[WorkerTask] = []
    again: dict[Path, str] = {}
    for task in tasks:
        if task.result.exists():
            reason = "--rerun" if rerun else _why_again(task)
            if reason is None and _fits_to(task, to_run):
                reason = f"its cost is fitted to {task.run.cost!r}, which is run again"
            if reason is None:
                kept.append(task)
                continue
            again[task.result] = reason
        _check_cost(task, to_run)
        to_run.append(task)
    return Plan(to_run=tuple(to_run), kept=tuple(kept), again=again)


def _why_again(task: WorkerTask) -> str | None:
    """Return why a result cannot be kept; None: it can."""
    try:
        result = RunResult.load(task.result)
    except DataError as error:
        return str(error)
    if result.failure is not None:
        return f"it failed: {result.failure}"
    asked, found = _conditions(task), _conditions_of(result)
    for name in (*asked, *found):
        if asked.get(name) != found.get(name):
            return f"{name} was {found.get(name)!r} and is {asked.get(name)!r}"
    return None


def _conditions(task: WorkerTask) -> dict[str, Any]:
    settings, workload = resolved(task.run.settings), dataclasses.asdict(task.workload)
    return _flat(task.gpus, task.run.cost == HSTU_COST, settings, workload)


def _conditions_of(result: RunResult) -> dict[str, Any]:
    is_model_cost = result.cost is None or result.cost.get("name") == "HSTUCost"
    return _flat(result.gpus, is_model_cost, result.settings, result.workload)


def _flat(gpus: int, is_model_cost: bool, settings: Mapping[str, Any], workload: Mapping[str, Any]) -> dict[str, Any]:
    conditions = {"gpus": gpus, "cost": "of the model" if is_model_cost else "measured"}
    conditions |= {f"settings.{name}": value for name, value in settings.items() if name not in UNUSED_SETTINGS}
    conditions |= {f"workload.{name}": value for name, value in workload.items()}
    return conditions


def _fits_to(task: WorkerTask, to_run: Sequence[WorkerTask]) -> bool:
    """Return whether the cost of a task is fitted to the times of one of these."""
    return task.cost_result in [other.result for other in to_run]


def _check_cost(task: WorkerTask, to_run: Sequence[WorkerTask]) -> None:
    if task.cost_result is None or _fits_to(task, to_run):
        return
    try:
        failure = RunResult.load(task.cost_result).failure
    except DataError:
        failure = "it has no result"
    if failure is not None:
        raise ConfigError(
            f"run {task.run.name!r} needs the times of {task.run.cost!r} with the lengths {task.lengths!r}: {failure}; "
            f"add --only {task.run.cost!r}"
        )


def check_names(tasks: Sequence[WorkerTask]) -> None:
    """Check the names of implementations that runs choose, before any of them starts.

    Raises:
        ConfigError: there is no such strategy, exchange, attention or pipeline.

    """
    # Imported here, because they need torch, which a plan alone does not.
    from evenrank.training import PIPELINES
    from hstu.attentions import ATTENTIONS
    from trainer.data import NO_EXCHANGE
    from trainer.data import check_names as check_balance

    for task in tasks:
        settings = task.run.settings
        try:
            check_balance(settings)
            if settings.balance == NO_EXCHANGE:
                raise ConfigError(
                    f"balance = {NO_EXCHANGE!r} reads a dataset, these batches are drawn; choose an exchange"
                )
            ATTENTIONS.check(settings.attention)
            PIPELINES.check(settings.pipeline)
        except ConfigError as error:
            raise ConfigError(f"run {task.run.name!r}: {error}") from error
