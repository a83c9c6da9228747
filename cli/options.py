"""Options of several commands, and their checks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenrank.core.errors import ConfigError

if TYPE_CHECKING:
    from evenrank.dataloader.balance.cost import Cost

# Our strategies, whose registry's package imports NumPy and Numba, which `--help` does not wait for.
STRATEGIES = ("none", "karmarkar-karp", "lpt-swap", "min-move")
TOLERANT_STRATEGIES = ("lpt-swap", "min-move")  # which stop at the tolerance

MAX_LENGTH = (1 << 31) - 1  # of a history

CostFile = Annotated[
    Path | None,
    typer.Option(
        help="File of a measured cost, written by MeasuredCost.save. Default: FLOPs of an HSTU model with the shape "
        "given by the next three options.",
        metavar="FILE",
        show_default=False,
    ),
]
Hidden = Annotated[int, typer.Option(help="Width of the HSTU layers.", min=1, max=1 << 20)]
Heads = Annotated[int, typer.Option(help="Attention heads per layer, each hidden / heads wide.", min=1, max=1 << 20)]
Layers = Annotated[int, typer.Option(help="Number of HSTU layers.", min=1, max=1 << 20)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """Options, by the names of their parameters, that have an effect only with certain values of others."""

    options: tuple[str, ...]
    apply_to: str
    """For the message."""
    holds: Callable[[Mapping[str, Any]], bool]
    """From the values of all parameters by name."""
    decided_by: tuple[str, ...]


MODEL_SHAPE = Condition(
    options=("hidden", "heads", "layers"),
    apply_to="the cost of an HSTU model",
    holds=lambda values: values["cost"] is None,
    decided_by=("cost",),
)


def check_conditions(context: typer.Context, *conditions: Condition) -> None:
    """Raise a ConfigError if an option was given that has no effect, even with the value that is its default."""
    parameters = {parameter.name: parameter for parameter in context.command.params}
    for condition in conditions:
        given = given_options(context, condition.options)
        if not given or condition.holds(context.params):
            continue
        chosen = " with ".join(
            str(value) if parameters[name].param_type_name == "argument" else f"{parameters[name].opts[0]} {value}"
            for name in condition.decided_by
            if (value := context.params[name]) is not None
        )
        reason = f"not to {chosen}; change one of them" if chosen else "which is missing; add it"
        raise ConfigError(f"{parameters[given[0]].opts[0]} applies to {condition.apply_to}, {reason}")


def given_options(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Return which of these parameters were given on the command line."""
    return [name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]


def make_cost(path: Path | None, *, hidden: int, heads: int, layers: int) -> "Cost":
    """Return the cost in a file or, without one, that of an HSTU model whose heads are `hidden / heads` wide."""
    from evenrank.dataloader.balance import HSTUCost, MeasuredCost

    if path is not None:
        if path.exists() and not path.is_file():  # a pipe would never end
            raise ConfigError(f"--cost {path} is not a regular file; give one that MeasuredCost.save wrote")
        return MeasuredCost.load(path)
    if heads < 1 or hidden % heads:
        raise ConfigError(
            f"--hidden must be a multiple of --heads, got --hidden {hidden} and --heads {heads}; change one of them"
        )
    return HSTUCost(hidden=hidden, heads=heads, head_dim=hidden // heads, layers=layers, interleave_actions=True)
