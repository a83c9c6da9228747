import pytest

from evenrank.core.errors import ConfigError
from evenrank.preprocess.build.splits import parse_split


@pytest.mark.parametrize("text", ["user:0", "user:1", "leave-last:1", "time:0", "time:2015-01-01T00:00Z", "none"])
def test_valid_splits_are_parsed(text: str) -> None:
    assert parse_split(text).has_targets == text.startswith(("leave-last", "time"))


@pytest.mark.parametrize(
    "text", ["", "user", "user:-0.1", "user:nan", "leave-last:0", "leave-last:x", "time:", "time:tomorrow", "nobody"]
)
def test_invalid_splits_raise_an_error_that_lists_the_valid_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid split .*; expected user:FRACTION .*leave-last:N .*time:.* or none"):
        parse_split(text)
