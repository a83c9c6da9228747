"""`evenrank which`: show which samples a rank trained in a step, such as one whose loss was NaN."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from evenrank.cli import console
from evenrank.cli.options import (
    MAX_LENGTH,
    MAX_PER_RANK,
    MODEL_SHAPE,
    STRATEGIES,
    TOLERANT_STRATEGIES,
    Condition,
    CostFile,
    Heads,
    Hidden,
    Layers,
    check_conditions,
    check_step_size,
    make_cost,
)
from evenrank.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

    from evenrank.dataloader import Loader, SequenceBatch
    from evenrank.dataloader.balance.no_exchange import LocalPlan
    from evenrank.dataloader.config import Order

# Of the loader, which tells a job which rows are left out.
_HIDDEN = "evenrank"

_CONDITIONS = (
    MODEL_SHAPE,
    Condition(
        options=("seed",),
        apply_to="--order shuffle",
        holds=lambda values: values["order"] == "shuffle",
        decided_by=("order",),
    ),
    Condition(
        options=("tolerance",),
        apply_to=f"--strategy {' and '.join(TOLERANT_STRATEGIES)}",
        holds=lambda values: values["strategy"] in TOLERANT_STRATEGIES,
        decided_by=("strategy",),
    ),
    Condition(
        options=("window",),
        apply_to="jobs that balance",
        holds=lambda values: values["strategy"] != "none",
        decided_by=("strategy",),
    ),
)


def which_command(
    ctx: typer.Context,
    path: Annotated[
        Path, typer.Argument(help="Folder written by `evenrank preprocess`.", metavar="PATH", show_default=False)
    ],
    step: Annotated[
        int,
        typer.Option(help="Step, counted from 0 as batch.step is: from where its iteration began.", show_default=False),
    ],
    rank: Annotated[int, typer.Option(help="Data-parallel rank.", min=0, show_default=False)],
    world_size: Annotated[int, typer.Option(help="Number of data-parallel ranks.", min=1, show_default=False)],
    batch_size: Annotated[
        int, typer.Option(help="Samples per rank and step.", min=1, max=MAX_PER_RANK, show_default=False)
    ],
    epoch: Annotated[int, typer.Option(help="Epoch, from 0.", min=0, max=(1 << 31) - 1)] = 0,
    position: Annotated[
        int,
        typer.Option(
            help="Position in the epoch at which the iteration began: for a job that resumed, the one in its state. If "
            "that state tells of a window, use Loader.pick with the state instead."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the loader.")] = 0,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    max_history_length: Annotated[
        int,
        typer.Option(
            help="Events of a history; longer histories are cut to their newest events.", min=0, max=MAX_LENGTH
        ),
    ] = 512,
    max_num_candidates: Annotated[
        int, typer.Option(help="How many of each user's last events are candidates.", min=0, max=MAX_LENGTH)
    ] = 0,
    order: Annotated[str, typer.Option(help="Order of the samples: shuffle, rows or time.")] = "shuffle",
    drop_last: Annotated[bool, typer.Option("--drop-last", help="The job leaves out an incomplete last step.")] = False,
    strategy: Annotated[
        str,
        typer.Option(
            help=f"How steps are balanced: one of {', '.join(STRATEGIES)}. none is what a loader without balancing "
            "yields."
        ),
    ] = "none",
    tolerance: Annotated[
        float, typer.Option(help="Relative tolerance above the lower bound at which balancing stops.")
    ] = 0.001,
    window: Annotated[
        int,
        typer.Option(
            help="Steps whose samples may change steps: the window of BalanceConfig. Needs --strategy.", min=1
        ),
    ] = 1,
    cost: CostFile = None,
    hidden: Hidden = 1024,
    heads: Heads = 4,
    layers: Layers = 8,
) -> None:
    """Show which samples a rank trained in a step, for example to find the one that made a loss NaN.

    Pass the settings of the job. The batch is that of a loader with `balance`, or of a Balancer over a loader, with the
    same settings; `Loader.pick` does the same for settings that have no option here, and for jobs that resumed within
    a window. Examples:

    \b
        evenrank which out/ml-20m --step 17 --rank 3 --world-size 8 --batch-size 32
        evenrank which out/ml-20m --step 17 --rank 3 --world-size 8 --batch-size 32 --strategy lpt-swap --cost cost.json
    """
    check_conditions(ctx, *_CONDITIONS)
    if rank >= world_size:
        raise ConfigError(f"--rank must be below --world-size {world_size}, got {rank}; ranks are numbered from 0")
    check_step_size(world_size, batch_size)
    with console.stages() as on_stage, console.without_warnings(_HIDDEN):
        on_stage("importing torch")
        from evenrank.dataloader import LoaderConfig, build_loader
        from evenrank.dataloader.balance import BalanceConfig
        from evenrank.dataloader.balance.cost import TokenCost
        from evenrank.datasets.schema import USER_ID
        from evenrank.datasets.store import open_store

        model = make_cost(cost, hidden=hidden, heads=heads, layers=layers)
        config = LoaderConfig(
            batch_size=batch_size,
            split=split,
            max_history_length=max_history_length,
            max_num_candidates=max_num_candidates,
            user_id=isinstance(model, TokenCost) and USER_ID in model.contextual,
            order=cast("Order", order),
            seed=seed,
            drop_last=drop_last,
        )
        balance = BalanceConfig(cost=model, strategy=strategy, tolerance=tolerance, window=window)
        on_stage(f"opening {split}")
        store = open_store(path, split)
        loader = build_loader(path, config, rank=rank, world_size=world_size, balance=balance)
        _check_position(loader, position, f"{path}/{split}")
        on_stage(f"planning step {step}")
        pick = loader.pick(step, epoch=epoch, start=position)
        batch = loader.collate(pick.sample_ids)
    assert pick.plan is not None  # because the loader balances
    console.print_result(f"{path}/{split}: epoch {epoch}, step {step}, rank {rank} of {world_size}\n")
    console.print_result(_samples_table(batch, store.rows[USER_ID][pick.sample_ids], pick.plan))
    console.print_result(_describe_loads(pick.plan, rank))


def _check_position(loader: "Loader[SequenceBatch]", position: int, name: str) -> None:
    """Raise an error if the loader of the split of this name has no samples, or too few for this position."""
    if not loader.num_samples:
        reasons = [f"{len(rows):,} rows have {reason}" for reason, rows in loader.left_out.items() if len(rows)]
        raise DataError(
            f"{name} has no samples, because {', '.join(reasons) or 'it has no rows'}; change --split or "
            "--max-num-candidates"
        )
    if not 0 <= position <= loader.num_samples:
        raise ConfigError(
            f"--position must be between 0 and {loader.num_samples:,}, the samples of an epoch, got {position:,}; pass "
            "the position in the state that the job resumed from"
        )


def _samples_table(batch: "SequenceBatch", user_ids: "NDArray[np.int64]", plan: "LocalPlan") -> "Table":
    """Return a table with one line per sample of a batch without padding.

    Args:
        batch: the samples.
        user_ids: [n], of each sample.
        plan: of the step.

    """
    from evenrank.datasets.schema import ITEM_ID

    columns = (
        batch.sample_ids.numpy(),
        user_ids,
        batch.features[ITEM_ID].lengths().numpy() - batch.num_candidates.numpy(),
        batch.num_candidates.numpy(),
        plan.tokens,
        plan.costs,
    )
    table = console.new_table("place", "row", "user", "history", "candidates", "tokens", "cost", left=[], narrow=True)
    for place, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        row, user, *lengths, cost = values
        # Ids have no separators, so that they can be searched for.
        table.add_row(str(place), str(row), str(user), *(f"{length:,}" for length in lengths), _short(cost))
    return table


def _describe_loads(plan: "LocalPlan", rank: int) -> str:
    metrics = plan.metrics
    assert metrics is not None  # because Loader.pick measures
    heaviest = int(metrics.after.argmax())
    return (
        f"rank {rank}: {len(plan.indices):,} samples, {int(plan.tokens.sum()):,} tokens, load "
        f"{_short(int(metrics.after[rank]))}\n"
        f"all ranks: {metrics.samples:,} samples, {metrics.tokens:,} tokens\n"
        f"heaviest load: {_short(int(metrics.after[heaviest]))} (rank {heaviest}), lower bound "
        f"{_short(metrics.lower_bound)}"
    )


def _short(cost: int) -> str:
    """Return 999999 as 999,999 and 1234567 as 1.235e+06, so that tables stay narrow."""
    return f"{cost:,}" if cost < 1_000_000 else f"{cost:.3e}"
