import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance.heuristics import longest_first
from evenrank.dataloader.balance.partition import STRATEGIES, lower_bound, partition
from evenrank.datasets.distributions import Distribution, Lognormal, Zipf
from evenrank.datasets.errors import ConfigError

COSTS = st.one_of(
    st.just(0), st.integers(0, 10), st.integers(0, 2**40), st.just(2**50)
)  # zeros, ties, and one giant among small ones


@st.composite
def steps(draw: st.DrawFn, max_world_size: int = 9, max_batch_size: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Costs [W, B] and how many of each rank's are real."""
    world_size, batch_size = draw(st.integers(1, max_world_size)), draw(st.integers(1, max_batch_size))
    size = world_size * batch_size
    costs = draw(st.lists(COSTS, min_size=size, max_size=size))
    num_real = draw(st.lists(st.integers(0, batch_size), min_size=world_size, max_size=world_size))
    return np.array(costs, dtype=np.int64).reshape(world_size, batch_size), np.array(num_real)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=300)
@given(step=steps())
def test_every_sample_gets_one_rank_and_no_rank_more_than_a_batch(
    strategy: str, step: tuple[np.ndarray, np.ndarray]
) -> None:
    costs, num_real = step
    world_size, batch_size = costs.shape
    rank_of = partition(costs, world_size, strategy=strategy, num_real=num_real).rank_of
    is_real = np.arange(batch_size) < num_real[:, np.newaxis]
    assert rank_of.shape == costs.shape
    assert (rank_of[~is_real] == -1).all()
    counts = np.bincount(rank_of[is_real], minlength=world_size)
    assert len(counts) == world_size
    assert counts.max() <= batch_size


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=200)
@given(step=steps())
def test_loads_are_above_the_lower_bound_and_balanced_ones_never_above_the_unbalanced(
    strategy: str, step: tuple[np.ndarray, np.ndarray]
) -> None:
    costs, num_real = step
    world_size = len(costs)
    real_costs = np.where(np.arange(costs.shape[1]) < num_real[:, np.newaxis], costs, 0)
    assignment = partition(costs, world_size, strategy=strategy, num_real=num_real)
    loads = assignment.loads(costs)
    assert loads.sum() == real_costs.sum()
    assert loads.max() >= lower_bound(real_costs, world_size)
    if strategy != "karmarkar-karp":
        assert loads.max() <= real_costs.sum(axis=1).max()
    if strategy == "identity":
        assert loads.tolist() == real_costs.sum(axis=1).tolist()
        assert assignment.count_moved() == 0


def _best(costs: np.ndarray, world_size: int) -> int:
    """The smallest possible heaviest load with equal counts, by trying everything."""
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


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 2), (2, 4), (3, 2), (3, 3), (4, 2)])
def test_lpt_swap_is_close_to_the_optimum_on_tiny_cases(world_size: int, batch_size: int) -> None:
    rng = np.random.default_rng(world_size * 10 + batch_size)
    ratios = []
    for _ in range(60):
        costs = rng.integers(0, 100, world_size * batch_size)
        best = _best(costs, world_size)
        assert lower_bound(costs, world_size) <= best
        found = int(partition(costs, world_size, tolerance=0).loads(costs).max())
        assert found >= best
        ratios.append(found / max(best, 1))
    assert np.mean(ratios) < 1.02
    assert max(ratios) < 1.25


@pytest.mark.parametrize("lengths", [Lognormal(mean=512, std=512), Zipf(exponent=1.2)], ids=["lognormal", "zipf"])
@pytest.mark.parametrize("world_size", [8, 64])
def test_lpt_swap_levels_skewed_lengths_to_a_thousandth(world_size: int, lengths: Distribution) -> None:
    ratios = {}
    for strategy in STRATEGIES:
        found = []
        for seed in range(20):
            tokens = lengths.sample(np.random.default_rng(seed), world_size * 32)
            costs = 10 * tokens * 1024**2 + 4 * tokens**2 * 1024
            loads = partition(costs, world_size, strategy=strategy).loads(costs)
            found.append(loads.max() / lower_bound(costs, world_size))
        ratios[strategy] = float(np.median(found))
    assert ratios["lpt-swap"] <= 1.001
    assert ratios["lpt-swap"] < ratios["karmarkar-karp"] < ratios["identity"]


def test_the_lower_bound_counts_what_must_come_together() -> None:
    # Two ranks of three: 9 has to take two of the others, at least 1 + 2.
    assert lower_bound(np.array([9, 1, 2, 3, 3, 1]), 2) == 11
    # Of the three largest, two share a rank, with the smallest beside them.
    assert lower_bound(np.array([8, 8, 8, 0, 0, 0]), 2) == 16
    assert lower_bound(np.array([4, 4, 4, 4]), 2) == 8
    assert lower_bound(np.array([7]), 1) == 7


def test_nobody_moves_where_the_dealt_samples_are_even_already() -> None:
    costs = np.array([[5, 1, 1], [3, 2, 2]])
    assert partition(costs, 2, strategy="lpt-swap").count_moved() == 0


def test_ties_are_broken_by_position() -> None:
    costs = np.array([5, 5, 5, 5, 5, 5])
    assert longest_first(costs, np.arange(6), 3).tolist() == [0, 1, 2, 0, 1, 2]
    assert partition(costs, 3, strategy="karmarkar-karp").rank_of.tolist() == [[0, 1], [2, 2], [1, 0]]


def test_one_giant_gets_the_smallest_samples_beside_it() -> None:
    costs = np.array([100, 1, 2, 3, 4, 5])
    assignment = partition(costs, 2)
    giant = assignment.rank_of.reshape(-1)[0]
    assert np.flatnonzero(assignment.rank_of.reshape(-1) == giant).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "random"}, "no strategy is called 'random'; there are identity, karmarkar-karp, lpt-swap"),
        ({"world_size": 4}, "got 6 for 4"),
        ({"num_real": np.array([4, 0])}, r"num_real must be 0..3 for each of 2 ranks, got \[4, 0\]"),
    ],
)
def test_wrong_arguments_name_the_value(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(np.arange(6), **{"world_size": 2, **arguments})  # type: ignore[arg-type]
