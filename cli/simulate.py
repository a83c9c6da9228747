"""`evenrank simulate`: show what balancing would gain on any number of ranks, without starting them."""

import dataclasses
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenrank.cli import console, options, settings_options
from evenrank.core.errors import ConfigError
from evenrank.core.rules import AppliesTo, Bounds, Needs, NonNegative, Option, Parsed, Where
from evenrank.core.settings import Settings
from evenrank.datasets.schema import MAX_HISTORY_LENGTH

if TYPE_CHECKING:
    from evenrank.cli.reports.gains import Gain
    from evenrank.cli.reports.simulation import Draws
    from evenrank.dataloader.balance import BalanceConfig

_MAX_SAMPLES = 1 << 26  # of a window, which are held in memory
_TOLERANT_STRATEGIES = ("lpt-swap", "min-move")  # which stop at the tolerance
_MAX_INTERPRETED = 1 << 14  # samples of all rows, which plain Python balances in 1 s; compiling takes longer
_IDLE = 0.01  # share of idle time from which on the table is followed by what would help
_Milliseconds = Annotated[float, Bounds(at_least=0), Option("MILLISECONDS")]


def _needs_fixed_time(cost: str) -> bool:
    return cost in options.costs_by_name() or (":" in cost and not cost.startswith("padded:"))


def _parse_world_sizes(text: str) -> list[int]:
    try:
        world_sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--ranks must be comma-separated integers such as 8,64, got {text!r}") from error
    if min(world_sizes) < 1:
        raise ConfigError(f"--ranks must be at least 1, got {min(world_sizes)}")
    return world_sizes


def _parse_strategies(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in options.STRATEGIES]:
        raise ConfigError(f"unknown strategy {unknown[0]!r}; known: {', '.join(options.STRATEGIES)}")
    return names


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Settings):
    """What is simulated."""

    source: Annotated[str, Option("SOURCE", is_argument=True)]
    """Lengths of histories: a folder written by `evenrank preprocess`, a .npy or .parquet file with one column of
    lengths, the .jsonl log of a run, or a distribution such as lognormal:mean=512,std=512 or zipf:exponent=1.2."""
    ranks: Annotated[str, Parsed(_parse_world_sizes), Option("COUNT,...", panel="Steps")] = ",".join(
        map(str, options.RANKS)
    )
    """Numbers of ranks, comma-separated."""
    samples: options.StepOptions = field(default_factory=options.StepOptions)
    steps: Annotated[int, Bounds(at_least=1, at_most=1_000_000), Option("COUNT")] = options.MIN_STEPS
    """Steps to draw for each row of the table."""
    seed: Annotated[NonNegative, Option("NUMBER")] = 0
    """Seed of the drawn steps."""
    strategy: Annotated[
        str,
        Parsed(_parse_strategies),
        Option("NAME,...", panel="Balancing", completions=lambda: options.STRATEGIES),
    ] = ",".join(options.STRATEGIES)
    """Strategies, comma-separated: none, karmarkar-karp, lpt-swap, min-move."""
    tolerance: Annotated[
        float | None,
        Bounds(at_least=0, below=1),
        Option("FRACTION"),
        AppliesTo(
            strategy=Where(
                " or ".join(_TOLERANT_STRATEGIES), lambda text: not {*_TOLERANT_STRATEGIES}.isdisjoint(text.split(","))
            )
        ),
    ] = None
    """Relative tolerance above the lower bound at which balancing stops; the larger, the less min-move moves. None:
    that of training, 0.001."""
    window: Annotated[int, Bounds(at_least=1, at_most=1000), Option("STEPS")] = 1
    """Steps whose samples may change steps, as in BalanceConfig."""
    model: options.CostOptions = field(default_factory=options.CostOptions)
    step_ms: Annotated[_Milliseconds | None, Needs("fixed_ms")] = None
    """Time of a step without balancing, of which `fixed_ms` is a part."""
    fixed_ms: Annotated[_Milliseconds | None, Needs("step_ms")] = None
    """Time of a step that balancing cannot change: all-reduce, optimizer, embeddings. The table is then of the whole
    step; with a measured cost, it always is."""


@dataclass(kw_only=True)
class _Command:
    """What options apply to that a record shares with other commands, or that depend on the source."""

    split: Annotated[str, AppliesTo(source=Where("datasets", options.is_dataset))] = "train"
    max_history_length: Annotated[
        int, AppliesTo(source=Where("lengths of histories", lambda source: not source.endswith(".jsonl")))
    ] = MAX_HISTORY_LENGTH
    fixed_ms: Annotated[float | None, AppliesTo(cost=Where("without a fixed time of its own", _needs_fixed_time))] = (
        None
    )


OPTIONS = settings_options.options_of(SimulateOptions, _Command)


