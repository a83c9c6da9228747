"""The order of a stream: each row once per epoch, on any numbers of ranks, and few rows on more than one of them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.datasets.lanes import LaneOrder, radical_inverses
from evenrank.datasets.stream import StreamConfig

ORDERS = st.builds(LaneOrder, st.integers(0, 3000), lanes=st.integers(1, 70), window_rows=st.integers(1, 20))
SEEDS = st.fixed_dictionaries({"seed": st.integers(-3, 1 << 40), "epoch": st.integers(0, 5)})


@given(ORDERS, SEEDS, st.lists(st.tuples(st.integers(1, 100), st.integers(1, 9), st.integers(0, 20)), max_size=6))
@settings(max_examples=60)
def test_chains_of_stops_on_1_to_100_ranks_have_each_row_once(
    order: LaneOrder, seed: dict[str, int], chain: list[tuple[int, int, int]]
) -> None:
    num_rows = order.num_samples
    whole = order.rows(np.arange(num_rows), **seed)
    assert sorted(whole.tolist()) == list(range(num_rows))
    shuffled = np.random.default_rng(0).permutation(num_rows)
    assert order.rows(shuffled, **seed).tolist() == whole[shuffled].tolist()
    position = 0
    for world_size, batch_size, steps in [*chain, (3, 50, 10_000)]:
        for _ in range(steps):
            positions = np.arange(position, min(num_rows, position + world_size * batch_size))
            shares = [order.share(positions, rank, world_size) for rank in range(world_size)]
            sizes = [*map(len, shares)]
            assert max(sizes) <= min(batch_size, min(sizes) + 1)
            assert sorted(np.concatenate(shares).tolist()) == positions.tolist()
            position += len(positions)
            if position == num_rows:
                return


@given(ORDERS, SEEDS)
def test_the_rows_of_a_window_are_where_its_spans_have_them(order: LaneOrder, seed: dict[str, int]) -> None:
    position = 0
    while position < order.num_samples:
        window = order.window(position)
        rows, places, spans = order.window_of(window, np.arange(order.num_lanes), **seed)
        read = np.concatenate([np.arange(span.first, span.end) for span in spans])
        at = order.places(window, np.arange(window.first, window.end))
        assert read[places[at]].tolist() == rows[at].tolist()
        assert sorted(read) == sorted(rows[at])
        position = window.end


def test_epochs_and_seeds_have_other_orders() -> None:
    order = LaneOrder(2000, lanes=8, window_rows=10)
    orders = [order.rows(np.arange(2000), seed=seed, epoch=epoch) for seed in (0, 1) for epoch in range(4)]
    pairs = list(itertools.combinations(orders, 2))
    assert all(np.mean(rows == other) < 0.02 for rows, other in pairs)
    # The rows of a tenth of the epoch are mostly others too.
    assert np.mean([len(np.intersect1d(rows[:200], other[:200])) for rows, other in pairs]) < 40


@given(st.integers(1, 400))
def test_radical_inverses_are_a_permutation(count: int) -> None:
    assert sorted(radical_inverses(count).tolist()) == list(range(count))


def _read(order: LaneOrder, world_size: int, batch_size: int, stop: int) -> float:
    """Return how many rows ranks read in the windows before position `stop`, per row."""
    read = set()  # lanes of windows, by rank
    for first in range(0, stop, world_size * batch_size):
        positions = np.arange(first, min(first + world_size * batch_size, stop))
        for rank in range(world_size):
            share = order.share(positions, rank, world_size)
            while len(share):
                window = order.window(int(share.min()))
                lanes, _ = order.places(window, share[share < window.end])
                read |= {(rank, window, lane) for lane in lanes.tolist()}
                share = share[share >= window.end]
    return sum((window.end - window.first) // order.num_lanes for _, window, _ in read) / stop


@pytest.mark.parametrize("batch_size", [8, 30])
def test_ranks_read_few_rows_more_than_once(batch_size: int) -> None:
    default = StreamConfig()
    order = LaneOrder(1 << 18, lanes=default.lanes, window_rows=default.window_rows)
    assert order.num_lanes == default.lanes
    for world_size in (1, 2, 3, 5, 8, 13, 16, 24):
        read = _read(order, world_size, batch_size, stop=2 * default.lanes * default.window_rows)
        assert read == 1 if math.log2(world_size * batch_size) % 1 == 0 else read <= 1.25
