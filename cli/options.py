"""Options of several commands, and their checks."""

import glob
import inspect
import os
import pkgutil
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast, get_args, get_origin, get_type_hints

import typer

from evenrank.cli import console
from evenrank.core import files
from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.settings import check_keys
from evenrank.core.storage import is_url, local_path

if TYPE_CHECKING:
    from evenrank.dataloader.balance import Cost, MeasuredCost

# Our strategies, whose registry's package imports NumPy and Numba, which `--help` does not wait for.
STRATEGIES = ("none", "karmarkar-karp", "lpt-swap", "min-move")


def one_of(*names: str, metavar: str = "") -> dict[str, Any]:
    """Return what an option with choices shows as its value, and the shell's completion, also after a comma."""

    def complete(incomplete: str) -> list[str]:
        return [incomplete[: incomplete.rfind(",") + 1] + name for name in names]

    return {"metavar": metavar or "|".join(names), "autocompletion": complete}


DatasetFolder = Annotated[
    Path, typer.Argument(help="Folder or URL written by `evenrank preprocess`.", metavar="PATH", show_default=False)
]
Json = Annotated[
    bool, typer.Option("--json", callback=console.collect_numbers, expose_value=False, help="Print one JSON document.")
]
file_option = partial(typer.Option, metavar="FILE", show_default=False)

BATCH_SIZE, MIN_STEPS, RANKS = 32, 200, (8, 64, 1024)  # where a gain is shown and nothing else is said
step_option, balance_option, cost_option = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Steps", "Balancing", "Cost")
)
BatchSize = Annotated[int, step_option(help="Samples per rank and step.", metavar="COUNT", min=1, max=1 << 20)]
MaxHistoryLength = Annotated[
    int,
    step_option(
        help="Events per sample, as in LoaderConfig; longer histories keep their newest.",
        metavar="EVENTS",
        min=1,
        max=(1 << 31) - 1,
    ),
]
Split = Annotated[str, step_option(help="Split of the dataset.", **one_of("train", "eval", metavar="NAME"))]


LINE, FILE = "COMMANDLINE", "DEFAULT_MAP"  # Click's names of where parameters are given


class Condition(NamedTuple):
    """Options, by the names of their parameters, that have an effect only with certain values of others."""

    options: tuple[str, ...]
    apply_to: str  # for the message
    decided_by: tuple[str, ...]
    holds: Callable[[Mapping[str, Any]], bool]  # from the values of all parameters by name


def needing(option: str, *dependent: str, metavar: str = "") -> Condition:
    """Return the condition of options that have no effect without another one."""
    shown = f"--{option.replace('_', '-')}{metavar}"
    return Condition(dependent, shown, (option,), lambda values: values[option] is not None)


def check_conditions(context: typer.Context, *conditions: Condition) -> None:
    """Raise a ConfigError if an option has no effect, even with the value that is its default."""
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for condition in conditions:
        names = given_options(context, condition.options)
        if not names or condition.holds(context.params):
            continue
        chosen = " with ".join(shown_option(context, name) for name in condition.decided_by if context.params[name])
        reason = f"not to {chosen}; change one of them" if chosen else "which is missing; add it"
        subject = shown_option(context, names[0]) if source_of(context, names[0]) == FILE else options[names[0]]
        raise ConfigError(f"{subject} applies to {condition.apply_to}, {reason}")


