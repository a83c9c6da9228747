from .build.filters import Filters
from .build.inference_requests import RequestRule
from .config import PreprocessConfig
from .log_config import TabularConfig
from .pipeline import preprocess
from .sources.catalog import DATASETS
from .sources.synthetic import Drift, SyntheticConfig

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
