from .config import Filters, PreprocessConfig, RequestRule
from .log_config import Drift, SyntheticConfig, TabularConfig
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
