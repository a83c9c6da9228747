"""`Experiments`: the runs of a table, from a TOML file; each adds settings to another.

    [workload]                  what all runs train on: fields of Workload
    steps = 1000
    [workload.lengths]          a table for each distribution, as `parse_distribution` takes it
    lognormal = "lognormal:mean=512,std=512,high=4096"
    [settings]                  of all runs: fields of TrainConfig
    hidden = 1024

    [[run]]
    name = "baseline"           the first run adds to none
    settings.balance = "none"

    [[run]]
    name = "lpt-swap"
    adds_to = "baseline"        default: the run before it in the file; "none": it is another baseline
    settings.balance = "all-to-all"

A run has all keys of the run that it adds to (`cost`, `gpus`, `lengths`, `item_rows`, `user_rows` and `settings`; see
Run) but for its own.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from evenrank.core.errors import ConfigError, EvenrankError, escape_controls
from evenrank.core.rules import Bounds, Count, NonNegative
from evenrank.core.settings import Settings, check_keys, rules_of
from trainer.config import TrainConfig

BASELINE, HSTU_COST = "none", "hstu"
_RUN_KEYS: dict[str, type] = {
    "name": str,
    "adds_to": str,
    "cost": str,
    "gpus": int,
    "lengths": list,
    "item_rows": int,
    "user_rows": int,
    "settings": dict,
}
_INHERITED = ("cost", "gpus", "lengths", "item_rows", "user_rows")
UNUSED_SETTINGS = ("data", "out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload(Settings):
    """What every run of a table trains on, and how long."""

    lengths: Mapping[str, Any]
    """Distributions of the events of a sample by name, each as `parse_distribution` takes it; one table for each."""
    item_rows: Count = 50_000_000
    """Rows of the table of items."""
    user_rows: Count = 50_000_000
    """Rows of the table of users."""
    item_exponent: Annotated[float, Bounds(at_least=0)] = 1.05
    """Item ids are drawn from a Zipf distribution with this exponent."""
    user_exponent: Annotated[float, Bounds(at_least=0)] = 1.05
    """The same of user ids."""
    num_batches: Count = 100
    """Batches of a rank, drawn before the clock starts; steps cycle through them. The median of a batch's steps in a
    round ignores a late one only if there are at least three."""
    steps: Count = 1000
    """Timed steps with live balancing, in all rounds together; those with prepared and even batches are as many."""
    rounds: Count = 3
    """Times that live, prepared and even batches take turns, another kind first in each."""
    warmup_steps: NonNegative = 100
    """Steps of each kind of batches before the first round. With fewer than `num_batches`, the other batches are
    trained for the first time in the first round, by one kind before the others."""
    skipped_steps: NonNegative = 10
    """First steps of each segment that do not count."""
    seed: NonNegative = 0
    """Of the draws."""

    def _check(self) -> None:
        if not self.lengths:
            raise ConfigError('lengths must name a distribution, as in `lognormal = "lognormal:mean=512,std=512"`')
        for name, text in self.lengths.items():
            _check_lengths(name, text)
        if self.steps < self.rounds:
            raise ConfigError(f"steps must be at least rounds, got steps={self.steps} and rounds={self.rounds}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A row of the table."""

    name: str
    settings: TrainConfig
    """Those of `scripts/train.py`; `data` and `out` are not used."""
    adds_to: str | None = None
    """The run before it in the chain; None: it is a baseline."""
    cost: str = "hstu"
    """`hstu`: HSTUCost; or the name of another run, without balancing, to whose times a MeasuredCost is fitted."""
    gpus: int | None = None
    """Processes; None: all that the command was given."""
    lengths: tuple[str, ...] | None = None
    """Names of the distributions for which it runs; None: all."""
    item_rows: int | None = None
    """Rows of its table of items; None: those of the workload."""
    user_rows: int | None = None
    """Rows of its table of users; None: those of the workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiments:
    """A file."""

    workload: Workload
    runs: tuple[Run, ...]
    """In the order of the file."""


def read_experiments(path: Path) -> Experiments:
    """Read a file of the form above.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong; the message names the file and the run.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    try:
        return _experiments(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def slug(name: str) -> str:
    """Return a run's name as part of a file name."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def lengths_of(run: Run, workload: Workload) -> tuple[str, ...]:
    """Return the names of the distributions for which a run is made, in the order of the workload."""
    return tuple(name for name in workload.lengths if run.lengths is None or name in run.lengths)


def resolved(settings: TrainConfig) -> dict[str, Any]:
    """Return all settings by name."""
    return dataclasses.asdict(settings)


def _experiments(content: Mapping[str, Any]) -> Experiments:
    check_keys("the file", content, ("workload", "settings", "run"))
    workload = _workload(_table("[workload]", content.get("workload", {})))
    common = _table("[settings]", content.get("settings", {}))
    _settings("[settings]", {}, common)  # a mistake there is not one of the first run
    tables = content.get("run")
    if not isinstance(tables, list) or not tables:
        raise ConfigError("the file has no [[run]]; write at least one, with a name")
    runs: dict[str, Run] = {}
    for number, table in enumerate(tables, 1):
        run = _run(f"run {number}", _table(f"run {number}", table), common, runs, workload)
        if same := [other.name for other in runs.values() if slug(other.name) == slug(run.name)]:
            raise ConfigError(f"run {run.name!r}: {same[0]!r} has the same name as a file; choose another name")
        runs[run.name] = run
    return Experiments(workload=workload, runs=tuple(runs.values()))


def _workload(table: dict[str, Any]) -> Workload:
    check_keys("[workload]", table, [entry.name for entry in dataclasses.fields(Workload)])
    lengths = _table("[workload.lengths]", table.get("lengths", {}))
    try:
        return Workload(**{**table, "lengths": lengths})
    except ConfigError as error:
        raise ConfigError(f"[workload]: {error}") from error


def _run(
    place: str, table: dict[str, Any], common: Mapping[str, Any], before: dict[str, Run], workload: Workload
) -> Run:
    check_keys(place, table, _RUN_KEYS)
    name = table.get("name")
    if not isinstance(name, str) or not slug(name) or name in (BASELINE, HSTU_COST) or escape_controls(name) != name:
        raise ConfigError(
            f"{place}: name must be text with letters or digits, but not {BASELINE!r} or {HSTU_COST!r}, got {name!r}"
        )
    place = f"run {name!r}"
    for key, value in table.items():
        if type(value) is not _RUN_KEYS[key]:
            raise ConfigError(f"{place}: {key} must be of type {_RUN_KEYS[key].__name__}, got {value!r}")
    for key in ("gpus", "item_rows", "user_rows"):
        if key in table and table[key] < 1:
            raise ConfigError(f"{place}: {key} must be at least 1, got {table[key]}")
    base = _base(place, table.get("adds_to", next(reversed(before), BASELINE)), before)
    settings = _settings(place, resolved(base.settings) if base else common, table.get("settings", {}))
    keys = {key: getattr(base, key) for key in _INHERITED} if base else {}
    keys |= {key: table[key] for key in _INHERITED if key in table}
    if "lengths" in table:
        keys["lengths"] = _lengths(place, table["lengths"], workload)
    run = Run(name=name, adds_to=base.name if base else None, settings=settings, **keys)
    if run.cost != HSTU_COST:
        _check_cost(place, run, before, workload)
    return run


def _base(place: str, name: str, before: dict[str, Run]) -> Run | None:
    if name == BASELINE:
        return None
    if name not in before:
        raise ConfigError(f"{place}: adds_to must be {BASELINE!r} or {_known_runs(before)}, got {name!r}")
    return before[name]


def _settings(place: str, inherited: Mapping[str, Any], own: dict[str, Any]) -> TrainConfig:
    check_keys(f"{place}, settings", own, [name for name in rules_of(TrainConfig) if name not in UNUSED_SETTINGS])
    try:
        return TrainConfig(**{**inherited, **own})
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _lengths(place: str, names: list[Any], workload: Workload) -> tuple[str, ...]:
    if not names or any(name not in list(workload.lengths) for name in names):
        known = ", ".join(workload.lengths)
        raise ConfigError(f"{place}: lengths must be names of [workload.lengths] ({known}), got {names!r}")
    return tuple(names)


def _check_cost(place: str, run: Run, before: dict[str, Run], workload: Workload) -> None:
    if run.cost not in before:
        raise ConfigError(f"{place}: cost must be {HSTU_COST!r} or {_known_runs(before)}, got {run.cost!r}")
    source = before[run.cost]
    if source.settings.balance != "none":
        raise ConfigError(
            f"{place}: cost is fitted to the times of {run.cost!r}, which is balanced; name a run with balance = 'none'"
        )
    if missing := set(lengths_of(run, workload)) - set(lengths_of(source, workload)):
        raise ConfigError(
            f"{place}: cost is fitted to the times of {run.cost!r}, which does not run with the lengths "
            f"{min(missing)!r}; give both the same lengths"
        )


def _known_runs(before: dict[str, Run]) -> str:
    return f"a run before it ({', '.join(before) or 'there is none'})"


def _table(place: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place} must be a table of keys, got {value!r}")
    return value


def _check_lengths(name: str, text: Any) -> None:
    if slug(name) != name:
        raise ConfigError(f"lengths {name!r}: the name is that of a folder; write it as {slug(name) or 'lognormal'!r}")
    if not isinstance(text, str):
        raise ConfigError(f"lengths {name!r} must be a distribution such as 'uniform:low=1,high=9', got {text!r}")
    # Imported here, because `--help` does not need Numba.
    from evenrank.datasets.distributions import parse_distribution

    try:
        parse_distribution(text)
    except EvenrankError as error:
        raise ConfigError(f"lengths {name!r}: {error}") from error
