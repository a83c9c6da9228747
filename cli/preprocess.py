"""`evenrank preprocess`: convert raw interaction logs to sequence Parquet."""

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from evenrank.cli import console
from evenrank.cli.options import Condition, check_conditions, file_option, given_options
from evenrank.core.errors import ConfigError
from evenrank.preprocess.sources.catalog import CATALOG, CUSTOM, DATASETS, SYNTHETIC

if TYPE_CHECKING:
    from evenrank.datasets.schema import IdSummary
    from evenrank.preprocess.build.buckets import OnError

_ALL = "all"
_DESCRIPTION = (  # of a custom log, besides its files a key of the file of --config each
    "events",
    "user_column",
    "item_column",
    "timestamp_column",
    "timestamp_unit",
    "action_columns",
    "delimiter",
    "columns",
    "context",
    "context_columns",
)

# The options that have no effect on some datasets, or without others; `v` are the values of all options.
_CONDITIONS = (
    Condition(
        ("raw_dir",),
        "public datasets and to --expand",
        ("dataset",),
        lambda v: v["dataset"] not in (SYNTHETIC, CUSTOM) or v["expand"] is not None,
    ),
    Condition(
        ("users", "items", "lengths"),
        f"--dataset {SYNTHETIC} without --expand",
        ("dataset", "expand"),
        lambda v: v["dataset"] == SYNTHETIC and v["expand"] is None,
    ),
    Condition(("expand",), f"--dataset {SYNTHETIC}", ("dataset",), lambda v: v["dataset"] == SYNTHETIC),
    Condition(("config_file", *_DESCRIPTION), f"--dataset {CUSTOM}", ("dataset",), lambda v: v["dataset"] == CUSTOM),
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
    Condition(("by_date",), "--requests SECONDS", ("requests",), lambda v: v["requests"] is not None),
    Condition(("stride",), "--window", ("window",), lambda v: v["window"] is not None),
)
_optional = partial(typer.Option, show_default=False)
_folder = partial(typer.Option, metavar="DIR")


