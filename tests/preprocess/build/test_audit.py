import numpy as np
import pytest

from evenrank.preprocess.build.audit import SeenItems
from evenrank.preprocess.build.sequences import build_sequences


def _seen(*batches: list[int]) -> SeenItems:
    seen = SeenItems()
    for items in batches:
        zeros = np.zeros(len(items), dtype=np.int64)
        columns = {"user_id": zeros, "item_id": np.array(items, dtype=np.int64), "timestamp_ms": zeros}
        seen.add(build_sequences({**columns, "action": zeros.astype(np.int32)})[0])
    return seen


@pytest.mark.parametrize("large", [70_000, 2**20, 2**40])
def test_items_of_one_set_that_another_lacks_are_counted(large: int) -> None:
    one = _seen([1, 2, 2, large], [3, large + 1], [])
    other = _seen([2, 4, large], [5])
    assert one.without(other) == 3  # 1, 3 and large + 1
    assert other.without(one) == 2
    assert one.without(one) == 0
    assert SeenItems().without(one) == 0
