"""Routing on a GPU: Triton kernels for the owners of keys, and for grouping the keys of a batch by owner.

A batch is grouped by two kernels, with a prefix sum between them. The first counts the keys of each group, (rank, row),
and gives every key its place in the group; the second moves keys to where groups start, all of them in parallel. The
first has a program per tile of adjacent rows of one feature, and goes through these in chunks: through one row in long
chunks, or through several short ones at once. In a chunk, the place of a key is the number of keys before it with the
same owner. For that all pairs of keys are compared, which takes as long for 64 ranks as for two.

Nothing here waits for the GPU, except the first call with routings that have not been uploaded yet.
"""

import functools

import torch
from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.routing.key_map import HASH_MULTIPLIERS, HASH_SHIFT, MODES, Routing, rows_per_rank

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:  # CPU builds of PyTorch come without Triton
    triton = None

HAS_TRITON = triton is not None
_TILE_KEYS = 64  # which a program counts at once: rows of a tile times keys of a chunk
_MIN_CHUNK = 2  # with more, tiles of short rows would be mostly empty; with fewer, rows of some 10 keys take longer
_COUNT_WARPS = 1
_BLOCK = 512  # keys of a program of the other kernels


def check_keys(keys: Tensor) -> None:
    """Raise a ConfigError unless keys are a tensor of int32 or int64."""
    if not isinstance(keys, Tensor):
        raise ConfigError(f"keys must be a NumPy array or a tensor, got {type(keys).__name__}")
    if keys.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"keys must be int32 or int64, got {keys.dtype}")


@functools.lru_cache(maxsize=64)
def _upload_routings(routings: tuple[Routing, ...], world_size: int, device: torch.device) -> Tensor:
    """Return the number of the mode and the rows of a range, for each routing: int64 [n, 2]."""
    numbers = [
        (MODES.index(routing.mode), rows_per_rank(routing.num_embeddings or 1, world_size)) for routing in routings
    ]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def owners_with_kernel(keys: Tensor, world_size: int, routing: Routing) -> Tensor:
    """Return the rank that owns each key, int64 of the same shape, of keys on a GPU."""
    owners = torch.empty_like(keys, dtype=torch.int64, memory_format=torch.contiguous_format)
    if count := keys.numel():
        table = _upload_routings((routing,), world_size, keys.device)
        with torch.cuda.device_of(keys):
            grid = (triton.cdiv(count, _BLOCK),)
            _write_owners[grid](keys.contiguous(), table, owners, count, world_size, _BLOCK)
    return owners


