"""`Plan`: what one rank sends and receives in a step, to the byte: assignment and lengths -> plan.

Every rank knows the lengths of all samples, so it computes its plan without asking other ranks, and lengths are not
sent. Samples that stay on their rank are not sent either. What one rank sends to another is a chunk: for each section
(the values of one jagged key, their weights, or the rows of one dense field) the samples that move, in ascending order
of rows, each section aligned to 16 bytes.

    chunk to rank 0                            chunk to rank 1
    [item_id 7 3 9 4 | action 1 1 0 2 | ids 5 8][item_id | action | ids]
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.partition.strategies import Assignment
from evenrank.dataloader.balance.ranks.metadata import StepMetadata
from evenrank.dataloader.batches.batch import loss_tokens
from evenrank.dataloader.batches.schema import BatchSchema

ALIGNMENT = 16  # bytes: the widest load and store of a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A run of equally typed elements in a chunk."""

    field: str  # field of the batch
    key: int | None  # row of the lengths [K, B] that counts the elements, for a jagged key; None for a dense field
    is_weights: bool = False  # the elements are the weights of a jagged key, not its values
    element_bytes: int  # bytes of one value or weight of a jagged key, or of one row of a dense field


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one rank does in one step. W ranks, B rows per rank, K jagged keys, S sections; offsets are in bytes."""

    rank: int
    schema: BatchSchema  # of all ranks' batches
    rank_of: NDArray[np.int32]  # [W, B]: see `Assignment`
    world_lengths: NDArray[np.int64]  # [W, K, B]: lengths of all ranks' rows before the exchange
    sections: tuple[Section, ...]  # sections of a chunk, in order
    kept_rows: NDArray[np.int64]  # this rank's rows that stay, ascending; they are in no chunk
    send_rows: NDArray[np.int64]  # this rank's other rows, by destination, then ascending
    send_counts: NDArray[np.int64]  # [W]: rows sent to each rank
    send_bytes: NDArray[np.int64]  # [W]: size of the chunk sent to each rank
    send_offsets: NDArray[np.int64]  # [S, W]: start of each section of each chunk in the send buffer
    receive_bytes: NDArray[np.int64]  # [W]: size of the chunk received from each rank
    receive_offsets: NDArray[np.int64]  # [S, W]: start of each section of each chunk in the receive buffer
    receive_section_bytes: NDArray[np.int64]  # [S, W]: bytes of each section of each received chunk, without alignment
    num_real: int  # samples of this rank after the exchange
    lengths: NDArray[np.int64]  # [K, B]: of this rank's rows after the exchange, by source rank and row, then padding
    loss_tokens: int  # loss tokens of this rank after the exchange
    world_loss_tokens: int  # loss tokens of all ranks


def make_plan(schema: BatchSchema, step: StepMetadata, assignment: Assignment, rank: int) -> Plan:
    """Compute what a rank sends and receives in a step."""
    rank_of, world_lengths = assignment.rank_of, step.lengths
    world_size, batch_size = rank_of.shape
    sections = sections_of(schema)

    # A stable sort, so rows that go to one rank stay in ascending order.
    destination_of_row = rank_of[rank]
    send_rows = np.flatnonzero((destination_of_row >= 0) & (destination_of_row != rank))
    send_rows = send_rows[np.argsort(destination_of_row[send_rows], kind="stable")]
    destinations = destination_of_row[send_rows]
    send_section_bytes = _section_bytes(sections, world_lengths[rank][:, send_rows], destinations, world_size)

    # Ranks ascending, and rows ascending within each rank: the order of positions in the epoch.
    sources, source_rows = np.nonzero(rank_of == rank)
    trained_lengths = world_lengths[sources, :, source_rows].T
    is_received = sources != rank
    receive_section_bytes = _section_bytes(sections, trained_lengths[:, is_received], sources[is_received], world_size)

    lengths = np.zeros((world_lengths.shape[1], batch_size), dtype=np.int64)
    lengths[:, : len(sources)] = trained_lengths
    send_bytes, send_offsets = lay_out_chunks(send_section_bytes)
    receive_bytes, receive_offsets = lay_out_chunks(receive_section_bytes)
    lengths_by_key = dict(zip(schema.jagged_keys, world_lengths.transpose(1, 0, 2), strict=True))
    tokens = loss_tokens(schema.loss_key, lengths_by_key, rank_of >= 0)  # [W, B]
    return Plan(
        rank=rank,
        schema=schema,
        rank_of=rank_of,
        world_lengths=world_lengths,
        sections=sections,
        kept_rows=np.flatnonzero(destination_of_row == rank),
        send_rows=send_rows,
        send_counts=np.bincount(destinations, minlength=world_size),
        send_bytes=send_bytes,
        send_offsets=send_offsets,
        receive_bytes=receive_bytes,
        receive_offsets=receive_offsets,
        receive_section_bytes=receive_section_bytes,
        num_real=len(sources),
        lengths=lengths,
        loss_tokens=int(tokens[rank_of == rank].sum()),
        world_loss_tokens=int(tokens.sum()),
    )


@functools.cache
def sections_of(schema: BatchSchema) -> tuple[Section, ...]:
    """Return the sections of a chunk, in order."""
    sections: list[Section] = []
    first_key = 0
    for spec in schema.fields:
        if spec.dtype is None:
            continue
        keys = [None] if spec.keys is None else range(first_key, first_key + len(spec.keys))
        first_key += len(spec.keys or ())
        element_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        sections += [Section(field=spec.name, key=key, element_bytes=element_bytes) for key in keys]
        if spec.weights_dtype is not None:
            weight_bytes = spec.weights_dtype.itemsize
            sections += [Section(field=spec.name, key=key, is_weights=True, element_bytes=weight_bytes) for key in keys]
    return tuple(sections)


def row_bytes(sections: tuple[Section, ...], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of each row in each section: int64 [S, n], given lengths [K, n]."""
    num_bytes = np.empty((len(sections), lengths.shape[1]), dtype=np.int64)
    for section, bytes_of_rows in zip(sections, num_bytes, strict=True):
        bytes_of_rows[:] = (
            section.element_bytes if section.key is None else section.element_bytes * lengths[section.key]
        )
    return num_bytes


