from .continuous_log import FolderLog, LogEnd, LogSource, describe_log, rows_of_table
from .event_statistics import Statistics, read_statistics
from .order import ORDERS, Order, SampleOrder, permute, register_order
from .schema import Manifest, read_manifest
from .store import SequenceStore, open_store
from .vectors import open_vectors

__all__ = [
    "ORDERS",
    "FolderLog",
    "LogEnd",
    "LogSource",
    "Manifest",
    "Order",
    "SampleOrder",
    "SequenceStore",
    "Statistics",
    "describe_log",
    "open_store",
    "open_vectors",
    "permute",
    "read_manifest",
    "read_statistics",
    "register_order",
    "rows_of_table",
]
