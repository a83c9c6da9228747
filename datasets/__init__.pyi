from .event_statistics import Statistics as Statistics
from .event_statistics import read_statistics as read_statistics
from .schema import Manifest as Manifest
from .schema import read_manifest as read_manifest
from .store import SequenceStore as SequenceStore
from .store import open_store as open_store

__all__ = ["Manifest", "SequenceStore", "Statistics", "open_store", "read_manifest", "read_statistics"]
