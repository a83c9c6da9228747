from .config import PreprocessConfig
from .log_config import TabularConfig
from .options import Drift, Filters, RequestRule, SyntheticConfig
from .pipeline import preprocess
from .read.public import DATASETS

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
