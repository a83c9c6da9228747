"""What the options of several commands share."""

from typing import TYPE_CHECKING

from evenrank.core.errors import ConfigError

if TYPE_CHECKING:
    from evenrank.dataloader.balance.model_cost import HSTUCost

# Our strategies, whose registry's package imports NumPy and Numba, which `--help` does not wait for.
STRATEGIES = ("identity", "karmarkar-karp", "lpt-swap", "min-move")


def hstu_cost(*, hidden: int, heads: int, layers: int) -> "HSTUCost":
    """Return the cost of an HSTU model whose heads are `hidden / heads` wide.

    Raises:
        ConfigError: `hidden` is not a multiple of `heads`.

    """
    from evenrank.dataloader.balance.model_cost import HSTUCost

    if heads < 1 or hidden % heads:
        raise ConfigError(f"--hidden must be a multiple of --heads, got {hidden} and {heads}; change one of them")
    return HSTUCost(hidden=hidden, heads=heads, head_dim=hidden // heads, layers=layers, interleave_actions=True)
