from .schema import Manifest as Manifest
from .schema import read_manifest as read_manifest
from .store import SequenceStore as SequenceStore
from .store import open_store as open_store

__all__ = ["Manifest", "SequenceStore", "open_store", "read_manifest"]