def bucketize_with_kernels(
    keys: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    routings: tuple[Routing, ...],
    world_size: int,
    *,
    weights: Tensor | None,
    positions: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Group the keys [n] of a batch with lengths [K * B] on a GPU by (rank, feature, row), in their order.

    Return lengths [W * K * B]; rows in the owner's shard [n], of the keys' dtype; weights [n] or, if `positions`, the
    index of each key in its original row [n], of the keys' dtype, or None; and the place of each key: int64 [n].
    """
    num_rows, num_keys = lengths.numel(), keys.numel()
    new_lengths = torch.zeros(world_size * num_rows, dtype=lengths.dtype, device=keys.device)
    permutation = torch.empty(keys.shape, dtype=torch.int64, device=keys.device)
    new_rows = torch.empty_like(keys)
    extra = torch.empty_like(keys) if positions else None if weights is None else torch.empty_like(weights)
    if not num_keys:
        return new_lengths, new_rows, extra, permutation
    table = _upload_routings(routings, world_size, keys.device)
    groups, rows = torch.empty_like(permutation), torch.empty_like(keys)
    batch_size = num_rows // len(routings)
    chunk = min(max(triton.next_power_of_2(num_keys // num_rows), _MIN_CHUNK), _TILE_KEYS)
    grid = (triton.cdiv(batch_size, _TILE_KEYS // chunk), len(routings))
    with torch.cuda.device_of(keys):
        _count[grid](
            *(keys, offsets, table, new_lengths, groups, rows, permutation, num_rows, batch_size, world_size, chunk),
            num_warps=_COUNT_WARPS,
            num_stages=1,  # without pipelining: a chunk reads the counts that the one before it has written
        )
        group_ends = torch.cumsum(new_lengths, 0)
        _move[(triton.cdiv(num_keys, _BLOCK),)](
            *(group_ends, groups, rows, new_rows, permutation, offsets, weights, extra, num_keys, num_rows, _BLOCK)
        )
    return new_lengths, new_rows, extra, permutation


if triton is not None:
    _ROUNDROBIN = tl.constexpr(MODES.index("roundrobin"))
    _CONTINUOUS = tl.constexpr(MODES.index("continuous"))
    _HASH = tl.constexpr(MODES.index("hash_roundrobin"))
    _FIRST_MULTIPLIER, _SECOND_MULTIPLIER = (tl.constexpr(multiplier) for multiplier in HASH_MULTIPLIERS)
    _SHIFT = tl.constexpr(HASH_SHIFT)
    _TILE = tl.constexpr(_TILE_KEYS)

    @triton.jit
    def _owners_and_rows(keys, routing, world_size):
        """Do the same as `owners.owners_and_rows`; `routing` points to the numbers of one."""
        mode = tl.load(routing)
        words = keys.to(tl.int64).to(tl.uint64)
        size = world_size.to(tl.uint64)
        if mode == _HASH:
            hashed = words ^ (words >> _SHIFT)
            hashed = hashed * _FIRST_MULTIPLIER
            hashed = hashed ^ (hashed >> _SHIFT)
            hashed = hashed * _SECOND_MULTIPLIER
            hashed = hashed ^ (hashed >> _SHIFT)
            owners = hashed % size
            rows = words
        elif mode == _ROUNDROBIN:
            rows = words // size
            owners = words - rows * size
        else:
            if keys.dtype == tl.int32:
                words = words & 0xFFFFFFFF
            range_size = tl.load(routing + 1).to(tl.uint64)
            ranges = words // range_size
            quotients = words // size
            is_in_range = ranges < size
            owners = tl.where(is_in_range, ranges, words - quotients * size)
            rows = tl.where(is_in_range, words - ranges * range_size, quotients)
        return owners.to(tl.int64), rows.to(keys.dtype)

    @triton.jit(do_not_specialize=["count", "world_size"])
    def _write_owners(keys, routing, owners, count, world_size, block: tl.constexpr):
        index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        is_key = index < count
        loaded = tl.load(keys + index, mask=is_key, other=0)
        found, _ = _owners_and_rows(loaded, routing, world_size)
        tl.store(owners + index, found, mask=is_key)

    @triton.jit(do_not_specialize=["num_rows", "batch_size", "world_size"])
    def _count(
        keys, offsets, table, lengths, groups, rows, places, num_rows, batch_size, world_size, chunk: tl.constexpr
    ):
        """Count the keys of each group in `lengths`, which are 0 before, and find each key's group, row and place."""
        tile_rows: tl.constexpr = _TILE // chunk
        routing = table + 2 * tl.program_id(1)
        end = (tl.program_id(1).to(tl.int64) + 1) * batch_size  # of the rows of this feature
        first = end - batch_size + tl.program_id(0) * tile_rows
        row = first + tl.arange(0, tile_rows)
        row_ends = tl.load(offsets + row + 1, mask=row < end, other=0)
        longest = tl.max(row_ends - tl.load(offsets + row, mask=row < end, other=0), axis=0)
        if longest <= _TILE:
            _count_rows(keys, offsets, routing, lengths, groups, rows, places, first, end, num_rows, world_size, chunk)
        else:  # in chunks with the others, one long row would take as many of them as it has keys
            for one in range(first, first + tile_rows):
                _count_rows(
                    keys, offsets, routing, lengths, groups, rows, places, one, end, num_rows, world_size, _TILE
                )

    @triton.jit
    def _count_rows(
        keys, offsets, routing, lengths, groups, rows, places, first, end, num_rows, world_size, chunk: tl.constexpr
    ):
        tile_rows: tl.constexpr = _TILE // chunk
        row = (first + tl.arange(0, tile_rows))[:, None]
        starts = tl.load(offsets + row, mask=row < end, other=0).to(tl.int64)
        ends = tl.load(offsets + row + 1, mask=row < end, other=0).to(tl.int64)
        order = tl.arange(0, chunk)
        is_before = (order[None, :] < order[:, None])[None, :, :]
        for begin in range(0, tl.max(ends - starts), chunk):
            index = starts + begin + order[None, :]
            is_key = index < ends
            owners, rows_there = _owners_and_rows(tl.load(keys + index, mask=is_key, other=0), routing, world_size)
            owners = tl.where(is_key, owners, -1)
            group = owners * num_rows + row
            is_same = owners[:, :, None] == owners[:, None, :]
            num_same = tl.sum(is_same.to(tl.int32), axis=2)
            num_before = tl.sum((is_same & is_before).to(tl.int32), axis=2)
            counted = tl.load(lengths + group, mask=is_key, other=0)
            # Other threads read the same counts: all before one writes them, and in the next chunk after it.
            tl.debug_barrier()
            tl.store(lengths + group, counted + num_same, mask=is_key & (num_before == 0))
            tl.debug_barrier()
            tl.store(groups + index, group, mask=is_key)
            tl.store(rows + index, rows_there, mask=is_key)
            tl.store(places + index, (counted + num_before).to(tl.int64), mask=is_key)

    @triton.jit(do_not_specialize=["num_keys", "num_rows"])
    def _move(
        group_ends, groups, rows, new_rows, places, offsets, weights, extra, num_keys, num_rows, block: tl.constexpr
    ):
        """Add the start of each key's group to its place, and move its row and weight, or else position, there."""
        index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        is_key = index < num_keys
        group = tl.load(groups + index, mask=is_key, other=0)
        start = tl.load(group_ends + group - 1, mask=is_key & (group > 0), other=0)
        place = start + tl.load(places + index, mask=is_key, other=0)
        tl.store(places + index, place, mask=is_key)
        tl.store(new_rows + place, tl.load(rows + index, mask=is_key, other=0), mask=is_key)
        if weights is not None:
            tl.store(extra + place, tl.load(weights + index, mask=is_key, other=0), mask=is_key)
        elif extra is not None:
            row_start = tl.load(offsets + group % num_rows, mask=is_key, other=0)
            tl.store(extra + place, (index - row_start).to(extra.dtype.element_ty), mask=is_key)
