"""`evenrank preprocess`: convert raw interaction logs to sequence Parquet."""

import shlex
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenrank.cli import console, options
from evenrank.cli.options import Condition, needing, one_of
from evenrank.core.errors import ConfigError
from evenrank.core.storage import is_url, join, locate
from evenrank.preprocess.log_config import TabularConfig
from evenrank.preprocess.sources.catalog import CATALOG, CUSTOM, DATASETS, SYNTHETIC

if TYPE_CHECKING:
    from evenrank.datasets.schema import IdSummary

_ALL = "all"
_DESCRIPTION = tuple(field.name for field in fields(TabularConfig))  # the options that describe a custom log

# The options that have no effect on some datasets, or without others; `v` are the values of all options.
_CONDITIONS = (
    Condition(
        ("raw_dir",),
        "public datasets and to --expand",
        ("dataset",),
        lambda v: v["dataset"] not in (SYNTHETIC, CUSTOM) or v["expand"] is not None,
    ),
    Condition(
        ("users", "items", "item_exponent", "lengths", "actions", "contextual", "drift"),
        f"--dataset {SYNTHETIC} without --expand",
        ("dataset", "expand"),
        lambda v: v["dataset"] == SYNTHETIC and v["expand"] is None,
    ),
    Condition(("expand",), f"--dataset {SYNTHETIC}", ("dataset",), lambda v: v["dataset"] == SYNTHETIC),
    Condition((*_DESCRIPTION, "append"), f"--dataset {CUSTOM}", ("dataset",), lambda v: v["dataset"] == CUSTOM),
    Condition(
        ("on_error",),
        "datasets that are read from files",
        ("dataset",),
        lambda v: v["dataset"] != SYNTHETIC or v["expand"] is not None,
    ),
    Condition(
        ("seed",),
        f"--split user:FRACTION and to --dataset {SYNTHETIC}",
        ("dataset", "split"),
        lambda v: v["split"].startswith("user:") or v["dataset"] == SYNTHETIC,
    ),
    Condition(("ray_address",), "--engine ray", ("engine",), lambda v: v["engine"] == "ray"),
    Condition(("memory_limit",), "this machine", ("ray_address",), lambda v: v["ray_address"] is None),
    Condition(("vocabulary", "unknown"), "one dataset", ("dataset",), lambda v: v["dataset"] != _ALL),
    Condition(("append", "ids"), "datasets without --vocabulary", ("vocabulary",), lambda v: v["vocabulary"] is None),
    Condition(("timestamp_column",), "times in a column", ("timestamp_unit",), lambda v: v["timestamp_unit"] != "row"),
    Condition(("action_map",), "one --action-columns", ("action_columns",), lambda v: len(v["action_columns"]) == 1),
    needing("vocabulary", "unknown"),
    needing("requests", "by_date", metavar=" SECONDS"),
    needing("window", "stride"),
    needing("context", "context_columns", "context_header"),
    needing("item_features", "item_columns", "item_features_as"),
)

_dataset, _splits, _ids, _logs, _features, _synthetic = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in (
        "Dataset",
        "Splits and filters",
        "Ids",
        f"Logs (--dataset {CUSTOM})",
        f"Features (--dataset {CUSTOM})",
        f"Synthetic data (--dataset {SYNTHETIC})",
    )
)
_log_names, _feature_names = (partial(options.names_option, **option.keywords) for option in (_logs, _features))


