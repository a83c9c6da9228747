"""Assignments of samples to ranks, next to plain references, lower bounds, and exhaustive search."""

import heapq
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.partition.lpt import karmarkar_karp, lpt_with_room
from evenrank.dataloader.balance.partition.parts import relabel
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending
from evenrank.dataloader.balance.partition.strategies import STRATEGIES, TokenLimitWarning, lower_bound, partition
from evenrank.datasets.distributions import Lognormal, Zipf

Ints = NDArray[np.int64]


def _costs(size: int) -> st.SearchStrategy[Ints]:
    """Draw costs, int64 [size]: a mix of zeros, ties below 16, costs up to 2^40, and giants of 2^50.

    Five bytes for each cost, drawn at once, which is several times faster than a list of integers.
    """

    def of_bytes(data: bytes) -> Ints:
        words = np.frombuffer(data, dtype=np.uint8).reshape(-1, 5).astype(np.int64)
        values = (words << (8 * np.arange(5))).sum(axis=1)  # below 2^40
        kind = words[:, 0] % 8
        return np.select([kind == 0, kind <= 3, kind == 7], [0, values >> 36, 2**50], values)

    return st.binary(min_size=5 * size, max_size=5 * size).map(of_bytes)


@st.composite
def steps(draw: st.DrawFn, max_world_size: int = 9, max_batch_size: int = 9) -> tuple[Ints, Ints]:
    """Draw the costs of a step, [W, B], and the samples of each rank, [W]."""
    world_size, batch_size = draw(st.integers(1, max_world_size)), draw(st.integers(1, max_batch_size))
    costs = draw(_costs(world_size * batch_size)).reshape(world_size, batch_size)
    return costs, np.array(draw(st.lists(st.integers(0, batch_size), min_size=world_size, max_size=world_size)))


@pytest.mark.parametrize(("count", "shape"), [(2500, (9, 9)), pytest.param(100_000, (17, 12), marks=pytest.mark.long)])
def test_every_assignment_is_complete_and_no_worse(count: int, shape: tuple[int, int]) -> None:
    @settings(max_examples=count)
    @given(step=steps(*shape), strategy=st.sampled_from(list(STRATEGIES)))
    def check(step: tuple[Ints, Ints], strategy: str) -> None:
        costs, num_real = step
        world_size, batch_size = costs.shape
        is_real = np.arange(batch_size) < num_real[:, np.newaxis]
        real_costs = np.where(is_real, costs, 0)
        options: dict[str, Any] = {"strategy": strategy, "num_real": num_real, "tokens": costs % 1000}
        assignment = partition(costs, world_size, **options)
        rank_of = assignment.rank_of
        assert rank_of.shape == costs.shape
        assert (rank_of[~is_real] == -1).all()
        counts = np.bincount(rank_of[is_real], minlength=world_size)
        assert len(counts) == world_size
        assert counts.max() <= batch_size
        loads = assignment.loads(costs)
        assert loads.tolist() == [real_costs[rank_of == rank].sum() for rank in range(world_size)]
        assert loads.max() >= lower_bound(real_costs, world_size)
        assert strategy == "karmarkar-karp" or loads.max() <= real_costs.sum(axis=1).max()
        assert strategy != "none" or not assignment.moved.any()
        assert np.array_equal(partition(costs.copy(), world_size, **options).rank_of, rank_of)

    check()


@settings(max_examples=300)
@given(steps(), st.integers(0, 3), st.booleans())
def test_lpt_is_that_of_a_plain_implementation(step: tuple[Ints, Ints], open_place: int, keeps: bool) -> None:
    """Each slot, largest first, goes to the lightest rank with room, on which open places count as cheap samples."""
    costs, _ = step
    world_size, batch_size = costs.shape
    values, keep_below = costs.reshape(-1), int(np.median(costs.sum(axis=1))) if keeps else -1
    loads, room, ranks = [batch_size * open_place] * world_size, [batch_size] * world_size, [0] * values.size
    for slot in sorted(range(values.size), key=lambda slot: (-values[slot], slot)):
        added, home = int(values[slot]) - open_place, slot // batch_size
        rank = min((rank for rank in range(world_size) if room[rank]), key=lambda rank: (loads[rank], rank))
        if keeps and room[home] and loads[home] + added <= keep_below:
            rank = home
        ranks[slot] = rank
        loads[rank] += added
        room[rank] -= 1
    order = argsort_descending(values)
    assert lpt_with_room(values, order, world_size, batch_size, open_place, keep_below).tolist() == ranks


