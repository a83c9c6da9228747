"""`evenrank preprocess`: convert raw interaction logs to sequence Parquet."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenrank.cli import console, settings_options
from evenrank.core.errors import ConfigError
from evenrank.core.rules import AllBut, AppliesTo, Bounds, OneOf, Option
from evenrank.core.storage import is_url, join, locate
from evenrank.preprocess.config import Events, PreprocessConfig
from evenrank.preprocess.read.public import CATALOG, CUSTOM, DATASETS, SYNTHETIC

if TYPE_CHECKING:
    from evenrank.datasets.schema import IdSummary

_ALL = "all"


@dataclass(kw_only=True)
class _Command:
    """What the command says otherwise than the records, and what it has besides."""

    dataset: Annotated[str, OneOf((*DATASETS, _ALL)), Option("NAME", panel="Dataset")]
    """What to preprocess; `all`: every public dataset that can be downloaded."""
    out: Annotated[Path | None, Option("FOLDER")] = None
    """Folder or URL to write; a dataset there is replaced at the end. Default: out/DATASET."""
    k_core: Events = 1
    """Leave out users and items with fewer events, repeatedly."""
    eval_fraction: Annotated[float | None, Option("FRACTION")] = None
    """The same as --split user:FRACTION."""
    timestamp_column: Annotated[str, Option("COLUMN"), AppliesTo(timestamp_unit=AllBut(("row",)))] = "timestamp"
    """Column of times."""
    items: Annotated[int, Bounds(at_least=1), Option("COUNT")] = 50_000
    """Number of items; their popularity is Zipf."""
    item_exponent: Annotated[float, Option("EXPONENT"), AppliesTo(dataset=(SYNTHETIC,)), AppliesTo(expand=(None,))] = (
        1.05
    )
    """Of their popularity; 0: all are as popular."""


_CONFIG = (
    'TOML file of options: columns = ["a", "b"], k_core = 5. Its paths, also of OUT, are relative to its folder. '
    "Options of the command line win over it."
)
OPTIONS = settings_options.options_of(PreprocessConfig, _Command)


@settings_options.command_of(OPTIONS)
def preprocess_command(
    ctx: typer.Context,
    config_file: Annotated[Path | None, settings_options.config_option(OPTIONS, _CONFIG, panel="Dataset")] = None,
) -> None:
    """Convert raw interaction logs to sequence Parquet: one row per user, events in time order.

    Writes OUT/train/*.parquet, OUT/eval/*.parquet and OUT/manifest.json; the last line is the next command. Examples:

    \b
        evenrank preprocess --dataset ml-20m --raw-dir raw --out out/ml-20m
        evenrank preprocess --dataset ml-20m --split leave-last:1 --k-core 5
        evenrank preprocess --dataset custom --events log.csv --user-column uid
        evenrank preprocess --dataset yambda-50m --split time:first:300d,gap:30m
        evenrank preprocess --dataset synthetic --item-exponent 1.2 --drift days=3
        evenrank preprocess --dataset synthetic --expand ml-20m:16x32
        evenrank preprocess --config examples/recipes/steam.toml
    """
    values = check_options(ctx)

    from evenrank.datasets.distributions import Zipf
    from evenrank.datasets.event_statistics import read_statistics
    from evenrank.datasets.schema import ITEM_ID, USER_ID
    from evenrank.preprocess import preprocess
    from evenrank.preprocess.read.times import UNITS

    dataset, out = values.pop("dataset"), values.pop("out", None)
    if dataset == CUSTOM:
        values["timestamp_column"] = "" if ctx.params["timestamp_unit"] == "row" else ctx.params["timestamp_column"]
    if "delimiter" in values:
        values["delimiter"] = values["delimiter"].replace("\\t", "\t")  # as it is usually typed
    if {"items", "item_exponent"} & values.keys():
        values["items"] = Zipf(exponent=ctx.params["item_exponent"], high=ctx.params["items"])
    public = [name for name, found in CATALOG.items() if found.can_be_downloaded]
    for name in public if dataset == _ALL else (dataset,):
        folder = Path("out", name) if out is None else join(out, name) if dataset == _ALL else out
        config = settings_options.make(PreprocessConfig, values, OPTIONS, dataset=name, out=folder)
        added: list[str] = []
        with console.stages() as on_stage:
            shows_progress = console.shows_progress()
            manifest = preprocess(config, on_stage=on_stage, on_added=added.append, show_progress=shows_progress)
        time = manifest.options["time"]
        console.print_result(
            f"timestamps: {UNITS[time['unit']]}, first event {time['first']}, last event {time['last']}"
        )
        place = locate(folder)  # without credentials
        for split_name, info in manifest.splits.items():
            console.print_result(f"{place}/{split_name}: {info.rows:,} rows, {info.interactions:,} interactions")
        for column in (USER_ID, ITEM_ID):
            console.print_result(f"{column}: {_describe_ids(manifest.ids[column])}")
        for description, count in manifest.options["audit"].items():
            console.print_result(f"{description}: {count:,}")
        console.print_aligned(read_statistics(manifest).describe())
        for text in added:
            console.print_result(f"added: {text}")
        rest = "  # with the options and credentials of --out" if is_url(folder) and str(folder) != str(place) else ""
        console.print_result(f"next: evenrank inspect {shlex.quote(str(place))}{rest}")


def check_options(context: typer.Context) -> dict[str, Any]:
    """Return the options that were given; a ConfigError if one has no effect, or is missing."""
    params, say = context.params, settings_options.Shown(context, OPTIONS)
    given = {name: settings_options.source_of(context, name) for name in ("eval_fraction", "split")}
    given = {name: place for name, place in given.items() if place in (settings_options.LINE, settings_options.FILE)}
    if len(set(given.values())) == 1 < len(given):
        both = " and ".join(say.given(name, params[name]) for name in given)
        raise ConfigError(f"{both} both define the split; pass one of them")
    if "eval_fraction" in given and given.get("split") != settings_options.LINE:
        params["split"] = f"user:{params['eval_fraction']}"
    values = settings_options.check_options(context, OPTIONS)
    values["split"] = params["split"]
    if params["dataset"] == _ALL and params["vocabulary"] is not None:
        shown = say.given("vocabulary", params["vocabulary"])
        raise ConfigError(f"{shown} applies to one dataset, not to {say.given('dataset', _ALL)}; leave it out")
    if params["dataset"] == CUSTOM and not params["events"]:
        raise ConfigError(f"--dataset {CUSTOM} needs --events, the files of the log; add it, or `events` to --config")
    return values


def _describe_ids(summary: "IdSummary") -> str:
    counted = {"{:,} distinct": summary.distinct, "largest {:,}": summary.largest}
    found = ", ".join(text.format(count) for text, count in counted.items() if count is not None)
    if summary.rule == "dense":
        if summary.unknown_values:
            found += f", {summary.unknown_values:,} of them not in the earlier vocabulary"
        return f"dense ({found}), numbered 1 to {summary.versions[-1].size:,} by first appearance"
    if summary.rule == "keep":
        return f"kept ({found})"
    return f"{summary.rule} ({found}), {summary.collisions:,} values share their id with another"
