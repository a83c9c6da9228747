"""Options of several commands, and their checks."""

import inspect
import os
import pkgutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from evenrank.cli import console
from evenrank.core import files
from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.rules import AppliesTo, Bounds, Option, Where
from evenrank.core.settings import Settings
from evenrank.core.storage import is_url, local_path
from evenrank.datasets.schema import MAX_HISTORY_LENGTH

if TYPE_CHECKING:
    from evenrank.dataloader.balance import Cost, MeasuredCost

# Our strategies, whose registry's package imports NumPy and Numba, which `--help` does not wait for.
STRATEGIES = ("none", "karmarkar-karp", "lpt-swap", "min-move")


DatasetFolder = Annotated[
    Path, typer.Argument(help="Folder or URL written by `evenrank preprocess`.", metavar="PATH", show_default=False)
]
Json = Annotated[
    bool, typer.Option("--json", callback=console.collect_numbers, expose_value=False, help="Print one JSON document.")
]
file_option = partial(typer.Option, metavar="FILE", show_default=False)

BATCH_SIZE, MIN_STEPS, RANKS = 32, 200, (8, 64, 1024)  # where a gain is shown and nothing else is said


@dataclass(frozen=True, kw_only=True)
class StepOptions(Settings):
    """Which samples a step has."""

    batch_size: Annotated[int, Bounds(at_least=1, at_most=1 << 20), Option("COUNT", panel="Steps")] = BATCH_SIZE
    """Samples per rank and step."""
    split: Annotated[str, Option("NAME", completions=lambda: ("train", "eval"))] = "train"
    """Split of the dataset."""
    max_history_length: Annotated[int, Bounds(at_least=1, below=1 << 31), Option("EVENTS")] = MAX_HISTORY_LENGTH
    """Events per sample, as in LoaderConfig; longer histories keep their newest."""


def is_dataset(place: Path | str) -> bool:
    """Return whether a place can only be that of a dataset: a folder or a URL."""
    return is_url(place) or local_path(place).is_dir()


_HAS_LAYERS = AppliesTo(cost=Where("hstu, self-attention or padded", lambda cost: has_layers(cost)))
_Size = Annotated[int, Bounds(at_least=1, at_most=1 << 20), _HAS_LAYERS]


@dataclass(frozen=True, kw_only=True)
class CostOptions(Settings):
    """The cost of a sample."""

    cost: Annotated[str, Option("COST", panel="Cost", completions=lambda: costs_by_name())] = "hstu"
    """Cost of a sample: `hstu` or `self-attention`, FLOPs of jagged layers; `linear`, its tokens; `padded`,
    self-attention where all samples of a rank are padded to its longest; FILE, a measured cost (evenrank fit), or
    padded:FILE; or module:function."""
    hidden: Annotated[_Size, Option("WIDTH")] = (
        1024  # with 4 heads and 8 layers, the model of the published balancing results
    )
    """Width of the layers whose FLOPs are the cost."""
    heads: Annotated[_Size, Option("COUNT")] = 4
    """Attention heads per layer, each hidden / heads wide."""
    layers: Annotated[_Size, Option("COUNT")] = 8
    """Number of layers."""


def costs_by_name(model: CostOptions | None = None) -> dict[str, dict[str, Any]]:
    """Return the registered costs that need no more than layers, by name, as `resolve_cost` takes them."""
    from evenrank.dataloader.balance import COSTS

    model = model or CostOptions()
    sizes = {"hidden": model.hidden, "heads": model.heads, "head_dim": model.hidden // model.heads}
    sizes |= {"layers": model.layers, "ffn_multiplier": 4}
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


def make_cost(model: CostOptions) -> "Cost":
    """Return the cost that `--cost` names."""
    from evenrank.dataloader.balance import PaddedCost
    from evenrank.dataloader.balance.costs.cost import resolve_cost

    text = model.cost
    if model.hidden % model.heads:
        got = f"got --hidden {model.hidden} and --heads {model.heads}"
        raise ConfigError(f"--hidden must be a multiple of --heads, {got}; change one of them")
    if (named := costs_by_name(model).get(text)) is not None:
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
