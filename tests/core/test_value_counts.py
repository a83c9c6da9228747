from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core import value_counts
from evenrank.core.value_counts import ValueCounts, count_values

VALUES = st.integers(-3, 20) | st.sampled_from([-(2**63), -(2**40), 2**40, 2**63 - 1])


@given(st.lists(st.lists(VALUES, max_size=20), max_size=6), st.sampled_from([1, 5, 16, None]))
def test_every_value_is_counted(parts: list[list[int]], num_values: int | None) -> None:
    expected, counts = Counter(chain.from_iterable(parts)), ValueCounts(num_values)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(value_counts, "_PIECE", 3)
        for part in parts:
            counts.add(np.array(part, dtype=np.int64))
        found = counts.result()
    for values, numbers in (found, count_values(np.array([*chain.from_iterable(parts)], dtype=np.int64))):
        assert list(zip(values.tolist(), numbers.tolist(), strict=True)) == sorted(expected.items())
    queries = [-(2**63), -(2**50), -1, 0, 3, 16, 2**40, 2**63 - 1]
    assert counts.count(np.array(queries)).tolist() == [expected[value] for value in queries]


def test_counts_of_more_than_four_billion() -> None:
    counts = ValueCounts()
    counts.add(np.array([7, 7, 9]))
    counts._table[7] = counts._total = (1 << 32) - 1  # as after adding as many sevens
    counts.add(np.array([7, 9]))
    assert [column.tolist() for column in counts.result()] == [[7, 9], [1 << 32, 2]]
