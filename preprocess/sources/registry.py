"""The reader of each dataset: from the dataset's name to its interactions."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import USER_ID
from evenrank.preprocess.sources.catalog import CATALOG, CUSTOM, SYNTHETIC, KuaiRandDataset, MovieLensDataset
from evenrank.preprocess.sources.custom import TabularConfig, read_tabular
from evenrank.preprocess.sources.download import ensure_raw_files
from evenrank.preprocess.sources.interactions import Context, Interactions
from evenrank.preprocess.sources.kuairand import read_kuairand
from evenrank.preprocess.sources.movielens import read_movielens
from evenrank.preprocess.sources.synthetic import SyntheticConfig, draw_interactions


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


# Lookup of the users' contextual features while their rows are written.


class ContextLookup:
    """Look up features by user id; a user without features gets 0, the id of a missing value.

    Attributes:
        names: names of the features, in column order.

    """

    def __init__(self, context: Context | None) -> None:
        self.names: tuple[str, ...] = () if context is None else tuple(context.labels)
        users = np.empty(0, dtype=np.int64) if context is None else context.features.get_column(USER_ID).to_numpy()
        order = np.argsort(users, kind="stable")
        self._users: NDArray[np.int64] = users[order]
        self._features = {
            name: context.features.get_column(name).to_numpy()[order] for name in self.names if context is not None
        }
        self._requested = np.zeros(len(users), dtype=bool)

    def lookup(self, user_ids: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Return each feature of the given users: int64 [users]."""
        if not len(self._users):
            return {name: np.zeros(len(user_ids), dtype=np.int64) for name in self.names}
        positions = np.minimum(np.searchsorted(self._users, user_ids), len(self._users) - 1)
        is_known = self._users[positions] == user_ids
        self._requested[positions[is_known]] = True
        return {name: np.where(is_known, values[positions], 0) for name, values in self._features.items()}

    def count_unrequested(self) -> int:
        """Return the number of users that have features and were never looked up."""
        return int(np.count_nonzero(~self._requested))
