"""`Experiments`: the runs of a table, from a TOML file; each adds settings to another."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What every run of a table trains on, and how long."""

    lengths: Mapping[str, str]
    """Distributions of the events of a sample by name, each as `parse_distribution` takes it; one table for each."""
    item_rows: int = 50_000_000
    """Rows of the table of items."""
    user_rows: int = 50_000_000
    """Rows of the table of users."""
    item_exponent: float = 1.05
    """Item ids are drawn from a Zipf distribution with this exponent."""
    num_batches: int = 100
    """Batches of a rank, drawn before the clock starts; steps cycle through them."""
    steps: int = 1000
    """Timed steps with live balancing, in all rounds together; those with prepared and even batches are as many."""
    rounds: int = 2
    """Times that live, prepared and even batches take turns."""
    warmup_steps: int = 100
    """Steps before the first round."""
    skipped_steps: int = 10
    """First steps of each segment that do not count."""
    seed: int = 0
    """Of the draws."""


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
    runs: tuple[Run, ...] = field(default=())


def slug(name: str) -> str:
    """Return a run's name as part of a file name."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def resolved(settings: TrainConfig) -> dict[str, Any]:
    """Return all settings by name."""
    return dataclasses.asdict(settings)
