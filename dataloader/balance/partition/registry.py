"""The strategies by name, and what each of them is given. Those of users are registered in the same way as ours."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.core.registry import Registry
from evenrank.dataloader.balance.partition.karmarkar_karp import karmarkar_karp
from evenrank.dataloader.balance.partition.lpt_swap import lpt_swap
from evenrank.dataloader.balance.partition.min_move import min_move
from evenrank.dataloader.balance.partition.relabel import relabel


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionProblem:
    """Input of a strategy: the n = W * B slots of a step. Slot r * B + j is row j of rank r, a sample or padding."""

    costs: NDArray[np.int64]
    """[n], 0 for padding."""

    tokens: NDArray[np.int64] | None
    """[n], 0 for padding; None if they are not known."""

    home: NDArray[np.int32]
    """[n]: the rank that loaded each slot, ascending."""

    order: NDArray[np.int64]
    """[n]: the slots by descending cost."""

    world_size: int
    """W."""

    target: int
    """The load that is good enough."""


Strategy = Callable[[PartitionProblem], NDArray[np.int32]]
"""Returns the rank of each slot: integers [n], in which each rank occurs B times. Every rank calls it, so it must be a
pure function: the same result for the same problem on all ranks. The problem's arrays are its own: it may write to
them."""

STRATEGIES: Registry[Strategy] = Registry("strategy", expected="a function of a PartitionProblem", accepts=callable)


def register_strategy(name: str) -> Callable[[Strategy], Strategy]:
    """Return a decorator that makes a function available as `strategy=name`, on every rank that runs it.

    Raises:
        ConfigError: the name is taken, or what is decorated cannot be called.

    """
    return STRATEGIES.register(name)


@register_strategy("none")
def _none(problem: PartitionProblem) -> NDArray[np.int32]:
    return problem.home


@register_strategy("karmarkar-karp")
def _karmarkar_karp(problem: PartitionProblem) -> NDArray[np.int32]:
    return _relabelled(problem, karmarkar_karp(problem.costs, problem.order, problem.world_size))


@register_strategy("lpt-swap")
def _lpt_swap(problem: PartitionProblem) -> NDArray[np.int32]:
    return _relabelled(problem, lpt_swap(problem.costs, problem.order, problem.world_size, problem.target))


@register_strategy("min-move")
def _min_move(problem: PartitionProblem) -> NDArray[np.int32]:
    tokens = problem.costs if problem.tokens is None else problem.tokens
    return min_move(problem.costs, tokens, problem.order, problem.world_size, problem.target)


def _relabelled(problem: PartitionProblem, part_of: NDArray[np.int32]) -> NDArray[np.int32]:
    return part_of if problem.tokens is None else relabel(part_of, problem.tokens, problem.home, problem.world_size)