@settings_options.command_of(OPTIONS)
def simulate_command(ctx: typer.Context, as_json: options.Json = False) -> None:
    """Show what balancing would gain on any number of ranks, without GPUs or processes.

    Draws steps from lengths of histories, and balances each with the planner that training uses. That is compiled
    once per machine, which few ranks and steps, as in the last example, do without. Examples:

    \b
        evenrank simulate out/ml-20m --ranks 8,64 --batch-size 32
        evenrank simulate out/ml-20m --cost padded --window 8
        evenrank simulate out/balance.jsonl --cost out/cost.json
        evenrank simulate lognormal:mean=512 --strategy min-move --tolerance 0.01
        evenrank simulate zipf:exponent=1.2 --ranks 8 --steps 10
    """
    chosen = settings_options.chosen(SimulateOptions, ctx, OPTIONS)
    source, window, step_ms, fixed_ms = chosen.source, chosen.window, chosen.step_ms, chosen.fixed_ms
    batch_size = chosen.samples.batch_size
    world_sizes, strategies = _parse_world_sizes(chosen.ranks), _parse_strategies(chosen.strategy)
    if max(world_sizes) * batch_size * window > _MAX_SAMPLES:
        raise ConfigError(
            f"{max(world_sizes):,} ranks with --batch-size {batch_size:,} and --window {window} are more than "
            f"{_MAX_SAMPLES:,} samples; choose fewer"
        )
    if step_ms is not None and fixed_ms is not None and fixed_ms >= step_ms:
        raise ConfigError(f"--fixed-ms {fixed_ms:g} is a part of --step-ms {step_ms:g}, so it must be less")
    steps = -(-chosen.steps // window) * window  # whole windows: of part of one, other samples come before than after
    is_small = sum(world_sizes) * len(strategies) * batch_size * steps <= _MAX_INTERPRETED

    from evenrank.core.compiled import interpreted

    if is_small:  # and before what is left plain Python is imported
        ctx.with_resource(interpreted())

    from evenrank.cli.reports.gains import describe_settings, print_gains
    from evenrank.cli.reports.simulation import Draws, open_source
    from evenrank.dataloader.balance import BalanceConfig

    model = options.make_cost(chosen.model)
    with console.stages() as on_stage:
        on_stage(f"opening {source}")
        lengths = open_source(source, chosen.samples.split, chosen.samples.max_history_length)
    tolerance: dict[str, Any] = {} if chosen.tolerance is None else {"tolerance": chosen.tolerance}
    fixed_share = 0.0 if step_ms is None or fixed_ms is None else fixed_ms / step_ms
    drawn = Draws(
        source=lengths,
        batch_size=batch_size,
        steps=steps,
        seed=chosen.seed,
        fixed_share=fixed_share,
        is_timed=not is_small,
    )
    balances = [  # where every sample stays, it also stays in its step
        BalanceConfig(cost=model, strategy=name, window=1 if name == "none" else window, **tolerance)
        for name in strategies
    ]
    for balance in balances:
        balance.check(exchanges=False)
    with console.steps("planning", len(world_sizes) * len(balances) * steps) as on_step:
        gains = [drawn.gain(*pair, on_step=on_step) for pair in product(world_sizes, balances)]
    cut = None if lengths.of_tokens else chosen.samples.max_history_length
    settings = describe_settings(chosen.samples, chosen.model, is_cut=cut is not None)
    repeated = [world_size for world_size in world_sizes if lengths.repeats_rows(world_size * batch_size)]
    console.print_result(
        f"{source}: {steps} steps of {settings}" + f"; windows of {window} steps" * (window > 1),
        options={**ctx.params, "steps": steps, "max_history_length": cut},
        drawn_with_replacement=repeated,
        remedies=[],
    )
    print_gains(gains)
    if repeated:
        console.print_result(
            f"With {', '.join(f'{world_size:,}' for world_size in repeated)} ranks a step has more samples than there "
            "are lengths, so they were drawn with replacement."
        )
    of_most_ranks = zip(gains[-len(balances) :], balances, strict=True)
    balanced = [(gain, balance) for gain, balance in of_most_ranks if balance.strategy != "none"]
    for gain, balance in sorted(balanced, key=lambda pair: pair[0].summary.idle_after)[:1]:
        if gain.summary.idle_after > _IDLE and gain.summary.one_sample > _IDLE:
            _print_remedies(gain, drawn, balance)


def _print_remedies(gain: "Gain", drawn: "Draws", balance: "BalanceConfig") -> None:
    """Show how much ranks would be idle with other settings, each simulated alike."""
    source, cut = drawn.source, max(drawn.source.max_length // 2, 1)
    shorter = f"samples of at most {cut} tokens" if source.of_tokens else f"--max-history-length {cut}"
    window, batch_size = 8 * balance.window, 2 * drawn.batch_size
    drawn = dataclasses.replace(drawn, steps=-(-drawn.steps // window) * window)
    others = {
        f"--window {window}": (drawn, dataclasses.replace(balance, window=window)),
        f"--batch-size {batch_size}": (dataclasses.replace(drawn, batch_size=batch_size), balance),
        shorter: (dataclasses.replace(drawn, source=dataclasses.replace(source, max_length=cut)), balance),
    }
    summary = gain.summary
    console.print_result(
        f"With {gain.ranks:,} ranks, {summary.one_sample:.0%} of the steps last as long as their longest sample, which "
        f"has {summary.longest:,.0f} tokens on average. Settings that would help ({gain.label}):"
    )
    changed = {"as above": gain}
    with console.steps("comparing", len(others) * drawn.steps) as on_step:
        for text, (other, config) in others.items():
            if gain.ranks * other.batch_size * config.window <= _MAX_SAMPLES:
                changed[text] = other.gain(gain.ranks, config, fixed=gain.fixed, on_step=on_step)
    table = console.new_table("instead", "idle after", "time per sample", left=["instead"], narrow=True)
    remedies = []
    for text, one in changed.items():
        relative, idle = _time_per_sample(one) / _time_per_sample(gain), one.summary.idle_after
        table.add_row(text, f"{idle:.1%}", f"{relative:.2f}x")
        remedies.append({"instead": text, "idle_after": idle, "time_per_sample": relative})
    console.print_result(table, remedies=remedies)


def _time_per_sample(gain: "Gain") -> float:
    return gain.unit * gain.summary.heaviest_after / gain.summary.samples
