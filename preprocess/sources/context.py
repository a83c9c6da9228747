"""Looks up the contextual features of users, while their rows are written."""

import numpy as np
from numpy.typing import NDArray

from evenrank.datasets.schema import USER_ID
from evenrank.preprocess.sources.interactions import Context


class ContextLookup:
    """Finds features by user id; a user without any gets 0, which means missing.

    Attributes:
        names: of the features, in column order.

    """

    def __init__(self, context: Context | None) -> None:
        self.names: tuple[str, ...] = () if context is None else tuple(context.labels)
        users = np.empty(0, dtype=np.int64) if context is None else context.features.get_column(USER_ID).to_numpy()
        order = np.argsort(users, kind="stable")
        self._users: NDArray[np.int64] = users[order]
        self._features = {
            name: context.features.get_column(name).to_numpy()[order] for name in self.names if context is not None
        }
        self._seen = np.zeros(len(users), dtype=bool)

    def of(self, user_ids: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Return the features of users: int64 [users] each."""
        if not len(self._users):
            return {name: np.zeros(len(user_ids), dtype=np.int64) for name in self.names}
        places = np.minimum(np.searchsorted(self._users, user_ids), len(self._users) - 1)
        known = self._users[places] == user_ids
        self._seen[places[known]] = True
        return {name: np.where(known, values[places], 0) for name, values in self._features.items()}

    def count_unseen(self) -> int:
        """Return how many users have features but were never asked for."""
        return int(np.count_nonzero(~self._seen))
