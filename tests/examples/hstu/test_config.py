"""Settings that no model can have."""

import pytest

from evenrank.core.errors import ConfigError
from hstu.config import HSTUConfig


def test_a_single_feature_in_place_of_a_tuple_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a tuple of features, got 'user_id'; add a comma behind it"):
        HSTUConfig(max_length=10, contextual="user_id")  # type: ignore[arg-type]