def _difference(groups: list[list[int]]) -> list[int]:
    """Merge groups of W sums each, by largest difference, with a heap of whole tuples; return the sums of the parts."""
    heap = [(min(group) - max(group), index, sorted(group)) for index, group in enumerate(groups)]
    heapq.heapify(heap)
    for index in itertools.count(len(groups)):
        if len(heap) == 1:
            break
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = sorted(low + high for low, high in zip(first, reversed(second), strict=True))
        heapq.heappush(heap, (merged[0] - merged[-1], index, merged))
    return heap[0][2]


def test_karmarkar_karp_has_the_loads_of_a_plain_implementation() -> None:
    for seed in range(25):
        rng = np.random.default_rng(seed)
        world_size, batch_size = int(rng.integers(1, 17)), int(rng.integers(1, 12))
        # Drawn from 2^40 numbers: no two spreads are equal, so there is one result.
        costs = (rng.pareto(1.0, world_size * batch_size) * 2**40).astype(np.int64)
        rank_of = karmarkar_karp(costs, argsort_descending(costs), world_size)
        descending = sorted(costs.tolist(), reverse=True)
        expected = _difference([[*block] for block in zip(*[iter(descending)] * world_size, strict=True)])
        assert sorted(int(costs[rank_of == rank].sum()) for rank in range(world_size)) == expected


@pytest.mark.parametrize("highest", [1, 255, 256, 2**20, 2**62 - 1])
def test_slots_are_sorted_by_descending_cost_then_by_slot(highest: int) -> None:
    for size in (1, 2, 63, 64, 65, 4095, 4096, 50_000):  # by insertion, and by digits of 8 and 11 bits
        for lowest in (0, -highest):
            costs = np.random.default_rng(size).integers(lowest, highest, size, endpoint=True)
            assert np.array_equal(argsort_descending(costs), np.argsort(-costs, kind="stable"))


@pytest.mark.parametrize("lengths", [Lognormal(mean=512, std=512), Zipf(exponent=1.2)])
@pytest.mark.parametrize("world_size", [8, 64])
def test_skewed_lengths_are_levelled_and_min_move_moves_few_tokens(world_size: int, lengths: Any) -> None:
    ratios: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    moved: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for seed in range(20):
        tokens = lengths.sample(np.random.default_rng(seed), world_size * 32)
        costs = 10 * tokens * 1024**2 + 4 * tokens**2 * 1024
        for strategy in STRATEGIES:
            assignment = partition(costs, world_size, strategy=strategy, tokens=tokens)
            ratios[strategy].append(assignment.loads(costs).max() / lower_bound(costs, world_size))
            moved[strategy].append(tokens.reshape(world_size, -1)[assignment.moved].sum() / tokens.sum())
    median = {strategy: np.median(of_seeds) for strategy, of_seeds in ratios.items()}
    assert max(median["lpt-swap"], median["min-move"]) <= 1.001
    assert median["lpt-swap"] < median["karmarkar-karp"] < median["none"]
    assert np.median(moved["min-move"]) < 0.3 < np.median(moved["lpt-swap"])


@settings(max_examples=500)
@given(st.integers(2, 64), st.integers(1, 8), st.integers(0, 10_000), st.integers(0, 10**6))
def test_lpt_swap_is_within_the_tolerance_or_as_even_as_karmarkar_karp(
    world_size: int, batch_size: int, low: int, seed: int
) -> None:
    costs = np.random.default_rng(seed).integers(low, 10_001, world_size * batch_size)
    swapped, differenced = (
        partition(costs, world_size, strategy=name).loads(costs).max() for name in ("lpt-swap", "karmarkar-karp")
    )
    assert swapped <= max(1.001 * lower_bound(costs, world_size), differenced)


