"""`LossKey`: which values of a batch are loss tokens, and counting them from lengths."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError


class LossKey(NamedTuple):
    """The jagged key whose lengths count the loss tokens of a batch."""

    field: str
    """Name of a KeyedJaggedTensor of the batch."""

    key: str
    """One of its keys."""

    skip: int = 0
    """Leading tokens of each row that have no loss, 0 or 1. It is 1 where tokens are predicted from their predecessors,
    because the first token of a row has none."""


def loss_tokens(
    loss_key: LossKey | None, lengths: Mapping[tuple[str, str], NDArray[np.int64]], is_real: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the loss tokens of each row: max(length - skip, 0), or 1 without a key; 0 for padding.

    Args:
        loss_key: what `JaggedBatch.loss_key` returns.
        lengths: per field and key, int64 of any shape.
        is_real: which rows are samples, of the same shape.

    Returns:
        int64 of the same shape.

    """
    if loss_key is None:
        return is_real.astype(np.int64)
    return np.where(is_real, np.maximum(lengths[loss_key.field, loss_key.key] - loss_key.skip, 0), 0)


def check_loss_key(loss_key: LossKey | None, jagged_keys: Collection[tuple[str, str]]) -> None:
    """Check a loss key, given the fields and keys of the batch.

    Raises:
        ConfigError: it is not a LossKey, or none of the batch's.

    """
    if loss_key is None:
        return
    if not isinstance(loss_key, LossKey) or loss_key.skip not in (0, 1):
        raise ConfigError(f"the loss key must be a LossKey with a skip of 0 or 1, or None; got {loss_key!r}")
    if (loss_key.field, loss_key.key) not in jagged_keys:
        known = ", ".join(f"{field}.{key}" for field, key in jagged_keys) or "none"
        raise ConfigError(f"the batch has no {loss_key}; its jagged keys are {known}")
