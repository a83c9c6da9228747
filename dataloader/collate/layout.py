"""Where the values of several batches lie in one array, so that one compiled pass fills them all."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.batch import keyed_jagged_tensor


class Layout:
    """The jagged values of G batches: batch after batch, and within each key after key, as their tensors need them.

    batch_size = 2, lengths {"sex": [1 1 1], "item_id": [2 0 3]}, two batches of which the second has a row of padding:

        values    s0 s1 | i0 i0 | s2 | i2 i2 i2
                  batch 0       | batch 1

    Args:
        lengths: per key, int64 [n], of the samples in order; each batch takes `batch_size` of them, while they last.
        batch_size: rows of each batch.
        num_batches: G; those behind the last sample are all padding.

    Attributes:
        values: int64 [sum of all lengths], to be filled.

    """

    def __init__(self, lengths: Mapping[str, NDArray[np.int64]], batch_size: int, num_batches: int) -> None:
        self._keys = list(lengths)
        rows = np.zeros((len(lengths), num_batches * batch_size), dtype=np.int64)
        for index, of_key in enumerate(lengths.values()):
            rows[index, : len(of_key)] = of_key
            self._count = len(of_key)
        self._lengths = rows.reshape(len(lengths), num_batches, batch_size)
        sizes = self._lengths.sum(axis=2).T  # [G, K]
        self._starts = (np.cumsum(sizes) - sizes.reshape(-1)).reshape(sizes.shape)
        self._sizes: list[list[int]] = sizes.tolist()
        self.values = np.empty(int(sizes.sum()), dtype=np.int64)

    def places(self, key: str) -> NDArray[np.int64]:
        """Return where the values of each sample begin: int64 [n]."""
        index = self._keys.index(key)
        of_key = self._lengths[index]
        places: NDArray[np.int64] = np.cumsum(of_key, axis=1) - of_key + self._starts[:, index, np.newaxis]
        return places.reshape(-1)[: self._count]

    def max_lengths(self) -> list[dict[str, int]]:
        """Return for each batch the longest row of each key."""
        longest = self._lengths.max(axis=2, initial=0).T.tolist()
        return [dict(zip(self._keys, of_batch, strict=True)) for of_batch in longest]

    def num_values(self) -> list[list[int]]:
        """Return for each batch the number of values of each key."""
        return self._sizes

    def tensors(self) -> list[KeyedJaggedTensor]:
        """Return each batch's tensor, a view of `values`."""
        lengths = np.ascontiguousarray(self._lengths.transpose(1, 0, 2))
        values = torch.from_numpy(self.values).split([sum(sizes) for sizes in self._sizes])
        return [
            keyed_jagged_tensor(self._keys, of_batch, lengths[number], length_per_key=self._sizes[number])
            for number, of_batch in enumerate(values)
        ]
