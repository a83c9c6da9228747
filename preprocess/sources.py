"""Every dataset by its name: which reader turns it into interactions."""

from pathlib import Path

from evenrank.preprocess.catalog import CATALOG, KuaiRandDataset, PublicDataset
from evenrank.preprocess.download import ensure_raw_files
from evenrank.preprocess.interactions import Interactions
from evenrank.preprocess.kuairand import read_kuairand
from evenrank.preprocess.movielens import read_movielens
from evenrank.preprocess.synthetic import SyntheticConfig, draw_interactions

SYNTHETIC = "synthetic"
DATASETS = (*CATALOG, SYNTHETIC)


def read_source(
    dataset: str, *, raw_dir: Path, synthetic: SyntheticConfig, seed: int, show_progress: bool
) -> Interactions:
    """Open a dataset's raw files, fetching them first if need be; events are read later, as they are asked for.

    Raises:
        DataError: a file is missing, empty, or begins with something else than expected.

    """
    if dataset == SYNTHETIC:
        return draw_interactions(synthetic, seed=seed)
    public = CATALOG[dataset]
    folder = ensure_raw_files(public, raw_dir, show_progress=show_progress)
    if isinstance(public, KuaiRandDataset):
        return read_kuairand(public, folder)
    assert isinstance(public, PublicDataset)
    return read_movielens(public, folder)
