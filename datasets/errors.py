"""The exceptions of `evenrank.core.errors`, re-exported for `evenrank.datasets`."""

from evenrank.core.errors import ConfigError, DataError, EvenrankError, RankError, StateError

__all__ = ["ConfigError", "DataError", "EvenrankError", "RankError", "StateError"]
