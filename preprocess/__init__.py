"""Raw interaction logs -> one row per user, in Parquet."""

from evenrank.preprocess.filters import Filters
from evenrank.preprocess.pipeline import PreprocessConfig, preprocess
from evenrank.preprocess.requests import RequestRule
from evenrank.preprocess.sources import DATASETS
from evenrank.preprocess.synthetic import SyntheticConfig
from evenrank.preprocess.tabular_config import TabularConfig

__all__ = ["DATASETS", "Filters", "PreprocessConfig", "RequestRule", "SyntheticConfig", "TabularConfig", "preprocess"]
