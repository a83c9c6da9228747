"""The reader of each dataset: from the dataset's name to its interactions."""

from pathlib import Path

from evenrank.core.errors import ConfigError
from evenrank.preprocess.sources.catalog import CATALOG, CUSTOM, SYNTHETIC, KuaiRandDataset, MovieLensDataset
from evenrank.preprocess.sources.download import ensure_raw_files
from evenrank.preprocess.sources.interactions import Interactions
from evenrank.preprocess.sources.kuairand import read_kuairand
from evenrank.preprocess.sources.movielens import read_movielens
from evenrank.preprocess.sources.synthetic import SyntheticConfig, draw_interactions
from evenrank.preprocess.sources.tabular import read_tabular
from evenrank.preprocess.sources.tabular_config import TabularConfig


def read_source(
    dataset: str,
    *,
    raw_dir: Path,
    synthetic: SyntheticConfig,
    custom: TabularConfig | None,
    seed: int,
    show_progress: bool,
) -> Interactions:
    """Open the raw files of a dataset, downloading them first if they are missing; events are read lazily.

    Raises:
        DataError: a file is missing, empty, or does not start as expected.
        ConfigError: `dataset` is `custom`, and `custom` is None.

    """
    if dataset == CUSTOM:
        if custom is None:
            raise ConfigError("dataset 'custom' has no description; set `custom` to a TabularConfig")
        return read_tabular(custom)
    if dataset == SYNTHETIC:
        return draw_interactions(synthetic, seed=seed)
    public = CATALOG[dataset]
    folder = ensure_raw_files(public, raw_dir, show_progress=show_progress)
    if isinstance(public, KuaiRandDataset):
        return read_kuairand(public, folder)
    assert isinstance(public, MovieLensDataset)
    return read_movielens(public, folder)
