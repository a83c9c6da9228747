"""Selecting rows of a KeyedJaggedTensor, over all of its keys."""

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def select_rows(value: KeyedJaggedTensor, rows: NDArray[np.int64]) -> tuple[KeyedJaggedTensor, NDArray[np.int64]]:
    """Return the rows of all K keys, and their lengths on the host; on a GPU, this synchronizes.

    Args:
        value: B rows in each key.
        rows: int64 [n], each in 0..B-1, in any order and number.

    Returns:
        A KeyedJaggedTensor of n rows on the same device, and int64 [K, n].

    """
    device = value.values().device
    lengths = value.lengths()
    all_lengths = lengths.view(len(value.keys()), -1).cpu().numpy().astype(np.int64)
    starts = (np.cumsum(all_lengths) - all_lengths.reshape(-1)).reshape(all_lengths.shape)
    selected = all_lengths[:, rows]
    flat = selected.reshape(-1)
    shifts = np.repeat(starts[:, rows].reshape(-1) - (np.cumsum(flat) - flat), flat)
    indices = torch.from_numpy(shifts + np.arange(len(shifts))).to(device)
    weights = value.weights_or_none()
    length_per_key = selected.sum(axis=1).tolist()
    selected_rows = KeyedJaggedTensor(
        keys=value.keys(),
        values=value.values()[indices],
        weights=None if weights is None else weights[indices],
        lengths=torch.from_numpy(flat).to(lengths),
        stride=len(rows),
        length_per_key=length_per_key,
        offset_per_key=[0, *accumulate(length_per_key)],
    )
    return selected_rows, selected
