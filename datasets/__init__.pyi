from .continuous_log import FolderLog, LogEnd, LogSource, describe_log, rows_of_table
from .event_statistics import Statistics, read_statistics
from .schema import Manifest, read_manifest
from .store import SequenceStore, open_store

__all__ = [
    "FolderLog",
    "LogEnd",
    "LogSource",
    "Manifest",
    "SequenceStore",
    "Statistics",
    "describe_log",
    "open_store",
    "read_manifest",
    "read_statistics",
    "rows_of_table",
]
