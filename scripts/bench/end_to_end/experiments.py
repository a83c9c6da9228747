"""`Run`: what the training benchmark measures, from a TOML file.

[workload]              what all runs train on: fields of Workload
steps = 1000
[lengths]               distributions of lengths, as `parse_distribution` takes them; all runs use each
lognormal = "lognormal:mean=512,std=512,high=4096"
[settings]              of all runs: fields of TrainConfig, and `gpus`, `item_rows`, `user_rows`
hidden = 1024
[run]                   the settings of each run besides
unbalanced = { balance = "none" }
"""

import dataclasses
import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from evenrank.core.errors import ConfigError, EvenrankError
from evenrank.core.rules import Bounds, Count, NonNegative
from evenrank.core.settings import Settings, check_keys
from trainer import TrainConfig

_ROWS = ("item_rows", "user_rows")
_NOT_MEASURED = ("data", "out")  # settings of a job that no run uses


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload(Settings):
    """What a run trains on, and how long."""

    lengths: str
    """Distribution of the events of a sample."""
    item_rows: Count = 50_000_000
    """Rows of the table of items."""
    user_rows: Count = 50_000_000
    """Rows of the table of users."""
    exponent: Annotated[float, Bounds(at_least=0)] = 1.05
    """Of the Zipf distributions that item and user ids are drawn from."""
    num_batches: Count = 100
    """Batches of a rank, drawn before the clock starts; steps cycle through them. At least three steps of a batch in a
    round are needed for a median that ignores a late one."""
    steps: Count = 1000
    """Timed steps of each kind of batches, in all rounds together."""
    rounds: Count = 3
    """Times that live, prepared and even batches take turns, another kind first in each."""
    warmup_steps: NonNegative = 100
    """Steps of each kind before the first round; at least `num_batches`, so that no batch is new to the clock."""
    skipped_steps: NonNegative = 10
    """First steps of each turn that do not count."""
    seed: NonNegative = 0
    """Of the draws."""

    def _check(self) -> None:
        if self.steps < self.rounds:
            raise ConfigError(f"steps must be at least rounds, got steps={self.steps} and rounds={self.rounds}")
        from evenrank.datasets.distributions import parse_distribution  # needs Numba, which `--help` does not

        parse_distribution(self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(Settings):
    """A row of the table."""

    name: str
    lengths: str
    """Name of the distribution of lengths."""
    gpus: Count
    """Processes."""
    workload: Workload
    settings: TrainConfig
    """Those of `scripts/train.py`."""

    def _check(self) -> None:
        if self.settings.window > 1:
            raise ConfigError(f"window = {self.settings.window} changes batches, which are compared; leave it out")

    @property
    def conditions(self) -> dict[str, Any]:
        """All that the figures of the run depend on but the machine, as JSON can have it."""
        settings = dataclasses.asdict(self.settings)
        settings = {name: value for name, value in settings.items() if name not in _NOT_MEASURED}
        conditions = {"gpus": self.gpus, "workload": dataclasses.asdict(self.workload), "settings": settings}
        return dict(json.loads(json.dumps(conditions)))

    def path(self, out: Path) -> Path:
        """Return where the row of the run is kept."""
        return out / _slug(self.lengths) / f"{_slug(self.name)}.json"


def _slug(name: str) -> str:
    """Return a name as part of a file name."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def read_runs(
    path: Path,
    *,
    gpus: int,
    changed: Mapping[str, int] | None = None,
    only: Collection[str] = (),
    lengths: Collection[str] = (),
) -> list[Run]:
    """Read a file of the form above: one distribution after another, with the runs in the order of the file.

    Runs that name no number of processes have `gpus`; `changed` replaces fields of the workload; `only` has names of
    runs and `lengths` names of distributions, of which none stands for all.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong; the message names the file and the run.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    check_keys(path, content, ("workload", "lengths", "settings", "run"))
    place = "the options"
    try:
        of_file = {name: content.get(name, {}) for name in ("workload", "lengths", "settings", "run")}
        for option, names, table in (("--only", only, "run"), ("--lengths", lengths, "lengths")):
            if unknown := [name for name in names if name not in of_file[table]]:
                raise ConfigError(f"{option} {unknown[0]!r} is not in the file; known are {', '.join(of_file[table])}")
        runs = []
        for lengths_name, text in of_file["lengths"].items():
            for name, own in of_file["run"].items():
                place = f"run {name!r}"
                settings, workload = {**of_file["settings"], **own}, {**of_file["workload"], **(changed or {})}
                workload |= {key: settings.pop(key) for key in _ROWS if key in settings}
                processes = settings.pop("gpus", gpus)
                for record, given in ((TrainConfig, settings), (Workload, workload)):
                    check_keys("the table", given, [field.name for field in dataclasses.fields(record)])
                run: Any = {"workload": Workload(**workload, lengths=text), "settings": TrainConfig(**settings)}
                if (not only or name in only) and (not lengths or lengths_name in lengths):
                    runs.append(Run(name=name, lengths=lengths_name, gpus=processes, **run))
    except EvenrankError as error:
        raise ConfigError(f"{path}: {place}: {error}") from error
    return runs
