"""Options of several commands, and their checks."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from evenrank.core import files
from evenrank.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from evenrank.dataloader.balance.cost import Cost

# Our strategies, whose registry's package imports NumPy and Numba, which `--help` does not wait for.
STRATEGIES = ("none", "karmarkar-karp", "lpt-swap", "min-move")

DatasetFolder = Annotated[
    Path, typer.Argument(help="Folder written by `evenrank preprocess`.", metavar="PATH", show_default=False)
]
file_option = partial(typer.Option, metavar="FILE", show_default=False)


class Condition(NamedTuple):
    """Options, by the names of their parameters, that have an effect only with certain values of others."""

    options: tuple[str, ...]
    apply_to: str  # for the message
    decided_by: tuple[str, ...]
    holds: Callable[[Mapping[str, Any]], bool]  # from the values of all parameters by name


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


def page_path(subject: Path, chosen: Path | None) -> Path:
    """Return the path of the page about a dataset or a log: the chosen one, or NAME-report.html next to the subject."""
    is_dataset = subject.is_dir()
    page = chosen
    if page is None:
        named = subject if subject.name not in ("", "..") else subject.resolve()
        page = named.parent / f"{named.name if is_dataset else named.stem}-report.html"
    if page.is_dir():
        raise ConfigError(f"{page} is a folder; --html needs the name of a file")
    if is_dataset and page.resolve().is_relative_to(subject.resolve()):
        raise ConfigError(
            f"{page} is inside the dataset, which may contain nothing else; choose a file outside {subject} with --html"
        )
    if page.resolve() == subject.resolve():
        raise ConfigError(f"{page} is the log, which the page would replace; choose another file with --html")
    return page


def write_page(page: Path, html: str) -> None:
    """Write the page atomically: an existing file is replaced by the complete page or not at all."""
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(page, html)
    except OSError as error:
        raise DataError(
            f"{page} could not be written: {error.strerror or error}; choose another path with --html FILE"
        ) from error