def sample_bytes(schema: BatchSchema, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of each sample over all fields: int64 [n], given lengths [K, n]."""
    num_bytes: NDArray[np.int64] = row_bytes(sections_of(schema), lengths).sum(axis=0)
    return num_bytes


def aligned(num_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return sizes rounded up to a multiple of ALIGNMENT: int64 of the same shape."""
    rounded: NDArray[np.int64] = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return rounded


def starts_of(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the starts of adjacent ranges of these sizes, along the last axis: int64 of the same shape."""
    starts: NDArray[np.int64] = np.cumsum(sizes, axis=-1) - sizes
    return starts


def lay_out_chunks(section_bytes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the size of each chunk [W] and the start of each section in the buffer [S, W], all aligned, in bytes."""
    aligned_bytes = aligned(section_bytes)
    chunk_bytes = aligned_bytes.sum(axis=0)
    return chunk_bytes, starts_of(chunk_bytes) + starts_of(aligned_bytes.T).T


def _section_bytes(
    sections: tuple[Section, ...], lengths: NDArray[np.int64], peers: NDArray[np.integer], world_size: int
) -> NDArray[np.int64]:
    """Return the bytes of rows per section and peer: int64 [S, W], given lengths [K, n] and ascending peers [n]."""
    cumulative = np.zeros((len(sections), len(peers) + 1), dtype=np.int64)
    np.cumsum(row_bytes(sections, lengths), axis=1, out=cumulative[:, 1:])
    return np.diff(cumulative[:, np.searchsorted(peers, np.arange(world_size + 1))], axis=1)
