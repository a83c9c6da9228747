"""Random steps for the tests of strategies, and what the best division of a tiny one is."""

import itertools

import numpy as np
from hypothesis import strategies as st

VALUES = st.one_of(
    st.just(0), st.integers(0, 10), st.integers(0, 2**40), st.just(2**50)
)  # zeros, ties, and one giant among small ones


@st.composite
def steps(draw: st.DrawFn, max_world_size: int = 9, max_batch_size: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Costs [W, B] and how many of each rank's are real."""
    world_size, batch_size = draw(st.integers(1, max_world_size)), draw(st.integers(1, max_batch_size))
    size = world_size * batch_size
    costs = draw(st.lists(VALUES, min_size=size, max_size=size))
    num_real = draw(st.lists(st.integers(0, batch_size), min_size=world_size, max_size=world_size))
    return np.array(costs, dtype=np.int64).reshape(world_size, batch_size), np.array(num_real)


def smallest_heaviest_load(costs: np.ndarray, world_size: int) -> int:
    """Return the smallest possible heaviest load with equal counts, by trying everything."""
    batch_size = len(costs) // world_size

    def heaviest(left: tuple[int, ...], ranks: int) -> int:
        if ranks == 1:
            return int(sum(costs[list(left)]))
        first, *others = left  # some rank has it; which one does not matter
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
