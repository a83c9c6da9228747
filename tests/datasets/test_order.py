"""Orders: each sample once per epoch in permutations that never change, shares of datasets, steps, and lanes."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.datasets.lanes import LaneOrder
from evenrank.datasets.mixture import MixtureOrder
from evenrank.datasets.order import EpochSchedule, Samples, permute


def samples(num_rows: int, left_out: Sequence[int] = ()) -> Samples:
    return Samples(num_rows=num_rows, left_out=np.array(left_out, dtype=np.int64))


@given(st.integers(1, 3000), st.integers(-(2**63), 2**63 - 1), st.integers(0, 1000))
def test_every_sample_comes_once_per_epoch_wherever_the_order_is_asked(num_samples: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(num_samples), num_samples, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(num_samples))
    some = np.array([num_samples - 1, 0, num_samples // 2])
    assert np.array_equal(permute(some, num_samples, seed=seed, epoch=epoch), order[some])


def test_permutations_never_change_and_rows_left_out_are_skipped() -> None:
    # Saved states rely on these values.
    assert permute(np.arange(10), 10, seed=0, epoch=0).tolist() == [7, 5, 1, 8, 6, 3, 4, 0, 9, 2]
    assert permute(np.arange(10), 10, seed=0, epoch=1).tolist() == [9, 4, 6, 8, 7, 3, 1, 5, 2, 0]
    assert permute(np.array([0, 10**10 - 1]), 10**10, seed=0, epoch=0).tolist() == [1230013334, 8594654745]
    assert samples(9, [2, 3, 7]).rows(np.arange(6)).tolist() == [0, 1, 4, 5, 6, 8]


def test_epochs_and_seeds_shuffle_independently_and_evenly() -> None:
    orders = [permute(np.arange(5000), 5000, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    for order, other in itertools.combinations(orders, 2):
        # Two independent permutations agree at about one position, and are uncorrelated.
        assert np.count_nonzero(order == other) < 10
        assert abs(np.corrcoef(order, other)[0, 1]) < 0.06
    # The position of sample 3 of 16 over many epochs is uniform (chi-squared with 15 degrees of freedom).
    positions = [int(np.flatnonzero(permute(np.arange(16), 16, seed=5, epoch=e) == 3)[0]) for e in range(1600)]
    assert ((np.bincount(positions, minlength=16) - 100) ** 2 / 100).sum() < 40


@given(st.integers(0, 200), st.integers(1, 5), st.integers(1, 9), st.booleans(), st.data())
def test_steps_cover_every_remaining_position_once_and_in_order(
    num_samples: int, world_size: int, batch_size: int, drop_last: bool, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, num_samples))
    of_ranks = {"num_samples": num_samples, "world_size": world_size, "batch_size": batch_size}
    schedule = EpochSchedule(**of_ranks, start=start, drop_last=drop_last)
    parts = [schedule.positions(step, rank) for step in range(schedule.num_steps) for rank in range(world_size)]
    end = num_samples - (num_samples - start) % (world_size * batch_size) * drop_last
    assert np.array_equal(np.concatenate([[], *parts]), np.arange(start, end))
    assert all(len(positions) <= batch_size for positions in parts)
    assert not schedule.num_steps or schedule.position_after(schedule.num_steps - 1) == end


def _epoch(order: MixtureOrder, epoch: int = 0) -> list[int]:
    rows: list[int] = order.rows(np.arange(order.num_samples), seed=5, epoch=epoch).tolist()
    return rows


def test_datasets_have_their_shares_of_an_epoch_and_their_samples_equal_turns_in_orders_of_their_own() -> None:
    assert MixtureOrder([samples(7), samples(4, [0])], [1, 1]).num_samples == 10
    for weights in ([3, 1], [1.5e308, 0.5e308]):  # the sum of the latter is infinite
        rows = _epoch(MixtureOrder([samples(100), samples(50)], weights, num_samples=80))
        assert Counter(row < 100 for row in rows) == {True: 60, False: 20}
        assert max(rows) < 150
    order = MixtureOrder([samples(6), samples(4, [1])], [1, 4], num_samples=10)  # quotas 2 and 8
    seen = Counter(row for epoch in range(3) for row in _epoch(order, epoch))
    # 3 epochs of 2 over 6 samples, and 3 epochs of 8 over 3 samples; one is left out.
    assert seen == {**dict.fromkeys(range(6), 1), **dict.fromkeys((6, 8, 9), 8)}
    mixed = np.array(_epoch(MixtureOrder([samples(500), samples(500)], [1, 1])))
    assert np.count_nonzero(mixed[:500] < 500) == pytest.approx(250, abs=50)
    assert mixed[mixed < 500].tolist() != (mixed[mixed >= 500] - 500).tolist()


ORDERS = st.builds(LaneOrder, st.integers(0, 3000), lanes=st.integers(1, 70), window_rows=st.integers(1, 20))
SEEDS = st.fixed_dictionaries({"seed": st.integers(-3, 1 << 40), "epoch": st.integers(0, 5)})
STOPS = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 9), st.integers(0, 20)), max_size=6)


@given(ORDERS, SEEDS, STOPS)
@settings(max_examples=60)
def test_chains_of_stops_on_1_to_100_ranks_have_each_row_once_and_windows_where_their_spans_have_them(
    order: LaneOrder, seed: dict[str, int], chain: list[tuple[int, int, int]]
) -> None:
    num_rows, position = order.num_samples, 0
    whole = order.rows(np.arange(num_rows), **seed)
    assert sorted(whole.tolist()) == list(range(num_rows))
    shuffled = np.random.default_rng(0).permutation(num_rows)
    assert order.rows(shuffled, **seed).tolist() == whole[shuffled].tolist()
    for world_size, batch_size in [(ranks, size) for ranks, size, steps in [*chain, (3, 50, 99)] for _ in range(steps)]:
        positions = np.arange(position, min(num_rows, position + world_size * batch_size))
        shares = [order.share(positions, rank, world_size) for rank in range(world_size)]
        sizes = [*map(len, shares)]
        assert max(sizes) <= min(batch_size, min(sizes) + 1)
        assert sorted(np.concatenate(shares).tolist()) == positions.tolist()
        position += len(positions)
    while position > 0:  # back to the first window
        window = order.window(position - 1)
        rows, places, spans = order.window_of(window, np.arange(order.num_lanes), **seed)
        read = np.concatenate([np.arange(span.first, span.end) for span in spans])
        at = order.places(window, np.arange(window.first, window.end))
        assert read[places[at]].tolist() == rows[at].tolist() == whole[window.first : window.end].tolist()
        assert sorted(read) == sorted(rows[at])
        position = window.first
