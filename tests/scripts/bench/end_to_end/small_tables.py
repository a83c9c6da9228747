"""Tables, tasks and results without measurements."""

import dataclasses
from pathlib import Path

from end_to_end.experiments import Experiments, read_experiments
from end_to_end.results import RunResult
from end_to_end.tasks import WorkerTask, new_result, tasks_of

TABLE = """
[workload]
steps = 10
item_rows = 50
lengths.short = "uniform:low=1,high=9"
lengths.long = "uniform:low=9,high=90"

[settings]
balance = "none"

[[run]]
name = "baseline"

[[run]]
name = "halved heads"
lengths = ["short"]
item_rows = 7
settings.tensor_parallel = 2

[[run]]
name = "measured cost"
adds_to = "baseline"
cost = "baseline"
settings.balance = "all-to-all"
"""


def make_table(folder: Path, text: str = TABLE) -> Experiments:
    file = folder / "table.toml"
    file.write_text(text)
    return read_experiments(file)


def make_tasks(folder: Path, *, lengths: str = "short") -> tuple[WorkerTask, ...]:
    """Return the tasks of the table above for one distribution, in whose folder their files can be written."""
    tasks = tasks_of(make_table(folder), folder, gpus=2, lengths=[lengths])
    tasks[0].result.parent.mkdir(exist_ok=True)
    return tasks


def result_of(task: WorkerTask, *, failure: str | None = None) -> RunResult:
    cost = {"name": "HSTUCost" if task.cost_result is None else "MeasuredCost"}
    return dataclasses.replace(new_result(task, {}), failure=failure, cost=cost)
