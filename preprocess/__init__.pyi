from .build.filters import Filters as Filters
from .build.inference_requests import RequestRule as RequestRule
from .config import PreprocessConfig as PreprocessConfig
from .log_config import TabularConfig as TabularConfig
from .pipeline import preprocess as preprocess
from .sources.catalog import DATASETS as DATASETS
from .sources.synthetic import Drift as Drift
from .sources.synthetic import SyntheticConfig as SyntheticConfig

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
