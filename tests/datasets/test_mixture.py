from collections import Counter

import numpy as np
import pytest

from evenrank.datasets.mixture import MixtureOrder
from evenrank.datasets.order import Samples


def samples(num_rows: int, left_out: list[int] | None = None) -> Samples:
    return Samples(num_rows=num_rows, left_out=np.array(left_out or [], dtype=np.int64))


def _epoch(order: MixtureOrder, epoch: int = 0) -> list[int]:
    rows: list[int] = order.rows(np.arange(order.num_samples), seed=5, epoch=epoch).tolist()
    return rows


@pytest.mark.parametrize("weights", [[3, 1], [1.5e308, 0.5e308]])  # the sum of the latter is infinite
def test_each_dataset_gets_its_share_of_an_epoch(weights: list[float]) -> None:
    assert MixtureOrder([samples(7), samples(4, [0])], [1, 1]).num_samples == 10
    rows = _epoch(MixtureOrder([samples(100), samples(50)], weights, num_samples=80))
    assert Counter(row < 100 for row in rows) == {True: 60, False: 20}
    assert max(rows) < 150


def test_all_samples_of_a_dataset_are_seen_equally_often_over_epochs_in_an_order_of_their_own() -> None:
    order = MixtureOrder([samples(6), samples(4, [1])], [1, 4], num_samples=10)  # quotas 2 and 8
    seen = Counter(row for epoch in range(3) for row in _epoch(order, epoch))
    # 3 epochs of 2 over 6 samples, and 3 epochs of 8 over 3 samples; one is left out.
    assert seen == {**dict.fromkeys(range(6), 1), **dict.fromkeys((6, 8, 9), 8)}
    rows = np.array(_epoch(MixtureOrder([samples(500), samples(500)], [1, 1])))
    assert 200 < np.count_nonzero(rows[:500] < 500) < 300
    assert rows[rows < 500].tolist() != (rows[rows >= 500] - 500).tolist()
