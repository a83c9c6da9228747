"""The keys of a KeyedJaggedTensor: replaced by rows of tables, or grouped by the rank that owns them."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.core.numba_cache import compiled
from evenrank.dataloader.routing import gpu_bucketize
from evenrank.dataloader.routing.key_map import KeyMap, Routing, check_routing
from evenrank.dataloader.routing.owners import owners_and_rows


def map_features(features: KeyedJaggedTensor, key_maps: Mapping[str, KeyMap]) -> KeyedJaggedTensor:
    """Return the same features with the rows of tables instead of keys, for batches of other loaders.

    On a GPU this waits for the device, because it checks the keys; map on the CPU, where batches are made.

    Args:
        features: with integer values.
        key_maps: of some of its features, by name.

    Raises:
        ConfigError: there is no such feature, or its dtype cannot hold all rows.
        DataError: a key is not in the table.
    """
    names, varies = features.keys(), features.variable_stride_per_key()
    if unknown := [name for name in key_maps if name not in names]:
        raise ConfigError(f"key_maps has {unknown[0]!r}, which is no feature; there are {', '.join(names)}")
    ends = features.offset_per_key()
    values = features.values().clone()
    for name, (begin, end) in zip(names, pairwise(ends), strict=True):
        if name in key_maps:
            values[begin:end] = key_maps[name](values[begin:end])
    return KeyedJaggedTensor(
        keys=names,
        values=values,
        weights=features.weights_or_none(),
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        stride=None if varies else features.stride(),
        length_per_key=features.length_per_key(),
        offset_per_key=ends,
        inverse_indices=features.inverse_indices_or_none(),
    )


def bucketize(
    kjt: KeyedJaggedTensor, world_size: int, routings: Mapping[str, Routing], *, bucketize_pos: bool = False
) -> tuple[KeyedJaggedTensor, Tensor]:
    """Group values by the rank that owns them: by (rank, key, row), and in their order within these.

    Equals TorchRec's `bucketize_kjt_before_all2all` with `output_permute=True`, which knows the mode
    `continuous` only. For two ranks, one key and two rows in mode `roundrobin`:

        values          [5 2 7 | 9 4]
        of rank 0       [    1 |   2]    2 and 4 are its rows 1 and 2
        of rank 1       [2   3 | 4  ]
        bucketized      [1 | 2 | 2 3 | 4]
        permutation     [2 0 3 4 1]

    On a GPU it does not wait for the device, except the first time with these routings; without Triton, the CPU groups.

    Args:
        kjt: int32 or int64 values, [n]; the same stride for all K keys, B.
        world_size: number of ranks, W.
        routings: by key; may have others.
        bucketize_pos: replace the weights by each value's index in its original row, of the values' dtype.

    Returns:
        The values as rows of the owner's shard, with their weights and with lengths [W * K * B]; its keys are those of
        `kjt`, W times. In mode `hash_roundrobin` values stay keys, because a shard has to be a hash table there.
        And the permutation for which `bucketized.values()[permutation]` is in the original order: int64 [n].

    Raises:
        ConfigError: a key has no routing, strides vary, values are no integers, `world_size` is out of range, or
            positions would replace weights.
    """
    _check(kjt, world_size, routings, bucketize_pos)
    features = tuple(routings[name] for name in kjt.keys())  # noqa: SIM118
    weights = kjt.weights_or_none()
    weights = None if weights is None else weights.detach().contiguous()
    keys, lengths, offsets = kjt.values().contiguous(), kjt.lengths().view(-1), kjt.offsets()
    if keys.is_cuda and gpu_bucketize.HAS_TRITON:
        new_lengths, rows, extra, permutation = gpu_bucketize.bucketize_with_kernels(
            keys, lengths, offsets, features, world_size, weights=weights, positions=bucketize_pos
        )
    else:
        host_keys = keys.cpu().numpy()
        owners, owned_rows = np.empty(len(keys), dtype=np.int64), np.empty_like(host_keys)
        for (begin, end), routing in zip(pairwise(kjt.offset_per_key()), features, strict=True):
            owners[begin:end], owned_rows[begin:end] = owners_and_rows(host_keys[begin:end], world_size, routing)
        grouped_lengths, places = _group(owners, lengths.long().cpu().numpy(), world_size)
        new_lengths = torch.from_numpy(grouped_lengths).to(lengths)
        permutation = torch.from_numpy(places).to(keys.device)
        rows = torch.empty_like(keys).index_copy_(0, permutation, torch.from_numpy(owned_rows).to(keys.device))
        extra = weights
        if bucketize_pos:
            starts = torch.repeat_interleave(offsets[:-1], lengths, output_size=len(keys))
            extra = (torch.arange(len(keys), device=keys.device) - starts).to(keys.dtype)
        if extra is not None:
            extra = torch.empty_like(extra).index_copy_(0, permutation, extra)
    bucketized = KeyedJaggedTensor(
        keys=kjt.keys() * world_size, values=rows, weights=extra, lengths=new_lengths, stride=kjt.stride()
    )
    return bucketized, permutation


def _check(kjt: KeyedJaggedTensor, world_size: int, routings: Mapping[str, Routing], bucketize_pos: bool) -> None:
    check_routing(world_size, "roundrobin", None)
    gpu_bucketize.check_keys(kjt.values())
    if missing := sorted(set(kjt.keys()) - set(routings)):
        raise ConfigError(f"key {missing[0]!r} has no routing; give one for every key, there are {sorted(routings)}")
    if kjt.variable_stride_per_key():
        raise ConfigError(
            f"bucketize needs the same stride for all keys, got {kjt.stride_per_key()}; bucketize such keys one by one"
        )
    if bucketize_pos and kjt.weights_or_none() is not None:
        raise ConfigError("bucketize_pos=True would replace the weights of the batch; drop either of them")


@compiled
def _group(
    owners: NDArray[np.int64], lengths: NDArray[np.int64], world_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group keys by (rank, row): return the lengths [W * R] of groups, and the place of each key [n]."""
    new_lengths = np.zeros(world_size * len(lengths), np.int64)
    key = 0
    for row in range(len(lengths)):
        for _ in range(lengths[row]):
            new_lengths[owners[key] * len(lengths) + row] += 1
            key += 1
    places = np.cumsum(new_lengths) - new_lengths  # of the next key of each group
    permutation = np.empty(len(owners), np.int64)
    key = 0
    for row in range(len(lengths)):
        for _ in range(lengths[row]):
            group = owners[key] * len(lengths) + row
            permutation[key] = places[group]
            places[group] += 1
            key += 1
    return new_lengths, permutation