@pytest.mark.parametrize(
    ("parts", "tokens", "home", "ranks"),
    [
        # Part 0 consists of slots 2 and 3, which are on rank 1; part 1 of slots 0 and 1.
        ([1, 1, 0, 0], [5, 5, 5, 5], [0, 0, 1, 1], [0, 0, 1, 1]),
        # Both parts have one slot of each rank, so the longest sample, slot 3, decides.
        ([0, 1, 1, 0], [1, 2, 3, 9], [0, 0, 1, 1], [1, 0, 0, 1]),
        # Without tokens, parts are assigned in order.
        ([1, 0, 2], [0, 0, 0], [0, 1, 2], [0, 1, 2]),
        # Rank 0 has slots 0 to 3, rank 1 none, rank 2 slot 4. Part 2 is most of rank 0, part 0 has the slot of rank 2.
        ([2, 2, 2, 1, 0], [1, 1, 1, 2, 7], [0, 0, 0, 0, 2], [0, 0, 0, 1, 2]),
    ],
)
def test_parts_go_to_the_ranks_that_have_their_tokens(
    parts: list[int], tokens: list[int], home: list[int], ranks: list[int]
) -> None:
    relabelled = relabel(np.array(parts, np.int32), np.array(tokens), np.array(home, np.int32), max(parts) + 1)
    assert relabelled.tolist() == ranks


def test_only_what_has_to_move_moves() -> None:
    for strategy in ("none", "lpt-swap", "min-move"):
        assert not partition(np.array([[5, 1, 1], [3, 2, 2]]), 2, strategy=strategy).moved.any()
    # 40 and 20: swapping a 20 for a 10 levels them, and nothing else moves.
    costs = np.array([[20, 20], [10, 10]])
    assignment = partition(costs, 2, strategy="min-move")
    assert (assignment.moved.sum(), assignment.loads(costs).tolist()) == (2, [30, 30])
    assert assignment.loads(costs + 0.5).tolist() == [31, 31]
    empty = np.array([[4, 4, 0], [9, 9, 9], [7, 7, 7]])  # of ranks without samples, which get their share
    for strategy in ("lpt-swap", "min-move", "karmarkar-karp"):
        assert sorted(partition(empty, 3, strategy=strategy, num_real=np.array([2, 0, 0])).loads(empty)) == [0, 4, 4]


def test_ties_are_broken_by_position_and_costs_up_to_2_to_the_62_are_levelled() -> None:
    assert partition(np.array([5] * 6), 3, strategy="karmarkar-karp").rank_of.tolist() == [[0, 1], [2, 2], [1, 0]]
    costs = np.array([2**60, 2**60, 2**59, 2**59, 2**59, 2**59])
    assert partition(costs, 2, tolerance=0).loads(costs).tolist() == [2**61, 2**61]
    padding = np.array([[1 << 62, 1 << 62], [7, -5]])  # of which the values do not matter
    assert partition(padding, 2, num_real=np.array([1, 1])).loads(padding).tolist() == [1 << 62, 7]