def preprocess_command(
    ctx: typer.Context,
    dataset: Annotated[
        str, _optional(help=f"Dataset to preprocess: {', '.join(DATASETS)}, or {_ALL} (every public one).")
    ],
    raw_dir: Annotated[
        Path,
        _folder(
            help="Folder of the raw files, laid out as their archives unpack (DIR/ml-20m/ratings.csv), or of the "
            "official archives. Missing files are downloaded into it."
        ),
    ] = Path("raw"),
    out: Annotated[
        Path | None,
        _folder(
            help="Folder to write; a dataset there is replaced at the end. Default: out/DATASET.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT even if it is no dataset.")] = False,
    split: Annotated[
        str,
        typer.Option(
            help="What goes to eval: user:FRACTION, that fraction of the users; leave-last:N, the last N events of "
            "each user; time:2015, time:2015-01-06, time:1420070400 or ISO 8601, the events from that time on; "
            "time:last:7d (or h, w), those of the last 7 days; file:PATH, the users in a text file (.txt) or in a "
            "table with the log's column of users; or none."
        ),
    ] = "user:0.3",
    allow_empty: Annotated[
        bool,
        typer.Option("--allow-empty", help="Accept a log of 1970, and an empty train or eval with time: and file:."),
    ] = False,
    eval_fraction: Annotated[float | None, _optional(help="The same as --split user:FRACTION.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split by user and of synthetic data.")] = 0,
    ids: Annotated[
        str,
        _optional(
            help="Ids of users and items: dense, numbered by first appearance, with a vocabulary; keep, the integers "
            "of the log; hash:N, a hash below N; auto, dense or keep by their range. For both, or item=RULE,user=RULE. "
            "Default: dense for public datasets, auto for custom ones."
        ),
    ] = "",
    vocabulary: Annotated[
        Path | None, _folder(help="Earlier dataset, whose ids are kept, for a later log.", show_default=False)
    ] = None,
    unknown: Annotated[
        str,
        _optional(
            help="With --vocabulary, what to do about values that it lacks: append them (default); oov, give them the "
            "id 0; drop their events; or fail. For both, or item=RULE,user=RULE."
        ),
    ] = "",
    k_core: Annotated[int, typer.Option(help="Leave out users and items with fewer events, repeatedly.")] = 1,
    min_length: Annotated[int, typer.Option(help="Leave out users with fewer events.")] = 1,
    max_length: Annotated[int | None, _optional(help="Leave out users with more events.")] = None,
    window: Annotated[int | None, _optional(help="Cut longer histories into rows of at most this many events.")] = None,
    stride: Annotated[
        int | None, _optional(help="Distance of the starts of two windows in events. Default: the window.")
    ] = None,
    on_error: Annotated[str, typer.Option(help="On malformed rows: fail, or skip and count them.")] = "fail",
    requests: Annotated[
        float | None,
        typer.Option(
            help="Also write requests.parquet, for replaying inference traffic: a user makes a request at the first "
            "event, and then at each event that is at least this long after the last request.",
            metavar="SECONDS",
            show_default=False,
        ),
    ] = None,
    by_date: Annotated[
        bool, typer.Option("--by-date", help="Restart requests and histories at midnight (UTC).")
    ] = False,
    config_file: Annotated[
        Path | None,
        file_option(
            "--config",
            help="Custom data: a TOML file with the keys events (one path or a list), user_column, item_column, "
            "timestamp_column and, optionally, timestamp_unit, action_columns, delimiter, columns, context, "
            "context_columns.",
        ),
    ] = None,
    events: Annotated[
        list[Path] | None,
        typer.Option(
            help="Custom data: events as delimited text, JSON lines or Parquet: a file, a quoted pattern such as "
            "'logs/*.csv.gz', or a folder; can be repeated.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    delimiter: Annotated[
        str | None, _optional(help="Custom data: separator of the fields of events. Default: found by the first line.")
    ] = None,
    columns: Annotated[
        str, typer.Option(help="Custom data: names of all columns, comma-separated, if the events have no header.")
    ] = "",
    user_column: Annotated[str, typer.Option(help="Custom data: column of user ids.")] = "user_id",
    item_column: Annotated[str, typer.Option(help="Custom data: column of item ids.")] = "item_id",
    timestamp_column: Annotated[str, typer.Option(help="Custom data: column of timestamps.")] = "timestamp",
    timestamp_unit: Annotated[
        str, typer.Option(help="Custom data: unit of timestamps: s, ms, us, ns, iso, date, or auto, as they look.")
    ] = "auto",
    action_columns: Annotated[
        str, typer.Option(help="Custom data: one column of integer actions, or columns of 0 and 1, comma-separated.")
    ] = "",
    context: Annotated[
        Path | None, file_option(help="Custom data: file of contextual features, one row per user.")
    ] = None,
    context_columns: Annotated[str, typer.Option(help="Custom data: columns of features, comma-separated.")] = "",
    users: Annotated[int, typer.Option(help="Synthetic data: number of users.")] = 20_000,
    items: Annotated[int, typer.Option(help="Synthetic data: number of items; their popularity is Zipf.")] = 50_000,
    lengths: Annotated[
        str, typer.Option(help="Synthetic data: events per user: uniform, normal, zipf or lognormal, with parameters.")
    ] = "lognormal:mean=128,std=256,high=4096",
    expand: Annotated[
        str | None,
        _optional(
            help="Synthetic data: MovieLens with U times the users and I times the items, such as ml-20m:16x32.",
            metavar="NAME:UxI[:RATE]",
        ),
    ] = None,
) -> None:
    """Convert raw interaction logs to sequence Parquet: one row per user, events in time order.

    Writes OUT/train/*.parquet, OUT/eval/*.parquet and OUT/manifest.json; the last line is the next command. Examples:

    \b
        evenrank preprocess --dataset ml-20m --raw-dir raw --out out/ml-20m
        evenrank preprocess --dataset ml-20m --split leave-last:1 --k-core 5
        evenrank preprocess --dataset custom --events log.csv --user-column uid --action-columns click,buy
        evenrank preprocess --dataset synthetic --users 1000000 --lengths zipf:exponent=1.2,high=4096
        evenrank preprocess --dataset synthetic --expand ml-20m:16x32
    """
    check_conditions(ctx, *_CONDITIONS)
    if eval_fraction is not None and given_options(ctx, ["split"]):
        raise ConfigError(
            f"--eval-fraction {eval_fraction} and --split {split} both define the split; pass one of them"
        )

    from evenrank.datasets.distributions import Zipf, parse_distribution
    from evenrank.datasets.event_statistics import read_statistics
    from evenrank.preprocess import Filters, PreprocessConfig, RequestRule, SyntheticConfig, TabularConfig, preprocess
    from evenrank.preprocess.files.times import UNITS
    from evenrank.preprocess.log_config import read_toml

    custom = None
    if dataset == CUSTOM:
        description: dict[str, Any] = {name: ctx.params[name] for name in _DESCRIPTION}
        description |= {"events": tuple(events or ()), "context": context}
        if delimiter is not None:
            description["delimiter"] = delimiter.replace("\\t", "\t")  # as it is usually typed
        for key in ("action_columns", "columns", "context_columns"):
            description[key] = tuple(name.strip() for name in description[key].split(",") if name.strip())
        if config_file is None:
            custom = TabularConfig(**description)
        else:
            custom = read_toml(config_file, **{name: description[name] for name in given_options(ctx, description)})
    for name in CATALOG if dataset == _ALL else (dataset,):
        folder = Path("out", name) if out is None else out / name if dataset == _ALL else out
        config = PreprocessConfig(
            dataset=name,
            out=folder,
            overwrite=overwrite,
            raw_dir=raw_dir,
            split=split if eval_fraction is None else f"user:{eval_fraction}",
            allow_empty=allow_empty,
            seed=seed,
            filters=Filters(
                min_user_events=k_core,
                min_item_events=k_core,
                min_length=min_length,
                max_length=max_length,
                window=window,
                stride=stride,
            ),
            ids=ids,
            vocabulary=vocabulary,
            unknown=unknown,
            on_error=cast("OnError", on_error),
            requests=None if requests is None else RequestRule(seconds=requests, by_date=by_date),
            synthetic=SyntheticConfig(
                num_users=users, lengths=parse_distribution(lengths), items=Zipf(exponent=1.05, high=items)
            ),
            expand=expand,
            custom=custom,
        )
        with console.stages() as on_stage:
            manifest = preprocess(config, on_stage=on_stage, show_progress=console.shows_progress())
        time = manifest.options["time"]
        console.print_result(
            f"timestamps: {UNITS[time['unit']]}, first event {time['first']}, last event {time['last']}"
        )
        for split_name, info in manifest.splits.items():
            console.print_result(f"{folder}/{split_name}: {info.rows:,} rows, {info.interactions:,} interactions")
        for column, summary in manifest.ids.items():
            console.print_result(f"{column}: {_describe_ids(summary)}")
        for description, count in manifest.options["audit"].items():
            console.print_result(f"{description}: {count:,}")
        console.print_aligned(read_statistics(manifest).describe())
        console.print_result(f"next: evenrank inspect {shlex.quote(str(folder))}")


def _describe_ids(summary: "IdSummary") -> str:
    counted = "" if summary.distinct is None else f"{summary.distinct:,} distinct"
    found = ", ".join(filter(None, [counted, "" if summary.largest is None else f"largest {summary.largest:,}"]))
    if summary.rule == "dense":
        size = summary.versions[-1].size
        added = f", {summary.unknown_values:,} of them new" if len(summary.versions) > 1 else ""
        return f"dense ({found}{added}), numbered 1 to {size:,} by first appearance"
    if summary.rule == "keep":
        return f"kept ({found})"
    return f"{summary.rule} ({found}), {summary.collisions:,} values share their id with another"
