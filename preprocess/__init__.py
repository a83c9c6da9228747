"""Raw interaction logs -> one row per user, in Parquet."""

from evenrank.preprocess.pipeline import DATASETS, PreprocessConfig, preprocess
from evenrank.preprocess.synthetic import SyntheticConfig

__all__ = ["DATASETS", "PreprocessConfig", "SyntheticConfig", "preprocess"]
