"""Raw interaction logs -> one row per user, in Parquet."""

from evenrank.preprocess.build.filters import Filters
from evenrank.preprocess.build.requests import RequestRule
from evenrank.preprocess.pipeline import PreprocessConfig, preprocess
from evenrank.preprocess.sources.registry import DATASETS
from evenrank.preprocess.sources.synthetic import SyntheticConfig
from evenrank.preprocess.sources.tabular_config import TabularConfig

__all__ = ["DATASETS", "Filters", "PreprocessConfig", "RequestRule", "SyntheticConfig", "TabularConfig", "preprocess"]
