from .errors import ConfigError as ConfigError
from .errors import DataError as DataError
from .errors import EvenrankError as EvenrankError
from .errors import RankError as RankError
from .errors import StateError as StateError
from .schema import Manifest as Manifest
from .schema import read_manifest as read_manifest
from .store import SequenceStore as SequenceStore
from .store import open_store as open_store

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
