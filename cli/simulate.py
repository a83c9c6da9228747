"""`evenrank simulate`: show what balancing would gain on any number of ranks, without starting them."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenrank.cli import console
from evenrank.cli.options import STRATEGIES, Condition, check_conditions, file_option, make_cost
from evenrank.core.errors import ConfigError

if TYPE_CHECKING:
    from evenrank.cli.simulation import LengthSource

_MAX_SAMPLES = 1 << 26  # of a step, which are held in memory
_MAX_LENGTH = (1 << 31) - 1  # of a history
_TOLERANT_STRATEGIES = ("lpt-swap", "min-move")  # which stop at the tolerance
_CONDITIONS = (
    Condition(("hidden", "heads", "layers"), "the cost of an HSTU model", ("cost",), lambda v: v["cost"] is None),
    Condition(("split",), "datasets", ("source",), lambda v: not _is_distribution(v["source"])),
    Condition(
        ("tolerance",),
        f"--strategy {' and '.join(_TOLERANT_STRATEGIES)}",
        ("strategy",),
        lambda v: not set(_TOLERANT_STRATEGIES).isdisjoint(_parse_strategies(v["strategy"])),
    ),
)
_model_size = partial(typer.Option, min=1, max=1 << 20)

_EXPLANATION = """\
load      cost of the heaviest rank divided by the lower bound, mean over steps
speed-up  expected from the cost: heaviest loads before balancing / after
moved     share of tokens trained on another rank than the one that loaded them
MB/rank   sent by each rank in a step, at 16 bytes per event and 24 per sample
plan      median time to plan a step, on one thread of this machine
"""


def simulate_command(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="Folder written by `evenrank preprocess`, or a distribution of history lengths such as "
            "lognormal:mean=512,std=512 or zipf:exponent=1.2.",
            show_default=False,
        ),
    ],
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "8,64,1024,16384",
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.", min=1, max=1 << 20)] = 32,
    strategy: Annotated[
        str, typer.Option(help=f"Strategies, comma-separated: {', '.join(STRATEGIES)}.")
    ] = "karmarkar-karp,lpt-swap,min-move",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Relative tolerance above the lower bound at which balancing stops; the larger, the less min-move "
            "moves. Default: that of training, 0.001.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to draw for each row of the table.", min=1, max=1_000_000)] = 10,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    max_history_length: Annotated[
        int,
        typer.Option(
            help="Events per sample; longer histories are cut to their newest events.", min=1, max=_MAX_LENGTH
        ),
    ] = 4096,
    cost: Annotated[
        Path | None,
        file_option(
            help="File of a measured cost, written by MeasuredCost.save. Default: FLOPs of an HSTU model with the "
            "shape given by the next three options."
        ),
    ] = None,
    hidden: Annotated[int, _model_size(help="Width of the HSTU layers.")] = 1024,
    heads: Annotated[int, _model_size(help="Attention heads per layer, each hidden / heads wide.")] = 4,
    layers: Annotated[int, _model_size(help="Number of HSTU layers.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the drawn steps.", min=0)] = 0,
) -> None:
    """Show what balancing would gain on any number of ranks, without GPUs or processes.

    Draws steps from the history lengths of a dataset or from a distribution, and balances each with the planner that
    training uses. Examples:

    \b
        evenrank simulate out/ml-20m --ranks 8,64 --batch-size 32
        evenrank simulate lognormal:mean=512,std=512 --ranks 1024 --strategy min-move --tolerance 0.01
    """
    check_conditions(ctx, *_CONDITIONS)
    world_sizes = _parse_world_sizes(ranks)
    if max(world_sizes) * batch_size > _MAX_SAMPLES:
        raise ConfigError(
            f"{max(world_sizes):,} ranks with --batch-size {batch_size:,} are more than {_MAX_SAMPLES:,} samples per "
            "step; choose fewer"
        )
    strategies = _parse_strategies(strategy)

    from evenrank.cli.simulation import simulate
    from evenrank.dataloader.balance import BalanceConfig

    lengths = _open_source(source, split, max_history_length)
    model = make_cost(cost, hidden=hidden, heads=heads, layers=layers)
    chosen: dict[str, Any] = {} if tolerance is None else {"tolerance": tolerance}
    headers = ("ranks", "strategy", "load\nbefore", "load\nafter", "worst\nafter", "expected\nspeed-up", "moved")
    table = console.new_table(*headers, "MB/\nrank", "plan\n(ms)", left=["strategy"], narrow=True)
    with console.steps("planning", len(world_sizes) * len(strategies) * steps) as on_step:
        for world_size, name in product(world_sizes, strategies):
            balance = BalanceConfig(cost=model, strategy=name, **chosen)
            summary = simulate(
                lengths, balance, world_size, batch_size=batch_size, steps=steps, seed=seed, on_step=on_step
            )
            table.add_row(
                f"{world_size:,}",
                name,
                f"{summary.ratio_before:.3f}",
                f"{summary.ratio_after:.4f}",
                f"{summary.worst_after:.4f}",
                f"{summary.speedup:.2f}x",
                f"{summary.moved_tokens:.1%}",
                f"{summary.moved_bytes / world_size / 1e6:.3f}",
                f"{summary.plan_seconds * 1e3:#.3g}",
            )
    console.print_result(table)
    console.print_result(_EXPLANATION)
    if repeated := [f"{world_size:,}" for world_size in world_sizes if lengths.repeats_rows(world_size * batch_size)]:
        console.print_result(
            f"With {', '.join(repeated)} ranks a step has more samples than the dataset has rows, so rows were drawn "
            "with replacement."
        )


def _parse_world_sizes(text: str) -> list[int]:
    try:
        world_sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--ranks must be comma-separated integers such as 8,64, got {text!r}") from error
    if min(world_sizes) < 1:
        raise ConfigError(f"--ranks must be at least 1, got {min(world_sizes)}")
    return world_sizes


def _parse_strategies(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in STRATEGIES]:
        raise ConfigError(f"unknown strategy {unknown[0]!r}; known: {', '.join(STRATEGIES)}")
    return names


def _is_distribution(text: str) -> bool:
    from evenrank.datasets.distributions import DISTRIBUTIONS

    return text.partition(":")[0] in DISTRIBUTIONS and not Path(text).exists()


def _open_source(text: str, split: str, max_history_length: int) -> "LengthSource":
    from evenrank.cli.simulation import LengthSource
    from evenrank.datasets.distributions import DISTRIBUTIONS, parse_distribution
    from evenrank.datasets.store import open_store

    if _is_distribution(text):
        return LengthSource(distribution=parse_distribution(text), max_length=max_history_length)
    if not Path(text).is_dir():
        raise ConfigError(
            f"{text!r} is neither a folder nor a distribution; pass a folder written by `evenrank preprocess`, or one "
            f"of {', '.join(DISTRIBUTIONS)}"
        )
    with console.stages() as on_stage:
        on_stage(f"opening {split}")
        lengths = open_store(Path(text), split).lengths
    if len(lengths) == 0:
        raise ConfigError(f"the split {split!r} of {text} has no rows; choose another with --split")
    return LengthSource(lengths=lengths, max_length=max_history_length)
