import pickle
from pathlib import Path

import numpy as np
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets import open_store
from evenrank.datasets.distributions import Histogram, parse_distribution


def test_values_are_drawn_as_often_as_they_were_observed() -> None:
    histogram = Histogram.of(np.array([9, 2, 2, 2, 9, 0]))
    assert histogram.values.tolist() == [0, 2, 9]
    assert histogram.counts.tolist() == [1, 3, 2]
    drawn = histogram.sample(np.random.default_rng(0), 60_000)
    assert drawn.dtype == np.int64
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [0, 2, 9]
    assert counts / 60_000 == pytest.approx([1 / 6, 3 / 6, 2 / 6], abs=0.01)
    assert np.array_equal(drawn, pickle.loads(pickle.dumps(histogram)).sample(np.random.default_rng(0), 60_000))


@pytest.mark.parametrize("column", ["length", "item_id", "action", "segment", "user_id"])
def test_a_column_of_a_dataset_becomes_a_distribution(small_dataset: Path, column: str) -> None:
    store = open_store(small_dataset)
    observed = {"length": store.lengths, **store.events, **store.rows}[column]
    histogram = Histogram.read(small_dataset, column)
    assert np.array_equal(np.repeat(histogram.values, histogram.counts), np.sort(observed))
    parsed = parse_distribution(f"histogram:path={small_dataset},column={column},split=train")
    assert repr(parsed) == repr(histogram)
    assert repr(histogram) == (
        f"Histogram(source='{column} of {small_dataset}, train', low={observed.min()}, high={observed.max()}, "
        f"distinct={len(np.unique(observed))}, observations={len(observed)})"
    )


def test_lengths_of_the_train_split_are_the_default(small_dataset: Path) -> None:
    assert repr(parse_distribution(f"histogram:path={small_dataset}")) == repr(Histogram.read(small_dataset, "length"))


def test_a_column_without_a_distribution_is_refused(small_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no column 'genre'; known: length, item_id, action, timestamp_ms, user_id"):
        Histogram.read(small_dataset, "genre")
    with pytest.raises(DataError, match="has no split 'test'; known: eval, train"):
        Histogram.read(small_dataset, split="test")
    with pytest.raises(ConfigError, match="a histogram needs observations of at least 0, got -2"):
        Histogram.of(np.array([3, -2]))
    with pytest.raises(ConfigError, match="a histogram needs observations of at least 0, got none"):
        Histogram.of(np.array([], dtype=np.int64))
    with pytest.raises(ConfigError, match="must ascend from at least 0 and its counts be at least 1"):
        Histogram(values=np.array([2, 1]), counts=np.array([1, 1]))
    with pytest.raises(ConfigError, match="as many counts as values and at least one, got 2 values and 1 counts"):
        Histogram(values=np.array([1, 2]), counts=np.array([1]))
