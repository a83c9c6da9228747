"""`evenrank preprocess`: raw logs -> sequence Parquet."""

from pathlib import Path
from typing import Annotated, cast

import typer

from evenrank.cli import console
from evenrank.core.errors import ConfigError
from evenrank.datasets.distributions import Zipf, parse_distribution
from evenrank.preprocess import DATASETS, Filters, PreprocessConfig, RequestRule, SyntheticConfig, preprocess
from evenrank.preprocess.sources.catalog import CATALOG
from evenrank.preprocess.sources.registry import CUSTOM
from evenrank.preprocess.sources.tabular_config import TabularConfig, TimestampUnit, read_toml

_ALL = "all"


def preprocess_command(
    dataset: Annotated[
        str,
        typer.Option(help=f"Which dataset: {', '.join((*DATASETS, _ALL))} (every public one).", show_default=False),
    ],
    raw_dir: Annotated[
        Path,
        typer.Option(
            help="Folder of the raw files, as their archives unpack (DIR/ml-20m/ratings.csv), or of the official "
            "archives. What is missing is downloaded into it.",
            metavar="DIR",
        ),
    ] = Path("raw"),
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write; a dataset that is there is replaced once the new one is complete. "
            "Default: out/DATASET.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        str,
        typer.Option(
            help="user:FRACTION of the users to eval; leave-last:N events of each user; time:TIMESTAMP (milliseconds "
            "or ISO 8601), events from then on; none."
        ),
    ] = "user:0.3",
    eval_fraction: Annotated[
        float | None, typer.Option(help="The same as --split user:FRACTION.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split by user, and of synthetic data.")] = 0,
    k_core: Annotated[int, typer.Option(help="Leave out users and items with fewer events, until none has.")] = 1,
    min_length: Annotated[int, typer.Option(help="Leave out users with fewer events.")] = 1,
    max_length: Annotated[
        int | None, typer.Option(help="Leave out users with more events.", show_default=False)
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Cut users with more events into rows of so many.", show_default=False)
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Events from one window to the next. Default: as many as a window has.", show_default=False),
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="What to do about rows that cannot be read: fail, or skip and count them.")
    ] = "fail",
    requests: Annotated[
        float | None,
        typer.Option(
            help="Also write requests.parquet, for replaying inference traffic: a user asks at the first event, and "
            "at each event so many seconds after the last request.",
            metavar="SECONDS",
            show_default=False,
        ),
    ] = None,
    by_date: Annotated[
        bool, typer.Option("--by-date", help="Requests and their histories begin anew each day.")
    ] = False,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Custom data: a TOML file with events (one file or several), user_column, item_column, "
            "timestamp_column, and, if need be, timestamp_unit, action_columns, context, context_columns.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    events: Annotated[
        list[Path] | None,
        typer.Option(help="Custom data: a CSV, TSV or Parquet file; give it again for more.", show_default=False),
    ] = None,
    user_column: Annotated[str, typer.Option(help="Custom data: the column of users.")] = "user_id",
    item_column: Annotated[str, typer.Option(help="Custom data: the column of items.")] = "item_id",
    timestamp_column: Annotated[str, typer.Option(help="Custom data: the column of times.")] = "timestamp",
    timestamp_unit: Annotated[str, typer.Option(help="Custom data: s, ms, us or iso.")] = "s",
    action_columns: Annotated[
        str,
        typer.Option(help="Custom data: one column of whole numbers, or several of 0 and 1, with commas between."),
    ] = "",
    context: Annotated[
        Path | None,
        typer.Option(help="Custom data: a CSV, TSV or Parquet file of users' features.", show_default=False),
    ] = None,
    context_columns: Annotated[str, typer.Option(help="Custom data: its columns, with commas between.")] = "",
    users: Annotated[int, typer.Option(help="Synthetic data: how many users.")] = 20_000,
    items: Annotated[int, typer.Option(help="Synthetic data: how many items, of Zipf popularity.")] = 50_000,
    lengths: Annotated[
        str,
        typer.Option(help="Synthetic data: events of a user, as uniform, normal, zipf or lognormal with parameters."),
    ] = "lognormal:mean=128,std=256,high=4096",
) -> None:
    """Turn raw interaction logs into sequence Parquet: one row per user, events in time order.

    Writes OUT/train/*.parquet, OUT/eval/*.parquet and OUT/manifest.json. For example:

    \b
        evenrank preprocess --dataset ml-20m --raw-dir raw --out out/ml-20m
        evenrank preprocess --dataset ml-20m --split leave-last:1 --k-core 5
        evenrank preprocess --dataset custom --events log.csv --user-column uid --action-columns click,buy
        evenrank preprocess --dataset synthetic --users 1000000 --lengths zipf:exponent=1.2,high=4096
    """
    if eval_fraction is not None and split != "user:0.3":
        raise ConfigError("--eval-fraction and --split say the same; give one of them")
    custom = None
    if dataset == CUSTOM and config_file is not None:
        custom = read_toml(config_file)
    elif dataset == CUSTOM:
        custom = TabularConfig(
            events=tuple(events or ()),
            user_column=user_column,
            item_column=item_column,
            timestamp_column=timestamp_column,
            timestamp_unit=cast(TimestampUnit, timestamp_unit),
            action_columns=_names(action_columns),
            context=context,
            context_columns=_names(context_columns),
        )
    elif config_file is not None or events or context is not None:
        raise ConfigError("--config, --events and --context describe custom data; give --dataset custom with them")
    if by_date and requests is None:
        raise ConfigError("--by-date goes with --requests SECONDS")
    for name in CATALOG if dataset == _ALL else (dataset,):
        folder = Path("out", name) if out is None else out / name if dataset == _ALL else out
        config = PreprocessConfig(
            dataset=name,
            out=folder,
            raw_dir=raw_dir,
            split=split if eval_fraction is None else f"user:{eval_fraction}",
            seed=seed,
            filters=Filters(
                min_user_events=k_core,
                min_item_events=k_core,
                min_length=min_length,
                max_length=max_length,
                window=window,
                stride=stride,
            ),
            on_error=on_error,
            requests=None if requests is None else RequestRule(seconds=requests, by_date=by_date),
            synthetic=SyntheticConfig(
                num_users=users, lengths=parse_distribution(lengths), items=Zipf(exponent=1.05, high=items)
            ),
            custom=custom,
        )
        _run(config)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _run(config: PreprocessConfig) -> None:
    with console.stages() as on_stage:
        manifest = preprocess(config, on_stage=on_stage, show_progress=console.stderr.is_terminal)
    for name, info in manifest.splits.items():
        console.stdout.print(f"{config.out}/{name}: {info.rows:,} rows, {info.interactions:,} interactions")
    for words, count in manifest.options["audit"].items():
        console.stdout.print(f"{words}: {count:,}")
