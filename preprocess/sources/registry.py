"""Every dataset by its name: which reader turns it into interactions."""

from pathlib import Path

from evenrank.core.errors import ConfigError
from evenrank.preprocess.sources.catalog import CATALOG, KuaiRandDataset, PublicDataset
from evenrank.preprocess.sources.download import ensure_raw_files
from evenrank.preprocess.sources.interactions import Interactions
from evenrank.preprocess.sources.kuairand import read_kuairand
from evenrank.preprocess.sources.movielens import read_movielens
from evenrank.preprocess.sources.synthetic import SyntheticConfig, draw_interactions
from evenrank.preprocess.sources.tabular import read_tabular
from evenrank.preprocess.sources.tabular_config import TabularConfig

SYNTHETIC = "synthetic"
CUSTOM = "custom"
DATASETS = (*CATALOG, SYNTHETIC, CUSTOM)


def read_source(
    dataset: str,
    *,
    raw_dir: Path,
    synthetic: SyntheticConfig,
    custom: TabularConfig | None,
    seed: int,
    show_progress: bool,
) -> Interactions:
    """Open a dataset's raw files, fetching them first if need be; events are read later, as they are asked for.

    Raises:
        DataError: a file is missing, empty, or begins with something else than expected.
        ConfigError: `custom` is asked for without being described.

    """
    if dataset == CUSTOM:
        if custom is None:
            raise ConfigError("a custom dataset needs to be described; give its files and columns")
        return read_tabular(custom)
    if dataset == SYNTHETIC:
        return draw_interactions(synthetic, seed=seed)
    public = CATALOG[dataset]
    folder = ensure_raw_files(public, raw_dir, show_progress=show_progress)
    if isinstance(public, KuaiRandDataset):
        return read_kuairand(public, folder)
    assert isinstance(public, PublicDataset)
    return read_movielens(public, folder)
