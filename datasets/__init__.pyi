from .continuous_log import FolderLog as FolderLog
from .continuous_log import LogEnd as LogEnd
from .continuous_log import LogSource as LogSource
from .continuous_log import describe_log as describe_log
from .continuous_log import rows_of_table as rows_of_table
from .event_statistics import Statistics as Statistics
from .event_statistics import read_statistics as read_statistics
from .schema import Manifest as Manifest
from .schema import read_manifest as read_manifest
from .store import SequenceStore as SequenceStore
from .store import open_store as open_store

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
