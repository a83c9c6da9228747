"""Assignment and sizes -> what one rank sends and receives, to the byte. Nothing is asked of other ranks.

What a rank keeps never moves. The bytes that go from one rank to another are a chunk: for each section (the values of
one jagged key, their weights, or the rows of one dense field) the samples that move, in ascending order, each section
aligned to 16 bytes.

    chunk to rank 0                            chunk to rank 1
    [item_id 7 3 9 4 | action 1 1 0 2 | ids 5 8][item_id | action | ids]

Lengths are not sent: every rank knows those of all samples.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.control.wire import StepSizes
from evenrank.dataloader.balance.partition.strategies import Assignment
from evenrank.dataloader.batch import BatchSchema

ALIGNMENT = 16  # bytes: the widest load and store of a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One run of like elements in a chunk."""

    field: str
    key: int | None  # index into the lengths, for the values or weights of a jagged key; None for a dense field
    is_weights: bool = False
    bytes: int  # of one element of a jagged key, or of one row of a dense field


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one rank does in one step. Offsets and sizes are in bytes; S is the number of sections."""

    rank: int  # whose plan it is
    schema: BatchSchema  # of all batches
    rank_of: NDArray[np.int32]  # [W, B]: see Assignment
    dealt_lengths: NDArray[np.int64]  # [W, K, B]: before the exchange
    sections: tuple[Section, ...]
    stay_rows: NDArray[np.int64]  # this rank's rows that it keeps, ascending; they are in no chunk
    send_rows: NDArray[np.int64]  # its other rows, by destination, then ascending
    send_counts: NDArray[np.int64]  # [W]: how many of them go where
    send_bytes: NDArray[np.int64]  # [W]: sizes of the chunks
    send_offsets: NDArray[np.int64]  # [S, W]: where each section of each chunk begins in the send buffer
    receive_bytes: NDArray[np.int64]  # [W]
    receive_offsets: NDArray[np.int64]  # [S, W]
    receive_sizes: NDArray[np.int64]  # [S, W]: bytes of each section without its alignment
    num_real: int  # samples of this rank after the exchange
    lengths: NDArray[np.int64]  # [K, B]: after the exchange, in ascending order, padding last
    loss_tokens: int  # of this rank after the exchange
    world_loss_tokens: int


def make_plan(schema: BatchSchema, sizes: StepSizes, assignment: Assignment, rank: int) -> Plan:
    """Work out what a rank sends and receives."""
    rank_of, lengths = assignment.rank_of, sizes.lengths
    world_size, batch_size = rank_of.shape
    sections = sections_of(schema)

    # Sorting is stable, so rows that go to one rank stay in ascending order.
    mine = rank_of[rank]
    stay_rows = np.flatnonzero(mine == rank)
    send_rows = np.flatnonzero((mine >= 0) & (mine != rank))
    send_rows = send_rows[np.argsort(mine[send_rows], kind="stable")]
    destinations = mine[send_rows]
    send_sizes = _section_sizes(sections, lengths[rank][:, send_rows], destinations, world_size)

    # Ranks ascending, rows within each ascending: that is the order of positions.
    sources, rows = np.nonzero(rank_of == rank)
    received = lengths[sources, :, rows].T
    elsewhere = sources != rank
    receive_sizes = _section_sizes(sections, received[:, elsewhere], sources[elsewhere], world_size)

    after = np.zeros((lengths.shape[1], batch_size), dtype=np.int64)
    after[:, : len(rows)] = received
    send_bytes, send_offsets = lay_out(send_sizes)
    receive_bytes, receive_offsets = lay_out(receive_sizes)
    if schema.loss_key is None:
        loss_tokens, world_loss_tokens = len(rows), int(np.count_nonzero(rank_of >= 0))
    else:
        key = schema.jagged_keys.index(schema.loss_key)
        loss_tokens = int(after[key].sum())
        world_loss_tokens = int(lengths[:, key][rank_of >= 0].sum())
    return Plan(
        rank=rank,
        schema=schema,
        rank_of=rank_of,
        dealt_lengths=lengths,
        sections=sections,
        stay_rows=stay_rows,
        send_rows=send_rows,
        send_counts=np.bincount(destinations, minlength=world_size),
        send_bytes=send_bytes,
        send_offsets=send_offsets,
        receive_bytes=receive_bytes,
        receive_offsets=receive_offsets,
        receive_sizes=receive_sizes,
        num_real=len(rows),
        lengths=after,
        loss_tokens=loss_tokens,
        world_loss_tokens=world_loss_tokens,
    )


@functools.cache
def sections_of(schema: BatchSchema) -> tuple[Section, ...]:
    """List what a chunk consists of, in order."""
    sections: list[Section] = []
    index = 0
    for spec in schema.fields:
        if spec.dtype is None:
            continue
        size = math.prod(spec.shape) * spec.dtype.itemsize
        if spec.keys is None:
            sections.append(Section(field=spec.name, key=None, bytes=size))
            continue
        keys = range(index, index + len(spec.keys))
        index += len(spec.keys)
        sections += [Section(field=spec.name, key=key, bytes=size) for key in keys]
        if spec.weights_dtype is not None:
            size = spec.weights_dtype.itemsize
            sections += [Section(field=spec.name, key=key, is_weights=True, bytes=size) for key in keys]
    return tuple(sections)


def row_bytes(sections: tuple[Section, ...], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of each row in each section: int64 [S, n], given lengths [K, n]."""
    sizes = np.empty((len(sections), lengths.shape[1]), dtype=np.int64)
    for section, row in zip(sections, sizes, strict=True):
        row[:] = section.bytes
        if section.key is not None:
            row *= lengths[section.key]
    return sizes


def sample_bytes(schema: BatchSchema, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of each sample in all fields: int64 [n], given lengths [K, n]."""
    sizes: NDArray[np.int64] = row_bytes(sections_of(schema), lengths).sum(axis=0)
    return sizes


def _section_sizes(
    sections: tuple[Section, ...], lengths: NDArray[np.int64], peers: NDArray[np.integer], world_size: int
) -> NDArray[np.int64]:
    """Add up the bytes of rows per section and peer: [S, W], given lengths [K, n] and ascending peers [n]."""
    until = np.zeros((len(sections), len(peers) + 1), dtype=np.int64)
    np.cumsum(row_bytes(sections, lengths), axis=1, out=until[:, 1:])
    return np.diff(until[:, np.searchsorted(peers, np.arange(world_size + 1))], axis=1)


def lay_out(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the size of each chunk [W] and where in the buffer each section of each begins [S, W], given [S, W]."""
    aligned = -(-sizes // ALIGNMENT) * ALIGNMENT
    chunks = aligned.sum(axis=0)
    starts = np.cumsum(chunks) - chunks
    return chunks, starts + np.cumsum(aligned, axis=0) - aligned
