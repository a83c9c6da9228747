"""Sequence Parquet -> samples: the format, the mapped store, the order in which samples come."""

from evenrank.core.errors import ConfigError, DataError, EvenrankError, RankError, StateError
from evenrank.datasets.schema import Manifest, read_manifest
from evenrank.datasets.store import SequenceStore, open_store

__all__ = [
    "ConfigError",
    "DataError",
    "EvenrankError",
    "Manifest",
    "RankError",
    "SequenceStore",
    "StateError",
    "open_store",
    "read_manifest",
]
