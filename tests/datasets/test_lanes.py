"""The order of a stream: each row once per epoch, on any numbers of ranks, and few rows on more than one of them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.datasets.lanes import LaneOrder

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