def preprocess_command(
    ctx: typer.Context,
    dataset: Annotated[
        str,
        _dataset(
            help=f"What to preprocess: {', '.join(DATASETS)}, or {_ALL} (every public dataset).",
            **one_of(*DATASETS, _ALL, metavar="NAME"),
        ),
    ],
    config_file: Annotated[
        Path | None,
        options.config_option(
            panel="Dataset",
            split="(?<=^file:).+",
            **dict.fromkeys(("lengths", "actions", "contextual"), r"(?<=\bpath=)[^,]+"),
        ),
    ] = None,
    out: Annotated[
        Path | None,
        _dataset(
            help="Folder or URL to write; a dataset there is replaced at the end. Default: out/DATASET.",
            metavar="FOLDER",
        ),
    ] = None,
    overwrite: Annotated[bool, _dataset(help="Replace OUT even if it is no dataset.")] = False,
    append: Annotated[
        bool,
        _dataset(
            help="Add later events to the dataset at OUT, whose log is not read again; the result is that of all at "
            "once. Repeat the other options by which it was made.",
        ),
    ] = False,
    raw_dir: Annotated[
        Path,
        _dataset(
            help="Folder of the raw files of public datasets, laid out as their archives unpack "
            "(FOLDER/ml-20m/ratings.csv), or of the official archives. Missing files are downloaded into it.",
            metavar="FOLDER",
        ),
    ] = Path("raw"),
    on_error: Annotated[
        str, _dataset(help="On malformed rows: fail, or skip and count them.", **one_of("fail", "skip"))
    ] = "fail",
    engine: Annotated[
        str,
        _dataset(
            help="Where the work is done: local, on threads of this process; ray, on the nodes of a Ray cluster. What "
            "is written is the same. Run a command that was killed again, and it goes on where it was.",
            **one_of("local", "ray"),
        ),
    ] = "local",
    ray_address: Annotated[
        str | None,
        _dataset(
            help="Of a running Ray cluster, such as auto. Default: one of this machine is started and ended.",
            metavar="ADDRESS",
        ),
    ] = None,
    memory_limit: Annotated[
        float | None,
        _dataset(
            help="Memory that decides, with the cores of this machine, how many threads or processes there are. "
            "Default: half of what is free.",
            metavar="GB",
        ),
    ] = None,
    split: Annotated[
        str,
        _splits(
            help="What goes to eval: user:FRACTION, that fraction of the users; leave-last:N, the last N events of "
            "each user; time:2015, time:2015-01-06, time:1420070400 or ISO 8601, the events from that time on; "
            "time:last:7d (or h, w), those of the last 7 days; file:PATH, the users in a text file (.txt) or in a "
            "table with the log's column of users, or the events of a second log; or none.",
            metavar="RULE",
        ),
    ] = "user:0.3",
    eval_fraction: Annotated[
        float | None, _splits(help="The same as --split user:FRACTION.", metavar="FRACTION")
    ] = None,
    seed: Annotated[int, _splits(help="Seed of the split by user and of synthetic data.", metavar="NUMBER")] = 0,
    allow_empty: Annotated[
        bool, _splits(help="Accept a log of 1970, and an empty train or eval with time: and file:.")
    ] = False,
    k_core: Annotated[
        int, _splits(help="Leave out users and items with fewer events, repeatedly.", metavar="EVENTS")
    ] = 1,
    min_length: Annotated[int, _splits(help="Leave out users with fewer events.", metavar="EVENTS")] = 1,
    max_length: Annotated[int | None, _splits(help="Leave out users with more events.", metavar="EVENTS")] = None,
    window: Annotated[
        int | None, _splits(help="Cut longer histories into rows of at most this many events.", metavar="EVENTS")
    ] = None,
    stride: Annotated[
        int | None,
        _splits(help="Distance of the starts of two windows in events. Default: the window.", metavar="EVENTS"),
    ] = None,
    requests: Annotated[
        float | None,
        _splits(
            help="Also write requests.parquet, for replaying inference traffic: a user makes a request at the first "
            "event, and then at each event that is at least this long after the last request.",
            metavar="SECONDS",
        ),
    ] = None,
    by_date: Annotated[bool, _splits(help="Restart requests and histories at midnight (UTC).")] = False,
    ids: Annotated[
        str,
        _ids(
            help="Ids of users and items: dense, numbered by first appearance, with a vocabulary; keep, the integers "
            "of the log; hash:N, a hash below N; auto, dense or keep by their range. For both, or item=RULE,user=RULE. "
            "Default: dense for public datasets, auto for custom ones.",
            **one_of("auto", "dense", "keep", metavar="RULE"),
        ),
    ] = "",
    vocabulary: Annotated[
        Path | None, _ids(help="Earlier dataset, whose ids are kept, for a later log.", metavar="FOLDER")
    ] = None,
    unknown: Annotated[
        str,
        _ids(
            help="With --vocabulary, what to do about values that it lacks: append them (default); oov, give them the "
            "id 0; drop their events; or fail. For both, or item=RULE,user=RULE.",
            **one_of("append", "oov", "drop", "fail", metavar="RULE"),
        ),
    ] = "",
    events: Annotated[
        list[Path] | None,
        _logs(
            help="Events as delimited text, JSON lines or Parquet: a file, a quoted pattern such as 'logs/*.csv.gz', "
            "or a folder, also at a URL (s3://, gs://); can be repeated.",
            metavar="PATH",
        ),
    ] = None,
    delimiter: Annotated[
        str | None, _logs(help="Separator of fields. Default: found by the first line.", metavar="CHARACTER")
    ] = None,
    columns: Annotated[list[str] | None, _log_names(help="All columns of events, if they have no header.")] = None,
    user_column: Annotated[str, _logs(help="Column of user ids.", metavar="COLUMN")] = "user_id",
    item_column: Annotated[str, _logs(help="Column of item ids.", metavar="COLUMN")] = "item_id",
    timestamp_column: Annotated[str, _logs(help="Column of times.", metavar="COLUMN")] = "timestamp",
    timestamp_unit: Annotated[
        str,
        _logs(
            help="Unit of times: s, ms, us, ns, iso, date; auto, as they look; row, the order of the rows.",
            **one_of("s", "ms", "us", "ns", "iso", "date", "auto", "row", metavar="UNIT"),
        ),
    ] = "auto",
    action_columns: Annotated[
        list[str] | None, _log_names(help="One column of actions, or several of 0 and 1. Default: all are 0.")
    ] = None,
    action_map: Annotated[
        str,
        _logs(
            help="What becomes of one action column: stars, half-stars, bins:2.5,4, values:pv,cart,buy, or float, a "
            "column of events. Default: integers from 0 on.",
            **one_of("stars", "half-stars", "float", metavar="RULE"),
        ),
    ] = "",
    event_columns: Annotated[
        list[str] | None, _log_names(help="More columns of events: COLUMN[:int|float][=FILL], such as dwell:int=0.")
    ] = None,
    label: Annotated[
        str, _logs(help="Column of labels: COLUMN[:int|float][=FILL], such as watch_time.", metavar="COLUMN")
    ] = "",
    weight: Annotated[str, _logs(help="Column of weights: COLUMN[:int|float][=FILL].", metavar="COLUMN")] = "",
    context: Annotated[Path | None, _features(help="File about users, one row each.", metavar="FILE")] = None,
    context_columns: Annotated[
        list[str] | None, _feature_names(help="Features in it: COLUMN[:id|float|list], such as country,age:float.")
    ] = None,
    context_header: Annotated[list[str] | None, _feature_names(help="All columns of it, if it has no header.")] = None,
    item_features: Annotated[Path | None, _features(help="File about items, one row each.", metavar="FILE")] = None,
    item_columns: Annotated[list[str] | None, _feature_names(help="Features in it: COLUMN[:id|float|list].")] = None,
    item_features_as: Annotated[
        str,
        _features(
            help="What becomes of them: events, columns of events; table, item_features.parquet.",
            **one_of("events", "table"),
        ),
    ] = "events",
    users: Annotated[int, _synthetic(help="Number of users.", metavar="COUNT")] = 20_000,
    items: Annotated[int, _synthetic(help="Number of items; their popularity is Zipf.", metavar="COUNT")] = 50_000,
    item_exponent: Annotated[
        float, _synthetic(help="Of their popularity; 0: all are as popular.", metavar="EXPONENT")
    ] = 1.05,
    lengths: Annotated[
        str,
        _synthetic(
            help="Events per user: uniform, normal, zipf or lognormal, with parameters.", metavar="DISTRIBUTION"
        ),
    ] = "lognormal:mean=128,std=256,high=4096",
    actions: Annotated[
        str, _synthetic(help="Actions of events; the largest one follows from them.", metavar="DISTRIBUTION")
    ] = "uniform:low=0,high=4",
    contextual: Annotated[
        list[str] | None,
        _synthetic(
            help="A feature of users and its ids, 0: missing; can be repeated. Default: segment=uniform:low=1,high=8.",
            metavar="NAME=DISTRIBUTION",
        ),
    ] = None,
    drift: Annotated[
        str | None,
        _synthetic(
            help="Users change what interests them and items appear over time, such as "
            "categories=20,days=7,share=0.8,new_items=0.3 (the defaults): `share` of a user's events are of one of "
            "`categories`, for `days` on average; `new_items` is the share of items that appear after the start. Adds "
            "`category`, a column of events.",
            metavar="KEY=VALUE,...",
        ),
    ] = None,
    expand: Annotated[
        str | None,
        _synthetic(help="MovieLens with U times the users and I times the items.", metavar="NAME:UxI[:RATE]"),
    ] = None,
) -> None:
    """Convert raw interaction logs to sequence Parquet: one row per user, events in time order.

    Writes OUT/train/*.parquet, OUT/eval/*.parquet and OUT/manifest.json; the last line is the next command. Examples:

    \b
        evenrank preprocess --dataset ml-20m --raw-dir raw --out out/ml-20m
        evenrank preprocess --dataset ml-20m --split leave-last:1 --k-core 5
        evenrank preprocess --dataset custom --events log.csv --user-column uid
        evenrank preprocess --dataset synthetic --item-exponent 1.2 --drift days=3
        evenrank preprocess --dataset synthetic --expand ml-20m:16x32
        evenrank preprocess --config examples/recipes/steam.toml
    """
    check_options(ctx)

    from evenrank.datasets.distributions import Zipf, parse_distribution, parse_parameters
    from evenrank.datasets.event_statistics import read_statistics
    from evenrank.datasets.schema import ITEM_ID, USER_ID
    from evenrank.preprocess import Drift, Filters, PreprocessConfig, RequestRule, SyntheticConfig, preprocess
    from evenrank.preprocess.files.times import UNITS

    custom = None
    if dataset == CUSTOM:
        description = _same_options(TabularConfig, ctx) | {"events": tuple(events or ())}
        if delimiter is not None:
            description["delimiter"] = delimiter.replace("\\t", "\t")  # as it is usually typed
        if timestamp_unit == "row":
            description["timestamp_column"] = ""
        custom = TabularConfig(**description)
    filters = _same_options(Filters, ctx) | {"min_user_events": k_core, "min_item_events": k_core}
    settings = _same_options(PreprocessConfig, ctx) | {
        "filters": Filters(**filters),
        "requests": None if requests is None else RequestRule(seconds=requests, by_date=by_date),
        "synthetic": SyntheticConfig(
            num_users=users,
            lengths=parse_distribution(lengths),
            items=Zipf(exponent=item_exponent, high=items),
            actions=parse_distribution(actions),
            contextual={name: parse_distribution(text) for name, text in _named_texts(contextual)},
            drift=None if drift is None else parse_parameters("drift", Drift, drift, drift),
        ),
        "custom": custom,
    }
    for name in CATALOG if dataset == _ALL else (dataset,):
        folder = Path("out", name) if out is None else join(out, name) if dataset == _ALL else out
        config = PreprocessConfig(**settings | {"dataset": name, "out": folder})
        with console.stages() as on_stage:
            manifest = preprocess(config, on_stage=on_stage, show_progress=console.shows_progress())
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
        rest = "  # with the options and credentials of --out" if is_url(folder) and str(folder) != str(place) else ""
        console.print_result(f"next: evenrank inspect {shlex.quote(str(place))}{rest}")


