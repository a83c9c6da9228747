"""`TokenPadding`: totals of tokens rounded up to few, so that `torch.compile` and CUDA graphs see few shapes.

A batch gets a constant number of further padding rows, and all its padding rows share the values that are missing:

    pad_tokens_to = 8, batch_size = 3, num_real = 2      row   0        1    2    3
    item_id, before                                          [7 3 9] [4 5]  [ ]
    item_id, after                                           [7 3 9] [4 5]  [0 0] [0]

Keys of padding rows are related as those of samples: they have what each sample has, such as one user id and one
candidate, and only the rest is rounded up. So keys of the same events get equally many values, in the same rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Valid

JaggedKeys = Sequence[tuple[str, str]]
"""Field and key of each of K keys."""


def _gaps(steps: int | tuple[int, ...]) -> list[int]:
    return [high - low for low, high in pairwise((0, *((steps,) if isinstance(steps, int) else steps)))]


TokenSteps = Annotated[
    int | tuple[int, ...],
    Valid(lambda steps: min(_gaps(steps), default=0) > 0, "a number above 0, or a tuple of such numbers that rise"),
]
"""Totals: the multiples of a number, or these."""


class PaddedKey(NamedTuple):
    """How many values of a key a padding row has: `least` as every sample, up to `most`; None: any number."""

    field: str
    key: str
    least: int
    most: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPadding:
    """Which totals the values beyond `least` of each row have. They are never 0."""

    steps: TokenSteps
    keys: tuple[PaddedKey, ...]
    """Others stay empty in padding rows; where `most` is `least`, nothing is rounded up."""
    of_same_events: bool = False
    """Whether keys get equally many values beyond `least`: what the key with the most of these is missing. Samples with
    fewer candidates than `least` would else count as such with shorter histories."""

    @property
    def rows(self) -> int:
        """Rows that a batch gets: so many that none is longer than `most`, whatever is missing to the next total."""
        gap = max(_gaps(self.steps))
        return -(
            -gap // min((key.most - key.least for key in self.keys if key.most and key.most > key.least), default=gap)
        )

    def within(self, limits: Mapping[tuple[str, str], int]) -> Self:
        """Return the padding where these limits are, by field and key: a transform may have lowered them."""
        keys = []
        for key in self.keys:
            limit = limits.get(key[:2], key.most)
            most = limit if limit is None or key.most is None else min(limit, key.most)
            keys.append(key._replace(least=key.least if most is None else min(key.least, most), most=most))
        return replace(self, keys=tuple(keys))

    def fill(self, jagged_keys: JaggedKeys, lengths: NDArray[np.int64], num_real: int) -> None:
        """Set the lengths of padding rows, given those of all rows, int64 [K, rows]; `num_real` are samples.

        Raises:
            ConfigError: a key has more values than the largest total.
        """
        num_padding, totals = lengths.shape[1] - num_real, dict[PaddedKey, int]()
        for key, of_key in (padded := self._padded(jagged_keys, lengths)):
            of_key[num_real:] = key.least
            if key.most != key.least:
                totals[key] = max(int(of_key[:num_real].sum()) - key.least * num_real, 0)
        if self.of_same_events:
            totals = dict.fromkeys(totals, max(totals.values(), default=0))
        for key, of_key in padded:
            if (total := totals.get(key)) is not None:
                missing = self._total(total, key.key) - total
                of_key[num_real:] += missing // num_padding + (np.arange(num_padding) < missing % num_padding)

    def check(self, jagged_keys: JaggedKeys, lengths: NDArray[np.int64], batch_of: NDArray[np.integer]) -> None:
        """Raise the ConfigError of `fill` for any of several batches, given the number of the batch of each row."""
        for key, of_key in self._padded(jagged_keys, lengths):
            if key.most != key.least:
                self._total(int(np.bincount(batch_of, of_key - key.least).max(initial=0)), key.key)

    def _padded(self, jagged_keys: JaggedKeys, lengths: NDArray[np.int64]) -> list[tuple[PaddedKey, NDArray[np.int64]]]:
        known = {(key.field, key.key): key for key in self.keys}
        return [(known[key], of_key) for key, of_key in zip(jagged_keys, lengths, strict=True) if key in known]

    def _total(self, total: int, key: str) -> int:
        if isinstance(self.steps, int):
            return max(-(-total // self.steps), 1) * self.steps
        if total > self.steps[-1]:
            raise ConfigError(
                f"a rank has {total} values of {key}, but the largest total of pad_tokens_to is {self.steps[-1]}; add "
                "a larger one, or pass max_tokens_per_rank or a smaller batch_size"
            )
        return next(step for step in self.steps if step >= total)
