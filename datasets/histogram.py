"""The distribution of what a dataset contains: lengths, items, actions or contextual features, by frequency."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.schema import LENGTH, NUM_TARGETS
from evenrank.datasets.store import SequenceStore, open_store


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Histogram:
    """Observed values, each with a probability proportional to how often it was observed."""

    values: NDArray[np.int64]
    """[n]: the values, ascending; none below 0."""
    counts: NDArray[np.int64]
    """[n]: how often each was observed, at least once."""
    source: str = ""
    """Where they were observed, for messages and manifests."""

    def __post_init__(self) -> None:
        if not len(self.values) or len(self.values) != len(self.counts):
            raise ConfigError(
                f"a histogram needs as many counts as values and at least one, got {len(self.values)} values and "
                f"{len(self.counts)} counts"
            )
        if self.values[0] < 0 or (np.diff(self.values) <= 0).any() or self.counts.min() < 1:
            raise ConfigError(
                "the values of a histogram must ascend from at least 0 and its counts be at least 1; use Histogram.of "
                "to count observations"
            )

    @classmethod
    def of(cls, observations: NDArray[np.integer], *, source: str = "") -> Self:
        """Count observations, integers [m] of at least 0.

        Raises:
            ConfigError: there are none, or one is negative.

        """
        values, counts = np.unique(observations, return_counts=True)
        if not len(values) or values[0] < 0:
            actual = f"{values[0]}" if len(values) else "none"
            raise ConfigError(f"a histogram needs observations of at least 0, got {actual}")
        return cls(values=values.astype(np.int64), counts=counts.astype(np.int64), source=source)

    @classmethod
    def read(cls, path: Path | str, column: str = LENGTH, *, split: str = "train") -> Self:
        """Count the values of a column of a dataset.

        Args:
            path: folder of the dataset.
            column: `length` for the number of events per row; a list column, such as `item_id` or `action`, for the
                values of all events; `user_id`, a contextual feature or `num_targets` for one value per row.
            split: name of the split.

        Raises:
            ConfigError: there is no such column, or it has a negative value.
            DataError: the dataset is missing or malformed, or the split has no values.

        """
        store = open_store(path, split)
        observations = _column(store, column, path)
        if not len(observations):
            raise DataError(f"the split {split!r} of {path} has no values of {column!r}; read another split")
        return cls.of(observations, source=f"{column} of {path}, {split}")

    def __repr__(self) -> str:
        return (
            f"Histogram(source={self.source!r}, low={self.values[0]}, high={self.values[-1]}, "
            f"distinct={len(self.values)}, observations={self.counts.sum()})"
        )

    @cached_property
    def _cumulative(self) -> NDArray[np.int64]:
        return np.cumsum(self.counts)

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        observations = rng.integers(0, self._cumulative[-1], size)
        drawn: NDArray[np.int64] = self.values[np.searchsorted(self._cumulative, observations, side="right")]
        return drawn


def _column(store: SequenceStore, name: str, path: Path | str) -> NDArray[np.integer]:
    columns: dict[str, NDArray[np.integer]] = {LENGTH: store.lengths, **store.events, **store.rows}
    if store.num_targets is not None:
        columns[NUM_TARGETS] = store.num_targets
    if name not in columns:
        raise ConfigError(f"{path} has no column {name!r}; known: {', '.join(columns)}")
    return columns[name]
