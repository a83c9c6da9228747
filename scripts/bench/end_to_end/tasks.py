"""`WorkerTask`: what the processes of one run are told, as a JSON file; and the tasks of a table."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from end_to_end.experiments import Run, Workload
from evenrank.core import atomic_file
from evenrank.core.errors import DataError
from trainer.config import TrainConfig

_FORMAT, _VERSION = "evenrank training benchmark task", 1


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
        return self.workload.lengths[self.lengths]

    @property
    def data_ranks(self) -> int:
        """Ranks over which samples are balanced."""
        assert self.run.gpus is not None
        return self.run.gpus // self.run.settings.tensor_parallel

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
        text = json.dumps({"format": _FORMAT, "version": _VERSION, **content}, indent=2)
        atomic_file.write_text(self.task_file, text + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DataError: the file is missing, damaged, or of another version.

        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = content.pop("format"), content.pop("version")
            if found != (_FORMAT, _VERSION):
                raise DataError(f"{path} is version {found[1]} of {found[0]!r}; start the benchmark again")
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
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} cannot be read as a task: {error}; start the benchmark again") from error
