"""Owners of keys in tensors: by NumPy on the CPU, by a kernel of `triton_bucketize.py` on a GPU.

On a GPU without Triton, PyTorch operators find owners and rows. They lack unsigned division, so it is made of signed
operations.
"""

import torch
from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.routing import gpu_bucketize
from evenrank.dataloader.routing.modes import HASH_MULTIPLIERS, HASH_SHIFT, Routing, owners_and_rows, rows_per_rank

_WORD = 1 << 64


def check_keys(keys: Tensor) -> None:
    """Check the dtype of keys.

    Raises:
        ConfigError: they are not int32 or int64.

    """
    if not isinstance(keys, Tensor):
        raise ConfigError(f"keys must be a NumPy array or a tensor, got {type(keys).__name__}")
    if keys.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"keys must be int32 or int64, got {keys.dtype}")


def owner_of_tensor(keys: Tensor, world_size: int, routing: Routing) -> Tensor:
    """Return the rank that owns each key; see `owner_rank`."""
    check_keys(keys)
    if not keys.is_cuda:
        return owners_and_rows_on_cpu(keys, world_size, routing)[0]
    if gpu_bucketize.HAS_TRITON:
        return gpu_bucketize.owners_with_kernel(keys, world_size, routing)
    return owners_and_rows_with_operators(keys, world_size, routing)[0]


def owners_and_rows_on_cpu(keys: Tensor, world_size: int, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the rank that owns each key, and its row there; see `owners_and_rows_with_operators`."""
    owners, rows = owners_and_rows(keys.numpy(), world_size, routing)
    return torch.from_numpy(owners), torch.from_numpy(rows)


def owners_and_rows_with_operators(keys: Tensor, world_size: int, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the rank that owns each key, and its row there, with operators.

    Args:
        keys: int32 or int64, of any shape, on any device.
        world_size: number of ranks.
        routing: of their table.

    Returns:
        Owners, int64 of the same shape; rows, of the same shape and dtype. In `hash_roundrobin` a row is the key.

    """
    words = keys.to(torch.int64)
    if routing.mode == "hash_roundrobin":
        return _divide_unsigned(_hash_words(words), world_size)[1], keys
    if routing.mode == "continuous" and keys.dtype == torch.int32:
        words = words & 0xFFFFFFFF
    rows, owners = _divide_unsigned(words, world_size)
    if routing.num_embeddings is not None and routing.mode == "continuous":
        ranges, rows_in_range = _divide_unsigned(words, rows_per_rank(routing.num_embeddings, world_size))
        is_in_range = (ranges >= 0) & (ranges < world_size)
        owners = torch.where(is_in_range, ranges, owners)
        rows = torch.where(is_in_range, rows_in_range, rows)
    return owners, rows.to(keys.dtype)


def _hash_words(words: Tensor) -> Tensor:
    """Return the same as `hash_keys`, as int64."""
    words = words ^ _shift_right(words, HASH_SHIFT)
    for multiplier in HASH_MULTIPLIERS:
        words = words * (multiplier - _WORD)  # as int64, which all these are
        words = words ^ _shift_right(words, HASH_SHIFT)
    return words


def _divide_unsigned(words: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    """Return quotient and remainder of words as unsigned; the divisor is below 2^63.

    Half of a word is not negative. Twice the quotient of that is the quotient or one less.
    """
    quotients = (_shift_right(words, 1) // divisor) << 1
    remainders = words - quotients * divisor
    # Below twice the divisor, so at most 2^64 - 4: as int64 they are negative from 2^63.
    is_one_less = (remainders < 0) | (remainders >= divisor)
    return quotients + is_one_less, torch.where(is_one_less, remainders - divisor, remainders)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shift in zeros; `>>` of int64 shifts in the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
