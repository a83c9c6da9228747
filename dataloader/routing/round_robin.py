"""The rows of a table whose keys are assigned to the ranks round-robin, as long as each has rows left.

With b rows per range, N = f b + l: f ranks have b rows, the next one l < b, and others none. In the first l rounds
f + 1 ranks take a key each, in the others f.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.routing.modes import rows_per_rank

if TYPE_CHECKING:
    from torch import Tensor

Words = TypeVar("Words", NDArray[np.int64], "Tensor")


class RoundRobin(NamedTuple):
    """The bijection between keys and rows, on int64 arrays or tensors of any shape."""

    range_rows: int
    """b."""
    full_ranks: int
    """f."""
    last_rows: int
    """l."""

    @classmethod
    def of(cls, num_embeddings: int, world_size: int) -> "RoundRobin":
        """Return the bijection of a table that is sharded over `world_size` ranks."""
        range_rows = rows_per_rank(num_embeddings, world_size)
        return cls(range_rows, *divmod(num_embeddings, range_rows))

    def rows(self, keys: Words) -> Words:
        """Return the row of each key."""
        late = keys - self._num_early
        early_rows = keys % (self.full_ranks + 1) * self.range_rows + keys // (self.full_ranks + 1)
        late_rows = late % self.full_ranks * self.range_rows + late // self.full_ranks + self.last_rows
        rows: Words = _where(late < 0, early_rows, late_rows)
        return rows

    def keys(self, rows: Words) -> Words:
        """Return the key of each row."""
        rank, turn = rows // self.range_rows, rows % self.range_rows
        late_keys = self._num_early + (turn - self.last_rows) * self.full_ranks + rank
        keys: Words = _where(turn < self.last_rows, turn * (self.full_ranks + 1) + rank, late_keys)
        return keys

    @property
    def _num_early(self) -> int:
        """Keys of the rounds in which f + 1 ranks take part."""
        return self.last_rows * (self.full_ranks + 1)


def _where(condition: Any, values: Any, others: Any) -> Any:
    return np.where(condition, values, others) if isinstance(values, np.ndarray) else values.where(condition, others)