@pytest.mark.parametrize("strategy", ["karmarkar-karp", "lpt-swap", "min-move"])
def test_costs_are_levelled_within_the_limit_of_tokens_where_that_can_be(strategy: str) -> None:
    # By cost alone 90 + 10 and 50 + 50, with 190 and 110 tokens; the limit only allows 90 + 50 and 10 + 50.
    costs, tokens = np.array([[90, 10], [50, 50]]), np.array([[100, 90], [50, 60]])
    assert partition(costs, 2, strategy=strategy, tokens=tokens).loads(costs).tolist() == [100, 100]
    limited = partition(costs, 2, strategy=strategy, tokens=tokens, max_tokens_per_rank=160)
    assert (limited.loads(tokens).tolist(), sorted(limited.loads(costs))) == ([150, 150], [60, 140])
    tokens, costs = np.random.default_rng(0).integers(1, 1000, (2, 64))  # independent of each other
    limit = -(-int(tokens.sum()) // 8) + 20
    limited = partition(costs, 8, strategy=strategy, tokens=tokens, max_tokens_per_rank=limit)
    assert limited.loads(tokens).max() <= limit
    assert limited.loads(costs).max() < 1.02 * lower_bound(costs, 8)


def test_a_limit_that_cannot_be_kept_is_exceeded_with_a_warning() -> None:
    costs = np.array([[5, 5], [1, 1]])
    with pytest.warns(TokenLimitWarning, match="max_tokens_per_rank = 5 is exceeded in some steps"):
        assignment = partition(costs, 2, tokens=costs, max_tokens_per_rank=5, on_overflow="warn")
    assert assignment.loads(costs).tolist() == [6, 6]
    assert not partition(costs, 2, strategy="none", tokens=costs, max_tokens_per_rank=10).moved.any()
    with pytest.raises(ConfigError, match="the best assignment found has a rank with 10 tokens"):
        partition(costs, 2, strategy="none", tokens=costs, max_tokens_per_rank=9)


def _optimum(costs: Ints, world_size: int) -> int:
    """Return the smallest possible heaviest load with equal counts, by exhaustive search."""
    batch_size = len(costs) // world_size

    def heaviest(left: tuple[int, ...], ranks: int) -> int:
        if not ranks:
            return 0
        first, *others = left  # on some rank; ranks are interchangeable
        best = 1 << 62
        for rest in itertools.combinations(others, batch_size - 1):
            load = int(costs[first] + sum(costs[list(rest)]))
            if load < best:
                best = min(best, max(load, heaviest(tuple(i for i in others if i not in rest), ranks - 1)))
        return best

    return heaviest(tuple(range(len(costs))), world_size)


@pytest.mark.filterwarnings("ignore:max_tokens_per_rank")
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 3), (2, 4), (3, 2), (3, 3), (4, 2), (5, 2)])
def test_tiny_cases_come_close_to_the_optimum_which_is_not_below_the_bound(world_size: int, batch_size: int) -> None:
    rng = np.random.default_rng(world_size * 10 + batch_size)
    num_tight, num_missed, ratios = 0, 0, []
    for _ in range(60):
        costs = (rng.pareto(0.7, world_size * batch_size) * 10).astype(np.int64)
        bound, optimum = lower_bound(costs, world_size), _optimum(costs, world_size)
        assert bound <= optimum
        num_tight += bound == optimum
        for strategy in ("lpt-swap", "min-move"):
            heaviest = int(partition(costs, world_size, strategy=strategy, tolerance=0).loads(costs).max())
            assert heaviest >= optimum
            ratios.append(heaviest / max(optimum, 1))
        # The tightest limit that can be kept is missed rarely, and one that is 10 % above that never.
        others, tokens = rng.integers(0, 100, (2, world_size * batch_size))
        limit = max(_optimum(tokens, world_size), 1)
        tight = partition(others, world_size, tokens=tokens, max_tokens_per_rank=limit, on_overflow="warn")
        num_missed += int(tight.loads(tokens).max()) > limit
        partition(others, world_size, tokens=tokens, max_tokens_per_rank=-(-limit * 11 // 10))
    assert num_tight >= 15  # of 60
    assert num_missed <= 12
    assert np.mean(ratios) < 1.02
    assert max(ratios) < 1.25


@pytest.mark.parametrize(
    ("costs", "world_size", "bound"),
    [
        ([4, 4, 4, 5], 2, 9),  # the mean, rounded up
        ([9, 1, 2, 3, 3, 1], 2, 11),  # the largest takes at least the two smallest
        ([8, 8, 8, 0, 0, 0], 2, 16),  # of the three largest, two share a rank
        ([20, 20, 1, 1, 1, 1, 9, 9, 9], 3, 24),  # the two largest take 4 of the smallest: (40 + 1 + 1 + 1 + 1) / 2 = 22
        ([6, 6, 6, 6, 6, 0], 2, 18),  # of five, three share a rank
        ([0, 0], 2, 0),
    ],
)
def test_costs_that_must_share_a_rank_are_counted(costs: list[int], world_size: int, bound: int) -> None:
    assert lower_bound(np.array(costs), world_size) == bound


@given(steps())
def test_padded_samples_stay_and_every_row_costs_as_much_as_the_most_expensive_one(step: tuple[Ints, Ints]) -> None:
    costs, num_real = step
    world_size, batch_size = costs.shape
    assignment = partition(costs, world_size, num_real=num_real, padded=True)
    is_real = np.arange(batch_size) < num_real[:, np.newaxis]
    home = np.broadcast_to(np.arange(world_size)[:, np.newaxis], costs.shape)
    assert assignment.rank_of.tolist() == np.where(is_real, home, -1).tolist()
    assert not assignment.moved.any()
    real = np.where(is_real, costs, 0)
    for values in (real, real.astype(np.float64)):
        assert assignment.loads(values).tolist() == (batch_size * real.max(axis=1)).tolist()
    assert lower_bound(real, world_size, padded=True) == batch_size * real.max() == assignment.loads(real).max()
