"""What the options of several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenrank.core.errors import ConfigError

if TYPE_CHECKING:
    from evenrank.dataloader.balance.cost import Cost
    from evenrank.dataloader.balance.model_cost import HSTUCost

# Our strategies, whose registry's package imports NumPy and Numba, which `--help` does not wait for.
STRATEGIES = ("identity", "karmarkar-karp", "lpt-swap", "min-move")

MAX_LENGTH = (1 << 31) - 1  # of a history
MAX_PER_RANK = 1 << 20  # samples
_MAX_SAMPLES = 1 << 26  # of a step, which are held in memory

CostFile = Annotated[
    Path | None,
    typer.Option(
        help="File of a measured cost, written by MeasuredCost.save. Default: FLOPs of an HSTU model with the shape "
        "given by the next three options.",
        metavar="FILE",
        show_default=False,
    ),
]
Hidden = Annotated[int, typer.Option(help="Width of the HSTU layers.", min=1, max=1 << 20)]
Heads = Annotated[int, typer.Option(help="Attention heads per layer, each hidden / heads wide.", min=1, max=1 << 20)]
Layers = Annotated[int, typer.Option(help="Number of HSTU layers.", min=1, max=1 << 20)]


def check_step_size(world_size: int, batch_size: int) -> None:
    """Raise a ConfigError if a step has too many samples to hold them in memory."""
    if world_size * batch_size > _MAX_SAMPLES:
        raise ConfigError(
            f"{world_size:,} ranks with --batch-size {batch_size:,} are more than {_MAX_SAMPLES:,} samples per step; "
            "choose fewer"
        )


def make_cost(path: Path | None, *, hidden: int, heads: int, layers: int) -> "Cost":
    """Return the cost in a file or, without one, that of an HSTU model.

    Raises:
        ConfigError: the path is no regular file, or `hidden` is not a multiple of `heads`.
        DataError: the file is missing or malformed.

    """
    from evenrank.dataloader.balance.measured_cost import MeasuredCost

    if path is None:
        return hstu_cost(hidden=hidden, heads=heads, layers=layers)
    if path.exists() and not path.is_file():  # a pipe would never end
        raise ConfigError(f"--cost {path} is not a regular file; give one that MeasuredCost.save wrote")
    return MeasuredCost.load(path)


def hstu_cost(*, hidden: int, heads: int, layers: int) -> "HSTUCost":
    """Return the cost of an HSTU model whose heads are `hidden / heads` wide.

    Raises:
        ConfigError: `hidden` is not a multiple of `heads`.

    """
    from evenrank.dataloader.balance.model_cost import HSTUCost

    if heads < 1 or hidden % heads:
        raise ConfigError(f"--hidden must be a multiple of --heads, got {hidden} and {heads}; change one of them")
    return HSTUCost(hidden=hidden, heads=heads, head_dim=hidden // heads, layers=layers, interleave_actions=True)
