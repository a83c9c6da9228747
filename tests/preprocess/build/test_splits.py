import numpy as np
import pytest

from evenrank.core.errors import ConfigError
from evenrank.preprocess.build.sequences import build_sequences
from evenrank.preprocess.build.splits import SeenItems, parse_split


@pytest.mark.parametrize("text", ["user:0", "user:1", "leave-last:1", "time:0", "time:2015-01-01T00:00Z", "none"])
def test_valid_splits_are_parsed(text: str) -> None:
    assert parse_split(text).has_targets == text.startswith(("leave-last", "time"))


@pytest.mark.parametrize(
    "text", ["", "user", "user:-0.1", "user:nan", "leave-last:0", "leave-last:x", "time:", "time:tomorrow", "nobody"]
)
def test_invalid_splits_raise_an_error_that_lists_the_valid_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid split .*; expected user:FRACTION .*leave-last:N .*time:.* or none"):
        parse_split(text)


def _seen(*batches: list[int]) -> SeenItems:
    seen = SeenItems()
    for items in batches:
        zeros = np.zeros(len(items), dtype=np.int64)
        columns = {"user_id": zeros, "item_id": np.array(items, dtype=np.int64), "timestamp_ms": zeros}
        seen.add(build_sequences({**columns, "action": zeros.astype(np.int32)}, lambda keys: keys)[0])
    return seen


@pytest.mark.parametrize("large", [70_000, 2**20, 2**40])
def test_items_of_one_set_that_are_missing_from_another_are_counted(large: int) -> None:
    first = _seen([1, 2, 2, large], [3, large + 1], [])
    second = _seen([2, 4, large], [5])
    assert first.count_missing_from(second) == 3  # 1, 3 and large + 1
    assert second.count_missing_from(first) == 2  # 4 and 5
    assert first.count_missing_from(first) == 0
    assert SeenItems().count_missing_from(first) == 0
