from .config import PreprocessConfig
from .log_config import TabularConfig
from .options import Drift, Filters, RequestRule, SyntheticConfig
from .read.public import DATASETS
from .run import preprocess

__all__ = [
    "DATASETS",
    "Drift",
    "Filters",
    "PreprocessConfig",
    "RequestRule",
    "SyntheticConfig",
    "TabularConfig",
    "preprocess",
]