def _named_texts(pairs: list[str] | None) -> list[tuple[str, str]]:
    named = [pair.partition("=")[::2] for pair in pairs or ["segment=uniform:low=1,high=8"]]
    for name, text in named:
        if not text or len([other for other, _ in named if other == name]) > 1:
            raise ConfigError(f"--contextual needs NAME=DISTRIBUTION, once for each name, got {name}={text}; change it")
    return named


def _same_options(record: Any, context: typer.Context) -> dict[str, Any]:
    """Return the values of the options that are called like fields of a record."""
    return {field.name: context.params[field.name] for field in fields(record) if field.name in context.params}


def check_options(context: typer.Context) -> None:
    """Raise a ConfigError if an option has no effect, or is missing; `split` gets what `--eval-fraction` says."""
    given = options.given_options(context, ("eval_fraction", "split"))
    given = [name for name in given if options.source_of(context, name) == options.LINE] or given
    if len(given) == 2:
        both = " and ".join(options.shown_option(context, name) for name in given)
        raise ConfigError(f"{both} both define the split; pass one of them")
    if given == ["eval_fraction"]:
        context.params["split"] = f"user:{context.params['eval_fraction']}"
    options.check_conditions(context, *_CONDITIONS)
    if context.params["dataset"] == CUSTOM and not context.params["events"]:
        raise ConfigError(f"--dataset {CUSTOM} needs --events, the files of the log; add it, or `events` to --config")


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
