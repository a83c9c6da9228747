"""`KeyMap`: which row of a table has which key, so that patterns of keys spread over TorchRec's ranges of rows.

TorchRec's row-wise sharding gives rank r the rows r b .. r b + b - 1 of a table of N rows, b = ceil(N / W). With 10
rows and 4 ranks, b = 3:

    rank              0          1          2         3
    row               0  1  2    3  4  5    6  7  8   9
    key, continuous   0  1  2    3  4  5    6  7  8   9
    key, roundrobin   0  4  7    1  5  8    2  6  9   3
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.routing.modes import Mode, check_routing
from evenrank.dataloader.routing.table_permutation import CONSTANTS, Permutation, RoundRobin

if TYPE_CHECKING:
    from torch import Tensor

Integers = TypeVar("Integers", "NDArray[Any]", "Tensor")

_MAX_ROWS = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyMap:
    """A bijection from the keys of a table to its rows, both 0..num_embeddings-1.

    Raises:
        ConfigError: a field is out of range.

    """

    num_embeddings: int
    """Rows of the table, N, at most 2^62."""
    world_size: int
    """Number of ranks that the table is sharded over, W. Only `roundrobin` depends on it."""
    mode: Mode
    """`continuous`: row k has key k, as without a map. `roundrobin`: key k is on rank k % W; where N is no multiple of
    W, the last ranks have fewer rows or none, and further keys go round the others. `hash_roundrobin`: a pseudo-random
    permutation, which gives each rank a random sample of any pattern of keys.
    """

    def __post_init__(self) -> None:
        check_routing(self.world_size, self.mode, self.num_embeddings)
        if self.num_embeddings is None or self.num_embeddings > _MAX_ROWS:
            raise ConfigError(
                f"num_embeddings of a KeyMap must be an integer from 1 to 2^62, got {self.num_embeddings}"
            )

    def __call__(self, keys: Integers) -> Integers:
        """Return the row of each key.

        Args:
            keys: integers of any shape, a NumPy array or a tensor on any device.

        Returns:
            Integers of the same shape and dtype, of the same kind, on the same device.

        Raises:
            ConfigError: the dtype cannot hold all rows.
            DataError: a key is not in 0..num_embeddings-1.

        """
        self._check(keys, "key")
        rows: Integers = self._on_words(self._bijection().rows, keys)
        return rows

    def inverse(self, rows: Integers) -> Integers:
        """Return the keys of these rows: those of all rows name the rows of a table that is exported.

        Args:
            rows: as the keys above.

        Returns:
            As above.

        Raises:
            ConfigError: the dtype cannot hold all keys.
            DataError: a row is not in 0..num_embeddings-1.

        """
        self._check(rows, "row")
        keys: Integers = self._on_words(self._bijection().keys, rows)
        return keys

    @property
    def is_identity(self) -> bool:
        """Whether each key is its own row."""
        return self.mode == "continuous"

    def describe(self) -> dict[str, Any]:
        """Return what checkpoints of the table say about it: plain values that JSON can hold."""
        known: dict[str, Any] = {"mode": self.mode, "num_embeddings": self.num_embeddings}
        if self.mode == "roundrobin":
            known["world_size"] = self.world_size
        if self.mode == "hash_roundrobin":
            known["constants"] = list(CONSTANTS)
        return known

    def _bijection(self) -> RoundRobin | Permutation:
        if self.mode == "roundrobin":
            return RoundRobin.of(self.num_embeddings, self.world_size)
        return Permutation.of(self.num_embeddings)

    def _on_words(self, function: Callable[[Any], Any], values: Any) -> Any:
        """Apply a function of int64 arrays or tensors; it is compiled for arrays, so tensors on the CPU become ones."""
        if self.is_identity:
            return values
        if isinstance(values, np.ndarray):
            words = function(values.reshape(-1).astype(np.int64, copy=False))
            return words.astype(values.dtype, copy=False).reshape(values.shape)
        if values.device.type == "cpu":
            return values.new_tensor(function(values.long().numpy().reshape(-1))).reshape(values.shape)
        return function(values.long()).to(values.dtype)

    def _check(self, values: Any, kind: str) -> None:
        is_array = isinstance(values, np.ndarray)
        limit = _largest_value(values)
        if limit is None:
            raise ConfigError(
                f"{kind}s must be an array of integers or a tensor of signed integers, got "
                f"{getattr(values, 'dtype', type(values).__name__)}; convert them to an array or a tensor of int64"
            )
        if self.num_embeddings - 1 > limit:
            raise ConfigError(
                f"the {kind}s of a table with num_embeddings={self.num_embeddings} can be larger than {values.dtype} "
                "holds; convert them to int64"
            )
        if not (values.size if is_array else values.numel()):
            return
        least, greatest = int(values.min()), int(values.max())
        if least < 0 or greatest >= self.num_embeddings:
            raise DataError(
                f"the {kind}s of a table with num_embeddings={self.num_embeddings} are 0 to {self.num_embeddings - 1}, "
                f"got {least if least < 0 else greatest}; set num_embeddings to the largest key + 1"
            )


def _largest_value(values: Any) -> int | None:
    """Return the largest value of the dtype; None for anything but arrays of integers and tensors of signed ones."""
    if isinstance(values, np.ndarray):
        return np.iinfo(values.dtype).max if values.dtype.kind in "iu" else None
    import torch  # not installed where arrays alone are mapped

    if not isinstance(values, torch.Tensor):
        return None
    is_signed_integer = values.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    return torch.iinfo(values.dtype).max if is_signed_integer else None
