"""The layout of the values of several batches in one array, so that one compiled pass per column fills all of them."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.batch import keyed_jagged_tensor


class Layout:
    """The jagged values of G batches: batch after batch, and key after key within each, as their tensors need them.

    batch_size = 2, lengths {"sex": [1 1 1], "item_id": [2 0 3]}, two batches, the second with one padding row:

        values    s0 s1 | i0 i0 | s2 | i2 i2 i2
                  batch 0       | batch 1

    Args:
        lengths: per key, int64 [n], of the samples in order; each batch takes the next `batch_size` of them.
        batch_size: rows of each batch.
        num_batches: G; rows after the last sample are padding.

    Attributes:
        values: int64 [sum of all lengths], uninitialized.

    """

    def __init__(self, lengths: Mapping[str, NDArray[np.int64]], batch_size: int, num_batches: int) -> None:
        self._keys = list(lengths)
        rows = np.zeros((len(lengths), num_batches * batch_size), dtype=np.int64)
        for index, lengths_of_key in enumerate(lengths.values()):
            rows[index, : len(lengths_of_key)] = lengths_of_key
            self._num_samples = len(lengths_of_key)
        self._lengths = rows.reshape(len(lengths), num_batches, batch_size)
        num_values = self._lengths.sum(axis=2).T  # [G, K]
        self._begins = (np.cumsum(num_values) - num_values.reshape(-1)).reshape(num_values.shape)
        self._num_values: list[list[int]] = num_values.tolist()
        self.values = np.empty(int(num_values.sum()), dtype=np.int64)

    def begins(self, key: str) -> NDArray[np.int64]:
        """Return the index into `values` at which each sample's values of a key begin: int64 [n]."""
        index = self._keys.index(key)
        lengths = self._lengths[index]
        begins: NDArray[np.int64] = np.cumsum(lengths, axis=1) - lengths + self._begins[:, index, np.newaxis]
        return begins.reshape(-1)[: self._num_samples]

    def max_lengths(self) -> list[dict[str, int]]:
        """Return the longest row of each key, per batch."""
        longest = self._lengths.max(axis=2, initial=0).T.tolist()
        return [dict(zip(self._keys, longest_of_batch, strict=True)) for longest_of_batch in longest]

    def num_values(self) -> list[list[int]]:
        """Return the number of values of each key, per batch."""
        return self._num_values

    def tensors(self) -> list[KeyedJaggedTensor]:
        """Return each batch's tensor, a view of `values`."""
        lengths = np.ascontiguousarray(self._lengths.transpose(1, 0, 2))
        values = torch.from_numpy(self.values).split([sum(num_values) for num_values in self._num_values])
        return [
            keyed_jagged_tensor(self._keys, values_of_batch, lengths[batch], length_per_key=self._num_values[batch])
            for batch, values_of_batch in enumerate(values)
        ]
