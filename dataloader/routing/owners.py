"""Which rank owns a key, by mode (see `modes.py`): of NumPy arrays, and of tensors."""

from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.routing.modes import Mode, Routing, check_routing, owners_and_rows

if TYPE_CHECKING:
    from torch import Tensor


@overload
def owner_rank(
    keys: NDArray[np.integer[Any]], world_size: int, mode: Mode, num_embeddings: int | None = None
) -> NDArray[np.int64]: ...


@overload
def owner_rank(keys: "Tensor", world_size: int, mode: Mode, num_embeddings: int | None = None) -> "Tensor": ...


def owner_rank(
    keys: "NDArray[np.integer[Any]] | Tensor", world_size: int, mode: Mode, num_embeddings: int | None = None
) -> "NDArray[np.int64] | Tensor":
    """Return the rank that owns each key.

    Args:
        keys: integers of any shape: a NumPy array, or a tensor of int32 or int64 on any device.
        world_size: number of ranks.
        mode: one of MODES.
        num_embeddings: rows of the table; `continuous` needs it.

    Returns:
        int64 of the same shape, in 0..world_size-1; for a tensor a tensor on the same device.

    Raises:
        ConfigError: the mode is unknown, an argument is missing or out of range, or keys are no integers.

    """
    check_routing(world_size, mode, num_embeddings)
    routing = Routing(mode=mode, num_embeddings=num_embeddings)
    if isinstance(keys, np.ndarray):
        return owners_and_rows(keys, world_size, routing)[0]
    # Imported here, because torch takes seconds to import and those who have NumPy arrays may not have it.
    from evenrank.dataloader.routing.tensor_owners import owner_of_tensor

    return owner_of_tensor(keys, world_size, routing)
