"""`SampleLengths`: how long samples are in a batch, known before it is made."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLengths:
    """The lengths of n samples as they are trained: after truncation, in codes of items, with candidates."""

    of_keys: Mapping[tuple[str, str], NDArray[np.int64]]
    """Per field and key of the batch, in its order, int64 [n]."""
    num_candidates: NDArray[np.int64]
    """[n]; zeros for batches without candidates."""
