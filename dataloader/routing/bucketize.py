"""Group the keys of a batch by the rank that owns them, as row-wise sharded tables need them before an all-to-all."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.core.numba_cache import compiled
from evenrank.dataloader.routing import gpu_bucketize
from evenrank.dataloader.routing.modes import Routing, check_routing
from evenrank.dataloader.routing.tensor_owners import check_keys, owners_and_rows_on_cpu, owners_and_rows_with_operators


def bucketize(
    kjt: KeyedJaggedTensor, world_size: int, routings: Mapping[str, Routing], *, bucketize_pos: bool = False
) -> tuple[KeyedJaggedTensor, Tensor]:
    """Group values by the rank that owns them: by (rank, key, row), and in their order within these.

    Returns what TorchRec's `bucketize_kjt_before_all2all` returns with `output_permute=True`, which knows the mode
    `continuous` only. For two ranks, one key and two rows in mode `roundrobin`:

        values          [5 2 7 | 9 4]
        of rank 0       [    1 |   2]    2 and 4 are its rows 1 and 2
        of rank 1       [2   3 | 4  ]
        bucketized      [1 | 2 | 2 3 | 4]
        permutation     [2 0 3 4 1]

    On a GPU with Triton it does not wait for the device, except the first time with these routings.

    Args:
        kjt: int32 or int64 values, [n]; the same stride for all K keys, B.
        world_size: number of ranks, W.
        routings: of each key; may have others.
        bucketize_pos: replace the weights by each value's index in its original row, of the values' dtype.

    Returns:
        The values as rows of the owner's shard, with their weights and with lengths [W * K * B]; its keys are those of
        `kjt`, W times. In mode `hash_roundrobin` values stay keys, because a shard has to be a hash table there.
        And the permutation for which `bucketized.values()[permutation]` is in the original order: int64 [n].

    Raises:
        ConfigError: a key has no routing, strides vary, values are no integers, `world_size` is out of range, or
            positions would replace weights.

    """
    features, weights = _check(kjt, world_size, routings, bucketize_pos)
    keys, lengths, offsets = kjt.values().contiguous(), kjt.lengths().view(-1), kjt.offsets()
    if keys.is_cuda and gpu_bucketize.HAS_TRITON:
        new_lengths, rows, extra, permutation = gpu_bucketize.bucketize_with_kernels(
            keys, lengths, offsets, features, world_size, weights=weights, positions=bucketize_pos
        )
    else:
        owners, rows = _find_owners(keys, kjt.length_per_key(), features, world_size)
        group = group_with_operators if keys.is_cuda else group_on_cpu
        new_lengths, permutation = group(owners, lengths, world_size)
        rows = torch.empty_like(rows).index_copy_(0, permutation, rows)
        extra = _positions(lengths, offsets, keys) if bucketize_pos else weights
        if extra is not None:
            extra = torch.empty_like(extra).index_copy_(0, permutation, extra)
    bucketized = KeyedJaggedTensor(
        keys=kjt.keys() * world_size, values=rows, weights=extra, lengths=new_lengths, stride=kjt.stride()
    )
    return bucketized, permutation


def _check(
    kjt: KeyedJaggedTensor, world_size: int, routings: Mapping[str, Routing], bucketize_pos: bool
) -> tuple[tuple[Routing, ...], Tensor | None]:
    """Return the routings in the order of the keys, and the weights, after checking all arguments."""
    check_routing(world_size, "roundrobin", None)
    check_keys(kjt.values())
    if missing := sorted(set(kjt.keys()) - set(routings)):
        raise ConfigError(f"key {missing[0]!r} has no routing; give one for every key, there are {sorted(routings)}")
    if kjt.variable_stride_per_key():
        raise ConfigError(
            f"bucketize needs the same stride for all keys, got {kjt.stride_per_key()}; bucketize such keys one by one"
        )
    weights = kjt.weights_or_none()
    if bucketize_pos and weights is not None:
        raise ConfigError("bucketize_pos=True would replace the weights of the batch; drop either of them")
    features = tuple(map(routings.__getitem__, kjt.keys()))
    return features, None if weights is None else weights.detach().contiguous()


def _find_owners(
    keys: Tensor, sizes: list[int], features: tuple[Routing, ...], world_size: int
) -> tuple[Tensor, Tensor]:
    """Return the owner of each key, int64 [n], and its row there, of the keys' dtype [n]; `sizes` are of features."""
    owners, rows = torch.empty_like(keys, dtype=torch.int64), torch.empty_like(keys)
    find = owners_and_rows_with_operators if keys.is_cuda else owners_and_rows_on_cpu
    start = 0
    for size, routing in zip(sizes, features, strict=True):
        part = slice(start, start + size)
        owners[part], rows[part] = find(keys[part], world_size, routing)
        start += size
    return owners, rows


def _positions(lengths: Tensor, offsets: Tensor, keys: Tensor) -> Tensor:
    """Return each key's index in its row: [n], of the keys' dtype."""
    starts = torch.repeat_interleave(offsets[:-1], lengths, output_size=len(keys))
    return (torch.arange(len(keys), device=keys.device) - starts).to(keys.dtype)


def group_with_operators(owners: Tensor, lengths: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """Group keys by (rank, row) with PyTorch operators, on any device.

    Args:
        owners: int64 [n], of each key.
        lengths: integers [R], keys of each row.
        world_size: number of ranks, W.

    Returns:
        Lengths [W * R] of the same dtype, and where each key goes: int64 [n].

    """
    num_rows, num_keys = len(lengths), len(owners)
    row = torch.repeat_interleave(torch.arange(num_rows, device=owners.device), lengths, output_size=num_keys)
    groups = owners * num_rows + row
    order = torch.argsort(groups, stable=True)
    permutation = torch.empty_like(order).index_copy_(0, order, torch.arange(num_keys, device=owners.device))
    new_lengths = torch.zeros(world_size * num_rows, dtype=lengths.dtype, device=owners.device)
    return new_lengths.index_add_(0, groups, torch.ones_like(groups, dtype=lengths.dtype)), permutation


def group_on_cpu(owners: Tensor, lengths: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """Group keys by (rank, row) with a compiled loop; the same as `group_with_operators`."""
    new_lengths, permutation = _group(owners.numpy(), lengths.to(torch.int64).numpy(), world_size)
    return torch.from_numpy(new_lengths).to(lengths.dtype), torch.from_numpy(permutation)


@compiled
def _group(
    owners: NDArray[np.int64], lengths: NDArray[np.int64], world_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    new_lengths = np.zeros(world_size * len(lengths), np.int64)
    key = 0
    for row in range(len(lengths)):
        for _ in range(lengths[row]):
            new_lengths[owners[key] * len(lengths) + row] += 1
            key += 1
    places = np.empty(len(new_lengths), np.int64)  # of the next key of each group
    end = 0
    for group in range(len(new_lengths)):
        places[group] = end
        end += new_lengths[group]
    permutation = np.empty(len(owners), np.int64)
    key = 0
    for row in range(len(lengths)):
        for _ in range(lengths[row]):
            group = owners[key] * len(lengths) + row
            permutation[key] = places[group]
            places[group] += 1
            key += 1
    return new_lengths, permutation