def given_options(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Return which of these parameters were given, on the command line or in the file of `--config`."""
    return [name for name in names if source_of(context, name) in (LINE, FILE)]


def source_of(context: typer.Context, name: str) -> str:
    """Return where a parameter was given: on the command `LINE`, which wins over the `FILE` of `--config`, if any."""
    return getattr(context.get_parameter_source(name), "name", "")


def shown_option(context: typer.Context, name: str) -> str:
    """Return a parameter with its value as on the command line or, if it is from there, as in the file."""
    value = _shown(context.params[name])
    if source_of(context, name) == FILE:
        return f"{name} = {value} in {context.params['config_file']}"
    (parameter,) = (parameter for parameter in context.command.params if parameter.name == name)
    return value if parameter.param_type_name == "argument" else f"{parameter.opts[0]} {value}"


def _shown(value: Any) -> str:
    values = value if isinstance(value, list | tuple) else [value]
    return ",".join(str(one).lower() if isinstance(one, bool) else str(one) for one in values)


def _split_names(context: typer.Context, parameter: typer.CallbackParam, texts: list[str] | None) -> tuple[str, ...]:
    if source_of(context, str(parameter.name)) == FILE:  # a list, whose names may have commas
        return tuple(texts or ())
    return tuple(name.strip() for text in texts or () for name in text.split(",") if name.strip())


names_option = partial(typer.Option, callback=_split_names, metavar="COLUMN,...", show_default=False)


def config_option(*, panel: str, **paths: str) -> Any:
    """Declare `--config`, for the parameter `config_file`; `paths` are patterns of paths in the texts of options."""

    def read(context: typer.Context, file: Path | None) -> Path | None:
        if file is not None:  # the values become defaults, which are read after this option
            context.default_map = _read_config(file, get_type_hints(context.command.callback), paths)
        return file

    text = (
        'TOML file of options: columns = ["a", "b"], k_core = 5. Its paths, also of OUT, are relative to its folder. '
    )
    text += "Options of the command line win over it."
    return file_option("--config", callback=read, is_eager=True, help=text, rich_help_panel=panel)


def _read_config(path: Path, types: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    with files.open_regular(path) as file:
        try:
            raw = tomllib.load(file)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not valid TOML ({first_line(error)}); fix it") from error
    check_keys(path, raw, [name for name in types if name not in ("ctx", "config_file", "return")])
    return {name: _read_value(path, name, value, types[name], paths.get(name, "(?!)")) for name, value in raw.items()}


def _read_value(path: Path, key: str, value: Any, kind: Any, path_pattern: str) -> Any:
    """Return the value for a parameter of this type, with paths relative to the current folder."""
    kind = get_args(kind)[0] if isinstance(kind, UnionType) else kind
    is_list = get_origin(kind) is list
    kind = get_args(kind)[0] if is_list else kind
    values = value if isinstance(value, list) and is_list else [value]
    allowed = {float: (float, int), Path: (str,)}.get(kind, (kind,))
    if any(type(one) not in allowed or "\0" in str(one) for one in values):
        wanted = {bool: "true or false", int: "an integer", float: "a number"}.get(kind, "a string")
        raise ConfigError(f"{path}: {key} must be {wanted}{' or a list of strings' * is_list}, got {value!r}")
    if kind is Path:
        values = [_relative_to(path.parent, one) for one in values]
    elif kind is str:
        values = [re.sub(path_pattern, lambda found: _relative_to(path.parent, found[0]), one) for one in values]
    return values if is_list else values[0]


def is_dataset(place: Path | str) -> bool:
    """Return whether a place can only be that of a dataset: a folder or a URL."""
    return is_url(place) or local_path(place).is_dir()


def _relative_to(folder: Path, path: str) -> str:
    prefix = glob.escape(str(folder)) if glob.has_magic(path) else folder
    return path if is_url(path) else str(Path(prefix, path))


class CostShape(NamedTuple):
    """The layers of the model whose operations are the cost."""

    hidden: int = 1024  # the model of the published balancing results
    heads: int = 4
    layers: int = 8


LAYERS = CostShape()
_model_size = partial(cost_option, min=1, max=1 << 20)
CostName = Annotated[
    str,
    cost_option(
        metavar="COST",
        autocompletion=lambda incomplete: [*costs_by_name()],
        help="Cost of a sample: hstu or self-attention, FLOPs of jagged layers; linear, its tokens; padded, "
        "self-attention where all samples of a rank are padded to its longest; FILE, a measured cost (evenrank fit), "
        "or padded:FILE; or module:function.",
    ),
]
Hidden = Annotated[int, _model_size(help="Width of the layers whose FLOPs are the cost.", metavar="WIDTH")]
Heads = Annotated[int, _model_size(help="Attention heads per layer, each hidden / heads wide.", metavar="COUNT")]
Layers = Annotated[int, _model_size(help="Number of layers.", metavar="COUNT")]
HAS_LAYERS = Condition(
    CostShape._fields, "the costs hstu, self-attention and padded", ("cost",), lambda v: has_layers(v["cost"])
)


def costs_by_name(shape: CostShape = LAYERS) -> dict[str, dict[str, Any]]:
    """Return the registered costs that need no more than a shape of layers, by name, as `resolve_cost` takes them."""
    from evenrank.dataloader.balance import COSTS

    hidden, heads, layers = shape
    sizes = {"hidden": hidden, "heads": heads, "head_dim": hidden // heads, "layers": layers, "ffn_multiplier": 4}
    given = {"interleave_actions": True, "row": {"name": "self-attention", **sizes}, **sizes}
    found = {}
    for name in COSTS:
        parameters = inspect.signature(COSTS[name]).parameters.values()
        needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
        if given.keys() >= set(needed):
            found[name] = {"name": name, **{key: given[key] for key in needed}}
    return found


def has_layers(cost: str) -> bool:
    """Return whether a cost that `--cost` names depends on the shape of layers."""
    return costs_by_name().get(cost, {}).keys() & {"layers", "row"} != set()


def make_cost(text: str, shape: CostShape = LAYERS) -> "Cost":
    """Return the cost that `--cost` names, of layers of this shape."""
    from evenrank.dataloader.balance import PaddedCost
    from evenrank.dataloader.balance.costs.cost import resolve_cost

    hidden, heads, _ = shape
    if hidden % heads:
        raise ConfigError(
            f"--hidden must be a multiple of --heads, got --hidden {hidden} and --heads {heads}; change one of them"
        )
    if (named := costs_by_name(shape).get(text)) is not None:
        return resolve_cost(named)
    if text.startswith("padded:"):
        return PaddedCost(_measured_cost(text.removeprefix("padded:")))
    return _imported_cost(text) if ":" in text and not Path(text).exists() else _measured_cost(text)


def _measured_cost(text: str) -> "MeasuredCost":
    from evenrank.dataloader.balance import MeasuredCost

    path = Path(text)
    if path.exists() and not path.is_file():  # a pipe would never end
        raise ConfigError(f"--cost {text} is not a regular file; give one that `evenrank fit` wrote")
    if not path.exists() and not path.suffix:
        raise ConfigError(f"--cost {text} is unknown; give {', '.join(costs_by_name())}, a file or module:function")
    return MeasuredCost.load(path)


def _imported_cost(text: str) -> "Cost":
    sys.path.insert(0, "")  # modules of the current folder, as in `python -m`
    try:
        found = pkgutil.resolve_name(text)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(f"--cost {text} cannot be imported ({first_line(error)}); check the names") from error
    finally:
        sys.path.remove("")
    if not callable(found):
        raise ConfigError(f"--cost {text} is a {type(found).__name__}; give a function of lengths, num_candidates")
    return cast("Cost", found)


def page_path(dataset: Path, chosen: Path | None) -> Path:
    """Return the path of the page about a dataset: the chosen one, or NAME-report.html next to the dataset."""
    page = chosen
    if page is None:
        named = dataset if dataset.name not in ("", "..") else dataset.resolve()
        page = named.parent / f"{named.name}-report.html"
    if page.is_dir() or is_url(page):
        kind = "URL" if is_url(page) else "folder"
        raise ConfigError(f"{page} is a {kind}; --html needs the name of a file")
    real_page, real_dataset = (Path(os.path.realpath(path)) for path in (page, dataset))
    if dataset.is_dir() and real_page.is_relative_to(real_dataset):
        raise ConfigError(
            f"{page} is inside the dataset, which may contain nothing else; choose a file outside {dataset} with --html"
        )
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
