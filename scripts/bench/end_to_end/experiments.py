"""`Run`: what the training benchmark measures, from a TOML file in which each run adds settings to another.

    [workload]                  what all runs train on: fields of Workload
    steps = 1000
    [workload.lengths]          distributions of lengths, as `parse_distribution` takes them; all runs use each
    lognormal = "lognormal:mean=512,std=512,high=4096"
    [settings]                  of all runs: fields of TrainConfig
    hidden = 1024

    [[run]]
    name = "unbalanced"         the first run adds to none
    settings.balance = "none"

    [[run]]
    name = "lpt-swap"
    adds_to = "unbalanced"      default: the run before it in the file; "none": it starts anew
    item_rows = 1_000           rows of tables, and `gpus`, can be of a run
    settings.balance = "all-to-all"
"""

import dataclasses
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from evenrank.core.errors import ConfigError, EvenrankError
from evenrank.core.rules import Bounds, Count, NonNegative
from evenrank.core.settings import Settings, check_keys
from trainer.config import TrainConfig

_RUN_KEYS = ("name", "adds_to", "gpus", "item_rows", "user_rows", "settings")
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
    item_exponent: Annotated[float, Bounds(at_least=0)] = 1.05
    """Item ids are drawn from a Zipf distribution with this exponent."""
    user_exponent: Annotated[float, Bounds(at_least=0)] = 1.05
    """The same of user ids."""
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
        # Imported here, because `--help` does not need Numba.
        from evenrank.datasets.distributions import parse_distribution

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
        settings = {name: value for name, value in self.all_settings.items() if name not in _NOT_MEASURED}
        return {"gpus": self.gpus, "workload": dataclasses.asdict(self.workload), "settings": settings}

    @property
    def all_settings(self) -> dict[str, Any]:
        """Settings by name."""
        return dataclasses.asdict(self.settings)

    def path(self, out: Path) -> Path:
        """Return where the row of the run is kept."""
        return out / slug(self.lengths) / f"{slug(self.name)}.json"


def slug(name: str) -> str:
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

    Args:
        path: of the file.
        gpus: processes of runs that do not name a number themselves.
        changed: fields of the workload in place of those of the file.
        only: names of runs; empty: all.
        lengths: names of distributions; empty: all.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong; the message names the file and the run.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    try:
        check_keys("the file", content, ("workload", "settings", "run"))
        workload = {**content.get("workload", {}), **(changed or {})}
        distributions = workload.pop("lengths", {})
        tables = _chained(content.get("run", []), content.get("settings", {}))
        for option, names, known in (("--only", only, tables), ("--lengths", lengths, distributions)):
            if unknown := [name for name in names if name not in known]:
                raise ConfigError(f"{option} {unknown[0]!r} is not in the file; known are {', '.join(known)}")
        return [
            _run(table, {**workload, "lengths": text}, lengths_name, gpus)
            for lengths_name, text in distributions.items()
            for name, table in tables.items()
            if (not only or name in only) and (not lengths or lengths_name in lengths)
        ]
    except EvenrankError as error:
        raise ConfigError(f"{path}: {error}") from error


def _chained(tables: list[dict[str, Any]], common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tables of runs by name, with the keys of the runs that they add to."""
    found: dict[str, dict[str, Any]] = {}
    for number, table in enumerate(tables, 1):
        check_keys(f"run {number}", table, _RUN_KEYS)
        name, before = table.get("name", ""), table.get("adds_to", next(reversed(found), "none"))
        if not slug(name) or slug(name) in map(slug, found):
            raise ConfigError(f"run {number}: name must be text that no run before it has, got {name!r}")
        if before != "none" and before not in found:
            raise ConfigError(f"run {name!r}: adds_to must be 'none' or a run before it, got {before!r}")
        base = {"settings": common} if before == "none" else found[before]
        found[name] = {**base, **table, "settings": {**base["settings"], **table.get("settings", {})}}
    return found


def _run(table: Mapping[str, Any], workload: dict[str, Any], lengths: str, gpus: int) -> Run:
    rows = {key: table[key] for key in ("item_rows", "user_rows") if key in table}
    try:
        check_keys("[workload]", workload, [field.name for field in dataclasses.fields(Workload)])
        check_keys("settings", table["settings"], [field.name for field in dataclasses.fields(TrainConfig)])
        return Run(
            name=table["name"],
            lengths=lengths,
            gpus=table.get("gpus", gpus),
            workload=Workload(**{**workload, **rows}),
            settings=TrainConfig(**table["settings"]),
        )
    except EvenrankError as error:
        raise ConfigError(f"run {table['name']!r}: {error}") from error
