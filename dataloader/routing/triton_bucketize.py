"""Routing on a GPU: Triton kernels for the owners of keys, and for grouping the keys of a batch by owner.

A batch is grouped by two kernels, with a prefix sum between them. The first counts the keys of each (rank, row), and
gives every key its place among those; the second moves keys to where these groups start. Both have a program per tile
of adjacent rows of one feature, which goes through its rows in chunks: one row in long chunks, or many short rows at
once. In a chunk the place of a key is the number of keys before it with the same owner: all pairs are compared, which
needs no memory per rank, so that hundreds of ranks cost no more than two.

Nothing here waits for the GPU, except the first call with routings that have not been uploaded yet.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from evenrank.dataloader.routing.modes import HASH_MULTIPLIERS, HASH_SHIFT, MODES, Routing, rows_per_rank

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:  # CPU builds of PyTorch come without Triton
    triton = None

HAS_TRITON = triton is not None
_TILE_KEYS = 128  # of a chunk of all rows of a tile
_MIN_CHUNK = 8  # of a row
_OWNERS_BLOCK = 512  # keys of a program of `owners_with_kernel`
_NUM_WARPS = 4


@functools.lru_cache(maxsize=64)
def _upload_routings(routings: tuple[Routing, ...], world_size: int, device: torch.device) -> Tensor:
    """Return the number of the mode and the rows of a range, for each routing: int64 [n, 2]."""
    numbers = [
        (MODES.index(routing.mode), rows_per_rank(routing.num_embeddings or 1, world_size)) for routing in routings
    ]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def owners_with_kernel(keys: Tensor, world_size: int, routing: Routing) -> Tensor:
    """Return the rank that owns each key.

    Args:
        keys: int32 or int64, of any shape, on a GPU.
        world_size: number of ranks.
        routing: of their table.

    Returns:
        int64 of the same shape, on the same GPU.

    """
    owners = torch.empty_like(keys, dtype=torch.int64, memory_format=torch.contiguous_format)
    if count := keys.numel():
        table = _upload_routings((routing,), world_size, keys.device)
        with torch.cuda.device_of(keys):
            grid = (triton.cdiv(count, _OWNERS_BLOCK),)
            _write_owners[grid](keys.contiguous(), table, owners, count, world_size, _OWNERS_BLOCK)
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
    """Group the keys of a batch by (rank, feature, row), in their order.

    Args:
        keys: int32 or int64 [n], on a GPU, as all tensors.
        lengths: integers [K * B], keys of each row.
        offsets: integers [K * B + 1], where rows start, and n.
        routings: of each feature: K.
        world_size: number of ranks, W.
        weights: of each key: [n], or None.
        positions: whether to return positions in place of weights.

    Returns:
        Lengths [W * K * B]; rows in the owner's shard [n], of the keys' dtype; weights [n], or each key's index in its
        original row, of the keys' dtype, or None; and where each key went: int64 [n].

    """
    num_rows = lengths.numel()
    new_lengths = torch.zeros(world_size * num_rows, dtype=lengths.dtype, device=keys.device)
    places = torch.empty(keys.shape, dtype=torch.int64, device=keys.device)
    rows = torch.empty_like(keys)
    extra = torch.empty_like(keys) if positions else None if weights is None else torch.empty_like(weights)
    if not keys.numel():
        return new_lengths, rows, extra, places
    table = _upload_routings(routings, world_size, keys.device)
    batch_size = num_rows // len(routings)
    chunk = min(max(triton.next_power_of_2(keys.numel() // num_rows), _MIN_CHUNK), _TILE_KEYS)
    tile_rows = _TILE_KEYS // chunk
    grid = (triton.cdiv(batch_size, tile_rows), len(routings))
    shape = num_rows, batch_size, world_size
    # Without pipelining: a chunk reads the counts that the one before it has written.
    options: dict[str, Any] = {"tile_rows": tile_rows, "chunk": chunk, "num_warps": _NUM_WARPS, "num_stages": 1}
    with torch.cuda.device_of(keys):
        _count[grid](keys, offsets, table, new_lengths, places, *shape, **options)
        starts = torch.ops.fbgemm.asynchronous_complete_cumsum(new_lengths)
        _move[grid](
            keys,
            offsets,
            table,
            starts,
            places,
            rows,
            keys if weights is None else weights,  # a pointer that is not used, if there is neither
            keys if extra is None else extra,
            *shape,
            has_weights=weights is not None,
            has_positions=positions,
            **options,
        )
    return new_lengths, rows, extra, places


if triton is not None:
    _ROUNDROBIN = tl.constexpr(MODES.index("roundrobin"))
    _CONTINUOUS = tl.constexpr(MODES.index("continuous"))
    _HASH = tl.constexpr(MODES.index("hash_roundrobin"))
    _FIRST_MULTIPLIER, _SECOND_MULTIPLIER = (tl.constexpr(multiplier) for multiplier in HASH_MULTIPLIERS)
    _SHIFT = tl.constexpr(HASH_SHIFT)

    @triton.jit
    def _owners_and_rows(keys, mode, range_rows, world_size):
        """The same as `torch_owner.owners_and_rows`; owners as int64, rows as uint64."""
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
            range_size = range_rows.to(tl.uint64)
            ranges = words // range_size
            quotients = words // size
            is_in_range = ranges < size
            owners = tl.where(is_in_range, ranges, words - quotients * size)
            rows = tl.where(is_in_range, words - ranges * range_size, quotients)
        return owners.to(tl.int64), rows

    @triton.jit(do_not_specialize=["count", "world_size"])
    def _write_owners(keys, table, owners, count, world_size, block: tl.constexpr):
        index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        is_key = index < count
        loaded = tl.load(keys + index, mask=is_key, other=0)
        found, _ = _owners_and_rows(loaded, tl.load(table), tl.load(table + 1), world_size)
        tl.store(owners + index, found, mask=is_key)

    @triton.jit
    def _tile(offsets, batch_size, tile_rows: tl.constexpr):
        """The rows of this program, where they start and end, and the length of the longest."""
        in_batch = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
        is_row = in_batch < batch_size
        rows = tl.program_id(1).to(tl.int64) * batch_size + in_batch
        starts = tl.load(offsets + rows, mask=is_row, other=0).to(tl.int64)
        ends = tl.load(offsets + rows + 1, mask=is_row, other=0).to(tl.int64)
        return rows[:, None], starts[:, None], ends[:, None], tl.max(ends - starts, axis=0).to(tl.int32)

    @triton.jit(do_not_specialize=["num_rows", "batch_size", "world_size"])
    def _count(
        keys,
        offsets,
        table,
        lengths,
        places,
        num_rows,
        batch_size,
        world_size,
        tile_rows: tl.constexpr,
        chunk: tl.constexpr,
    ):
        """Count the keys of each (rank, row) in `lengths`, which starts as 0, and write each key's place among them."""
        rows, starts, ends, longest = _tile(offsets, batch_size, tile_rows)
        mode = tl.load(table + 2 * tl.program_id(1))
        range_rows = tl.load(table + 2 * tl.program_id(1) + 1)
        order = tl.arange(0, chunk)
        is_before = (order[None, :] < order[:, None])[None, :, :]
        for begin in range(0, longest, chunk):
            index = starts + begin + order[None, :]
            is_key = index < ends
            loaded = tl.load(keys + index, mask=is_key, other=0)
            owners, _ = _owners_and_rows(loaded, mode, range_rows, world_size)
            owners = tl.where(is_key, owners, -1)
            is_same = owners[:, :, None] == owners[:, None, :]
            num_same = tl.sum(is_same.to(tl.int32), axis=2)
            num_before = tl.sum((is_same & is_before).to(tl.int32), axis=2)
            counters = lengths + owners * num_rows + rows
            counted = tl.load(counters, mask=is_key, other=0)
            tl.store(places + index, (counted + num_before).to(tl.int64), mask=is_key)
            # Other threads read the same counters: all before one writes, and in the next chunk after it.
            tl.debug_barrier()
            tl.store(counters, counted + num_same, mask=is_key & (num_before == 0))
            tl.debug_barrier()

    @triton.jit(do_not_specialize=["num_rows", "batch_size", "world_size"])
    def _move(
        keys,
        offsets,
        table,
        group_starts,
        places,
        new_rows,
        weights,
        extra,
        num_rows,
        batch_size,
        world_size,
        has_weights: tl.constexpr,
        has_positions: tl.constexpr,
        tile_rows: tl.constexpr,
        chunk: tl.constexpr,
    ):
        """Add the start of each key's group to its place, and write what belongs there."""
        rows, starts, ends, longest = _tile(offsets, batch_size, tile_rows)
        mode = tl.load(table + 2 * tl.program_id(1))
        range_rows = tl.load(table + 2 * tl.program_id(1) + 1)
        for begin in range(0, longest, chunk):
            in_row = begin + tl.arange(0, chunk)[None, :]
            index = starts + in_row
            is_key = index < ends
            loaded = tl.load(keys + index, mask=is_key, other=0)
            owners, rows_of_keys = _owners_and_rows(loaded, mode, range_rows, world_size)
            group = tl.load(group_starts + owners * num_rows + rows, mask=is_key, other=0)
            place = tl.load(places + index, mask=is_key, other=0) + group
            tl.store(places + index, place, mask=is_key)
            tl.store(new_rows + place, rows_of_keys.to(loaded.dtype), mask=is_key)
            if has_weights:
                tl.store(extra + place, tl.load(weights + index, mask=is_key), mask=is_key)
            if has_positions:
                tl.store(extra + place, (index - starts).to(loaded.dtype), mask=is_key)
