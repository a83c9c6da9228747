"""`WorkerTask`: what the processes of one run are told, as a JSON file; and the tasks of a table."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import json_records
from end_to_end.experiments import HSTU_COST, UNUSED_SETTINGS, Experiments, Run, Workload, lengths_of, resolved, slug
from end_to_end.results import RunResult
from evenrank.core.errors import ConfigError, DataError
from trainer.config import TrainConfig

_KIND = ("evenrank training benchmark task", 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTask:
    """A run with lengths of one distribution."""

    run: Run
    """Its `gpus` is the number of processes, never None."""
    workload: Workload
    """Of this run: with its own rows of tables, and `lengths` alone among the distributions."""
    lengths: str
    """Name of the distribution."""
    result: Path
    """Where rank 0 writes the RunResult."""
    cost_result: Path | None
    """The RunResult of the run to whose times the cost is fitted; None: the cost is HSTUCost."""

    @property
    def distribution(self) -> str:
        """The distribution of the events of a sample, as `parse_distribution` takes it."""
        return str(self.workload.lengths[self.lengths])

    @property
    def gpus(self) -> int:
        """Processes."""
        assert self.run.gpus is not None
        return self.run.gpus

    @property
    def data_ranks(self) -> int:
        """Ranks over which samples are balanced."""
        return self.gpus // self.run.settings.tensor_parallel

    @property
    def title(self) -> str:
        """What it is called in output."""
        return f"{self.lengths}: {self.run.name}"

    @property
    def task_file(self) -> Path:
        """Where the task itself is saved."""
        return self.result.with_suffix(".task.json")

    @property
    def log(self) -> Path:
        """Output of all processes."""
        return self.result.with_suffix(".log")

    def save(self) -> None:
        """Write it to its file, atomically."""
        content = dataclasses.asdict(self)
        content["result"] = str(self.result)
        content["cost_result"] = self.cost_result and str(self.cost_result)
        json_records.save(self.task_file, _KIND, content, indent=2)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DataError: the file is missing, damaged, or of another version.
        """
        return json_records.load(path, _KIND, cls._parse, remedy="start the benchmark again")

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> Self:
        run, cost_result = content["run"], content["cost_result"]
        run["settings"] = TrainConfig(**run["settings"])
        run["lengths"] = run["lengths"] and tuple(run["lengths"])
        return cls(
            run=Run(**run),
            workload=Workload(**content["workload"]),
            lengths=content["lengths"],
            result=Path(content["result"]),
            cost_result=cost_result and Path(cost_result),
        )


def result_path(out: Path, lengths: str, run: str) -> Path:
    """Return the path of the RunResult of a run, by its name and that of its lengths."""
    return out / lengths / f"{slug(run)}.json"


def new_result(task: WorkerTask, environment: dict[str, Any]) -> RunResult:
    """Return the result of a task before anything is measured: what it was asked for, and where it runs."""
    return RunResult(
        name=task.run.name,
        adds_to=task.run.adds_to,
        lengths=task.lengths,
        gpus=task.gpus,
        data_ranks=task.data_ranks,
        settings=resolved(task.run.settings),
        workload=dataclasses.asdict(task.workload),
        environment=environment,
    )


def tasks_of(
    experiments: Experiments, out: Path, *, gpus: int, only: Collection[str] = (), lengths: Collection[str] = ()
) -> tuple[WorkerTask, ...]:
    """Return the tasks of a table, one distribution of lengths after another, with runs in the order of the file.

    Args:
        experiments: the table.
        out: folder of the results; absolute, because other hosts may read the tasks.
        gpus: processes of runs that do not name a number themselves.
        only: names of runs, as in the file or as in names of files; empty: all.
        lengths: names of distributions; empty: all.

    Raises:
        ConfigError: a name is unknown, or a run needs more processes than there are or cannot divide them.
    """
    _check_known("--only", {slug(name): name for name in only}, [slug(run.name) for run in experiments.runs])
    _check_known("--lengths", {name: name for name in lengths}, experiments.workload.lengths)
    chosen = {slug(name) for name in only}
    runs = [run for run in experiments.runs if not only or slug(run.name) in chosen]
    tasks = [
        _task(run, experiments.workload, name, out, gpus)
        for name in experiments.workload.lengths
        for run in runs
        if (not lengths or name in lengths) and name in lengths_of(run, experiments.workload)
    ]
    if not tasks:
        raise ConfigError("none of the runs of --only has lengths of --lengths; choose others")
    return tuple(tasks)


def _task(run: Run, workload: Workload, lengths: str, out: Path, gpus: int) -> WorkerTask:
    own_gpus = gpus if run.gpus is None else run.gpus
    if own_gpus > gpus:
        raise ConfigError(
            f"run {run.name!r} needs {own_gpus} GPUs, more than the {gpus} given; choose other runs with --only"
        )
    if own_gpus % run.settings.tensor_parallel:
        raise ConfigError(
            f"run {run.name!r} divides heads among {run.settings.tensor_parallel} GPUs, of which {own_gpus} is no "
            "multiple; change the number of GPUs, or choose other runs with --only"
        )
    return WorkerTask(
        run=dataclasses.replace(run, gpus=own_gpus),
        workload=dataclasses.replace(
            workload,
            lengths={lengths: workload.lengths[lengths]},
            item_rows=run.item_rows or workload.item_rows,
            user_rows=run.user_rows or workload.user_rows,
        ),
        lengths=lengths,
        result=result_path(out, lengths, run.name),
        cost_result=None if run.cost == HSTU_COST else result_path(out, lengths, run.cost),
    )


def _check_known(option: str, names: dict[str, str], known: Collection[str]) -> None:
    if unknown := [name for key, name in names.items() if key not in known]:
        raise ConfigError(f"{option} {unknown[0]!r} is not in the file; known are {', '.join(known)}")


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
    # A cost that is fitted while the run trains may have stayed that of the model.
    is_kept = is_model_cost and settings.get("refit_every") is None
    conditions = {"gpus": gpus, "cost": "of the model" if is_kept else "measured"}
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
    from hstu.config import ATTENTIONS
    from trainer.data import check_names as check_balance
    from trainer.pipelines import PIPELINES

    for task in tasks:
        settings = task.run.settings
        try:
            check_balance(settings)
            if settings.window > 1:
                raise ConfigError(f"window = {settings.window} changes batches, which are compared; leave it out")
            ATTENTIONS.check(settings.attention)
            PIPELINES.check(settings.pipeline)
        except ConfigError as error:
            raise ConfigError(f"run {task.run.name!r}: {error}") from error
