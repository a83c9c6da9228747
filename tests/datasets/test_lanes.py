"""The order of a stream: each row once per epoch, on any numbers of ranks, and few rows on more than one of them."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.datasets.lanes import EpochLanes, LaneWindow, radical_inverses

ORDERS = st.builds(
    EpochLanes,
    st.integers(0, 3000),
    max_lanes=st.integers(1, 70),
    window_rows=st.integers(1, 20),
    seed=st.integers(-3, 1 << 40),
    epoch=st.integers(0, 5),
)


def _windows(order: EpochLanes, positions: np.ndarray) -> Iterator[tuple[LaneWindow, np.ndarray]]:
    """Yield the windows of positions, with those in each."""
    while len(positions):
        window = next(order.windows(int(positions[0])))
        assert window.first <= positions[0] < window.end
        count = np.searchsorted(positions, window.end)
        yield window, positions[:count]
        positions = positions[count:]


def rows_at(order: EpochLanes, positions: np.ndarray) -> list[int]:
    found: list[int] = []
    for window, within in _windows(order, positions):
        lanes, places = order.places(window, within)
        own = np.unique(lanes)
        rows, read_at, spans = order.rows(window, own)
        read = np.array([row for span in spans for row in range(span.first, span.end)])
        assert read[read_at[rows >= 0]].tolist() == rows[rows >= 0].tolist()
        assert len(read) == np.count_nonzero(rows >= 0)
        assert all(span.first < span.end <= span.until for span in spans)
        found += rows[np.searchsorted(own, lanes), places].tolist()
    return found


@given(ORDERS, st.lists(st.tuples(st.integers(1, 100), st.integers(1, 9), st.integers(0, 20)), max_size=6))
@settings(max_examples=60, deadline=None)
def test_chains_of_stops_on_any_numbers_of_ranks_have_each_row_once(
    order: EpochLanes, chain: list[tuple[int, int, int]]
) -> None:
    whole = rows_at(order, np.arange(order.num_rows))
    assert sorted(whole) == list(range(order.num_rows))
    position = 0
    for world_size, batch_size, steps in [*chain, (3, 50, 10_000)]:
        for _ in range(steps):
            end = min(order.num_rows, position + world_size * batch_size)
            shares = [order.share(position, end, rank=rank, world_size=world_size) for rank in range(world_size)]
            assert max(map(len, shares)) <= batch_size
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert sorted(np.concatenate(shares).tolist()) == list(range(position, end))
            for share in shares:
                assert rows_at(order, share) == [whole[at] for at in share.tolist()]
            position = end
            if position == order.num_rows:
                return


def test_epochs_and_seeds_have_other_orders() -> None:
    orders = [
        rows_at(EpochLanes(2000, max_lanes=8, window_rows=10, seed=seed, epoch=epoch), np.arange(2000))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert np.mean(np.array(order) == np.array(other)) < 0.02
            # The rows of a tenth of the epoch are others too.
            assert len({*order[:200]} & {*other[:200]}) < 100


@given(st.integers(1, 400))
def test_radical_inverses_are_a_permutation(count: int) -> None:
    assert sorted(radical_inverses(count).tolist()) == list(range(count))


def _read(order: EpochLanes, world_size: int, batch_size: int) -> float:
    """Return how many lanes ranks read, per lane, from some step on, as long as it takes for steps to repeat."""
    per_step = world_size * batch_size
    pairs = set()
    for step in range(order.num_lanes // math.gcd(order.num_lanes, per_step)):
        first = 100 + step * per_step
        for rank in range(world_size):
            share = order.share(first, first + per_step, rank=rank, world_size=world_size)
            for window, within in _windows(order, share):
                lanes, _ = order.places(window, within)
                pairs |= {(rank, lane) for lane in lanes.tolist()}
    return len(pairs) / order.num_lanes


@pytest.mark.parametrize("batch_size", [8, 30])
def test_few_lanes_are_read_by_more_than_one_rank(batch_size: int) -> None:
    order = EpochLanes(1 << 22, max_lanes=128, window_rows=256, seed=0, epoch=0)
    assert order.num_lanes == 128
    for world_size in range(1, 25):
        read = _read(order, world_size, batch_size)
        assert read <= 1.25
        if 128 % world_size == 0:
            assert read == 1
    assert _read(order, 64, batch_size) == 1
    # Beyond the lanes, ranks share them.
    assert _read(order, 200, batch_size) <= 1 + 200 / 128


@given(ORDERS)
def test_a_lane_reads_its_rows_one_after_the_other(order: EpochLanes) -> None:
    """So that what is read of a row group and not yet needed is needed next."""
    after: dict[int, int] = {}
    for window in order.windows(0):
        for lane in range(order.num_lanes):
            for span in order.rows(window, np.array([lane])).spans:
                if lane in after:
                    assert span.first == after[lane]
                after.pop(lane, None)
                if span.end < span.until:
                    after[lane] = span.end
    assert not after
