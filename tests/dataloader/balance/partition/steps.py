"""Random steps for the tests of strategies, and the optimum of tiny ones by exhaustive search."""

import itertools

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Step = tuple[NDArray[np.int64], NDArray[np.int64]]  # costs [W, B], samples of each rank [W]


def costs(size: int) -> st.SearchStrategy[NDArray[np.int64]]:
    """Draw costs, int64 [size]: a mix of zeros, ties below 16, costs up to 2^40, and giants of 2^50.

    Five bytes for each cost, drawn at once, which is several times faster than a list of integers.
    """
    return st.binary(min_size=5 * size, max_size=5 * size).map(_costs_of_bytes)


def _costs_of_bytes(data: bytes) -> NDArray[np.int64]:
    words = np.frombuffer(data, dtype=np.uint8).reshape(-1, 5).astype(np.int64)
    values = (words << (8 * np.arange(5))).sum(axis=1)  # below 2^40
    kind = words[:, 0] % 8
    return np.select([kind == 0, kind <= 3, kind == 7], [0, values >> 36, 2**50], values)


@st.composite
def steps(draw: st.DrawFn, max_world_size: int = 9, max_batch_size: int = 9) -> Step:
    """Draw costs, int64 [W, B], and the number of each rank's samples, int64 [W]."""
    world_size, batch_size = draw(st.integers(1, max_world_size)), draw(st.integers(1, max_batch_size))
    step_costs = draw(costs(world_size * batch_size))
    num_real = draw(st.lists(st.integers(0, batch_size), min_size=world_size, max_size=world_size))
    return step_costs.reshape(world_size, batch_size), np.array(num_real)


def optimal_heaviest_load(costs: NDArray[np.int64], world_size: int) -> int:
    """Return the smallest possible heaviest load with equal counts, by exhaustive search."""
    batch_size = len(costs) // world_size

    def heaviest(left: tuple[int, ...], ranks: int) -> int:
        if ranks == 1:
            return int(sum(costs[list(left)]))
        first, *others = left  # on some rank; ranks are interchangeable
        best = None
        for rest in itertools.combinations(others, batch_size - 1):
            load = int(costs[first] + sum(costs[list(rest)]))
            if best is None or load < best:
                remaining = tuple(i for i in others if i not in rest)
                worst = max(load, heaviest(remaining, ranks - 1))
                best = worst if best is None else min(best, worst)
        assert best is not None
        return best

    return heaviest(tuple(range(len(costs))), world_size)
