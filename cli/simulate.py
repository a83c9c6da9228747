"""`evenrank simulate`: what balancing would win on any number of ranks, without them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from evenrank.cli import console
from evenrank.core.errors import ConfigError
from evenrank.datasets.distributions import DISTRIBUTIONS, parse_distribution

if TYPE_CHECKING:  # torch takes seconds to import, which the other commands need not wait for
    from evenrank.cli.simulation import Source
    from evenrank.dataloader.balance import Cost, MetricsSummary

_EXPLANATION = """\
load      the heaviest rank's cost over the lower bound, mean over steps
speed-up  expected by the cost: heaviest loads before to heaviest loads after
moved     tokens that are trained on another rank than the one that loaded them
MB        sent by a rank in a step, at 16 bytes an event and 24 a sample
plan      median time to plan a step, on one thread of this machine
"""


def simulate_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="Folder that `evenrank preprocess` wrote, or a distribution of lengths such as "
            "lognormal:mean=512,std=512 or zipf:exponent=1.2.",
            show_default=False,
        ),
    ],
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas between.")] = "8,64,1024,16384",
    batch_size: Annotated[int, typer.Option(help="Samples of a rank in a step.", min=1)] = 32,
    strategy: Annotated[
        str, typer.Option(help="Strategies, with commas between: karmarkar-karp, lpt-swap, min-move, identity.")
    ] = "karmarkar-karp,lpt-swap,min-move",
    tolerance: Annotated[
        float, typer.Option(help="How far above the lower bound is good enough; min-move moves less with more.")
    ] = 0.01,
    steps: Annotated[int, typer.Option(help="Steps to draw for each row of the table.", min=1)] = 10,
    split: Annotated[str, typer.Option(help="Which split of the dataset.")] = "train",
    max_history_length: Annotated[int, typer.Option(help="Events; longer histories keep their newest.", min=1)] = 4096,
    cost: Annotated[
        Path | None,
        typer.Option(
            help="A measured cost, written by MeasuredCost.save. Default: FLOPs of an HSTU model of the next options.",
            show_default=False,
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Its width.", min=1)] = 1024,
    heads: Annotated[int, typer.Option(help="Its heads, of width hidden / heads each.", min=1)] = 4,
    layers: Annotated[int, typer.Option(help="Its layers.", min=1)] = 8,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Show what balancing would win on so many ranks: no GPUs, no processes.

    Draws steps from a dataset's real history lengths, or from a distribution, deals them to ranks, and plans each:

    \b
        evenrank simulate out/ml-20m --ranks 8,64 --batch-size 32
        evenrank simulate lognormal:mean=512,std=512 --ranks 1024 --strategy min-move --tolerance 0.01
    """
    world_sizes = _world_sizes(ranks)
    strategies = [name for name in strategy.split(",") if name]
    # Not above: they import torch, which takes seconds, and which the other commands need not wait for.
    from evenrank.cli.simulation import simulate
    from evenrank.dataloader.balance import STRATEGIES

    for name in strategies:
        if name not in STRATEGIES:
            raise ConfigError(f"no strategy is called {name!r}; there are {', '.join(STRATEGIES)}")
    lengths = _open_source(source, split, max_history_length)
    model = _make_cost(cost, hidden, heads, layers)
    table = _table()
    rows = [(world_size, name) for world_size in world_sizes for name in strategies]
    with console.steps("planning", len(rows) * steps, shown=True) as on_step:
        for world_size, name in rows:
            summary = simulate(
                lengths,
                model,
                world_size,
                batch_size=batch_size,
                strategy=name,
                steps=steps,
                tolerance=tolerance,
                seed=seed,
                on_step=on_step,
            )
            _add_row(table, world_size, name, summary)
    console.stdout.print(table)
    console.stdout.print(_EXPLANATION)
    if repeated := [size for size in world_sizes if lengths.is_repeated(size * batch_size)]:
        console.stdout.print(
            f"With {', '.join(f'{size:,}' for size in repeated)} ranks a step has more samples than the dataset has "
            "rows; rows were drawn more than once."
        )


def _world_sizes(text: str) -> list[int]:
    try:
        world_sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--ranks takes whole numbers with commas between, got {text!r}") from error
    if min(world_sizes) < 1:
        raise ConfigError(f"--ranks must be at least 1, got {min(world_sizes)}")
    return world_sizes


def _open_source(text: str, split: str, max_history_length: int) -> "Source":
    from evenrank.cli.simulation import Source
    from evenrank.datasets.store import open_store

    if text.partition(":")[0] in DISTRIBUTIONS and not Path(text).exists():
        return Source(distribution=parse_distribution(text), most_events=max_history_length)
    if not Path(text).is_dir():
        raise ConfigError(
            f"{text!r} is neither a folder nor a distribution; write a dataset with `evenrank preprocess`, or name one "
            f"of {', '.join(DISTRIBUTIONS)}"
        )
    with console.stages() as on_stage:
        on_stage(f"opening {split}")
        lengths = open_store(Path(text), split).lengths
    if len(lengths) == 0:
        raise ConfigError(f"the split {split!r} of {text} has no rows; choose another with --split")
    return Source(lengths=lengths, most_events=max_history_length)


def _make_cost(path: Path | None, hidden: int, heads: int, layers: int) -> "Cost":
    from evenrank.dataloader.balance import HSTUCost, MeasuredCost

    if path is not None:
        return MeasuredCost.load(path)
    if hidden % heads:
        raise ConfigError(f"hidden must be a multiple of heads, got {hidden} and {heads}")
    return HSTUCost(hidden=hidden, heads=heads, head_dim=hidden // heads, layers=layers)


def _table() -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # fits into 80 columns
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    for name in (
        "load\nbefore",
        "load\nafter",
        "worst\nafter",
        "expected\nspeed-up",
        "moved",
        "MB a\nrank",
        "plan\n(ms)",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add_row(table: Table, world_size: int, strategy: str, summary: "MetricsSummary") -> None:
    table.add_row(
        f"{world_size:,}",
        strategy,
        f"{summary.ratio_before:.3f}",
        f"{summary.ratio_after:.4f}",
        f"{summary.worst_after:.4f}",
        f"{summary.speedup:.2f}x",
        f"{summary.moved_tokens:.1%}",
        f"{summary.moved_bytes / world_size / 1e6:.3f}",
        f"{summary.plan_seconds * 1e3:#.3g}",
    )
