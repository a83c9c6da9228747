"""`TokenPadding`: totals of tokens rounded up to few, so that `torch.compile` and CUDA graphs see few shapes.

A batch gets a constant number of further padding rows, and all its padding rows share the values that are missing:

    pad_tokens_to = 8, batch_size = 3, num_real = 2      row   0        1    2    3
    item_id, before                                          [7 3 9] [4 5]  [ ]
    item_id, after                                           [7 3 9] [4 5]  [0 0] [0]

In each padding row, keys are related as in a sample with a shorter history: what every sample has, such as one user id
and one candidate, padding rows have too, and only the rest is rounded up. So keys of the same events get equally many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Valid


def _ascends(steps: int | tuple[int, ...]) -> bool:
    of_all = steps if isinstance(steps, tuple) else (steps,)
    return len(of_all) > 0 and all(low < high for low, high in pairwise((0, *of_all)))


TokenSteps = Annotated[int | tuple[int, ...], Valid(_ascends, "a number above 0, or a tuple of such numbers that rise")]
"""Totals: the multiples of a number, or these."""


class PaddedKey(NamedTuple):
    """How many values of a key a padding row may have."""

    field: str
    key: str
    least: int
    """What every padding row has, as every sample: for a key of events, its candidates."""
    most: int | None
    """The key's length limit; None: any number. If it is `least`, nothing is rounded up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPadding:
    """Which totals the keys of a batch have. Totals are of values beyond `least` in each row, and never 0."""

    steps: TokenSteps
    keys: tuple[PaddedKey, ...]
    """Others stay empty in padding rows."""

    @property
    def rows(self) -> int:
        """Rows that a batch gets: so many that none is longer than its limit, whatever is missing to the next total."""
        steps = (self.steps,) if isinstance(self.steps, int) else self.steps
        missing = max(high - low for low, high in pairwise((0, *steps)))
        room = [key.most - key.least for key in self.keys if key.most is not None and key.most > key.least]
        return -(-missing // min(room, default=missing))

    def fill(self, jagged_keys: Sequence[tuple[str, str]], lengths: NDArray[np.int64], num_real: int) -> None:
        """Set the lengths of the padding rows, given those of K keys, int64 [K, rows], of which `num_real` are samples.

        Raises:
            ConfigError: a key has more values than the largest total.
        """
        keys, num_padding = {(key.field, key.key): key for key in self.keys}, lengths.shape[1] - num_real
        for of_key, key in zip(lengths, map(keys.get, jagged_keys), strict=True):
            if key is not None:
                of_key[num_real:] = key.least
                if key.most != key.least:
                    total = max(int(of_key[:num_real].sum()) - key.least * num_real, 0)
                    missing = self._total(total, key.key) - total
                    of_key[num_real:] += missing // num_padding + (np.arange(num_padding) < missing % num_padding)

    def check(
        self, jagged_keys: Sequence[tuple[str, str]], lengths: NDArray[np.int64], batch_of: NDArray[np.integer]
    ) -> None:
        """Raise the ConfigError of `fill` if one of many batches, which has the rows of its number, would."""
        keys = {(key.field, key.key): key for key in self.keys}
        for of_key, key in zip(lengths, map(keys.get, jagged_keys), strict=True):
            if key is not None and key.most != key.least:
                self._total(int(np.bincount(batch_of, of_key - key.least).max(initial=0)), key.key)

    def _total(self, total: int, key: str) -> int:
        if isinstance(self.steps, int):
            return max(-(-total // self.steps), 1) * self.steps
        if total > self.steps[-1]:
            raise ConfigError(
                f"a rank has {total} values of {key}, but the largest total of pad_tokens_to is {self.steps[-1]}; add "
                "a larger one, or pass max_tokens_per_rank or a smaller batch_size"
            )
        return next(step for step in self.steps if step >= total)
