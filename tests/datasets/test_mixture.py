from collections import Counter

import numpy as np
import pytest

from evenrank.core.errors import ConfigError
from evenrank.datasets.mixture import MixtureOrder
from evenrank.datasets.order import Samples


def _samples(num_rows: int, left_out: list[int] | None = None) -> Samples:
    return Samples(num_rows=num_rows, left_out=np.array(left_out or [], dtype=np.int64))


def _epoch(order: MixtureOrder, epoch: int, seed: int = 5) -> list[int]:
    rows: list[int] = order.rows(np.arange(order.num_samples), seed=seed, epoch=epoch).tolist()
    return rows


@pytest.mark.parametrize("weights", [[3, 1], [1.5e308, 0.5e308]])  # the sum of the latter is infinite
def test_each_dataset_gets_its_share_of_an_epoch(weights: list[float]) -> None:
    assert MixtureOrder([_samples(7), _samples(4, [0])], [1, 1]).num_samples == 10
    rows = _epoch(MixtureOrder([_samples(100), _samples(50)], weights, num_samples=80), 0)
    assert (sum(row < 100 for row in rows), sum(row >= 100 for row in rows)) == (60, 20)
    assert max(rows) < 150


def test_all_samples_of_a_dataset_are_seen_equally_often_over_epochs() -> None:
    order = MixtureOrder([_samples(6), _samples(4, [1])], [1, 4], num_samples=10)  # quotas 2 and 8
    seen = Counter(row for epoch in range(3) for row in _epoch(order, epoch))
    assert [seen[row] for row in range(6)] == [1] * 6  # 3 epochs of 2
    assert seen[6 + 1] == 0  # left out
    assert [seen[6 + row] for row in (0, 2, 3)] == [8] * 3  # 3 epochs of 8, over 3 samples


def test_datasets_are_interleaved_and_come_in_different_orders() -> None:
    rows = np.array(_epoch(MixtureOrder([_samples(500), _samples(500)], [1, 1]), 0))
    assert 200 < np.count_nonzero(rows[:500] < 500) < 300
    assert rows[rows < 500].tolist() != (rows[rows >= 500] - 500).tolist()


@pytest.mark.parametrize(
    ("samples", "weights", "message"),
    [
        *((_samples(5), [w, v], "weights must be positive numbers") for w, v in ((0, 1), (-1, 1), (0, 0))),
        *((_samples(5), [float(w), 1], "weights must be positive numbers") for w in ("nan", "inf")),
        (_samples(5), [1e9, 1], "dataset 1 of the mixture has 5 samples and gets 0 of an epoch's 10"),
        (_samples(1, [0]), [1, 1], "dataset 0 of the mixture has 0 samples"),
    ],
)
def test_impossible_mixtures_are_refused(samples: Samples, weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MixtureOrder([samples, _samples(5)], weights)
