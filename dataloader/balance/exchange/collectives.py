"""The collectives that move samples: what they send, how their buffers are laid out, and the calls that start them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evenrank.dataloader.balance.exchange.batch_buffer import RowLayout
from evenrank.dataloader.balance.exchange.cpu_copy import ByteCopies
from evenrank.dataloader.balance.exchange.plan import ALIGNMENT, Plan, lay_out_chunks, row_bytes
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Work


class SampleRanges(NamedTuple):
    """Byte ranges of a buffer that make up the sections of a batch, in ascending order: int64 [S, n], in bytes."""

    starts: NDArray[np.int64]  # start of each range in its buffer
    num_bytes: NDArray[np.int64]  # length of each range
    offsets: NDArray[np.int64]  # start of each range within its section of the batch


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveLayout:
    """The buffers of one collective on one rank, in bytes."""

    pack: ByteCopies  # copies from the buffer of the loaded batch (source 0) to the send buffer
    send_splits: list[int]  # bytes of each chunk of the send buffer: one per rank, or one for all ranks
    receive_splits: list[int]  # [W]: bytes received from each rank
    received: SampleRanges  # ranges of the receive buffer
    kept: SampleRanges  # ranges of the buffer of the loaded batch

    def unpack(self, rows: RowLayout) -> ByteCopies:
        """Return the copies from the receive buffer (source 0) and the loaded batch (source 1) to a batch buffer."""
        section_starts = rows.section_starts[:, np.newaxis]
        return ByteCopies.concatenate(
            [
                ByteCopies.from_source(source, ranges.starts, section_starts + ranges.offsets, ranges.num_bytes)
                for source, ranges in enumerate((self.received, self.kept))
            ]
        )


class AllToAll:
    """One all-to-all sends each rank the samples that it trains: every key and every dense field, as bytes."""

    def layout(self, plan: Plan, rows: RowLayout) -> CollectiveLayout:
        """Lay out one chunk per rank, given the layout of the loaded batch.

        Received chunks are in ascending order already, so a section of a chunk is one range. Samples that stay come
        between those of lower and of higher ranks.
        """
        kept_bytes = rows.num_bytes[:, plan.kept_rows]
        bytes_by_source = plan.receive_section_bytes.copy()  # [S, W]
        bytes_by_source[:, plan.rank] = kept_bytes.sum(axis=1)
        offset_of_source = np.cumsum(bytes_by_source, axis=1) - bytes_by_source
        kept_offsets = np.cumsum(kept_bytes, axis=1) - kept_bytes
        return CollectiveLayout(
            pack=_pack_rows(rows, plan.send_rows, plan.send_counts, plan.send_offsets),
            send_splits=plan.send_bytes.tolist(),
            receive_splits=plan.receive_bytes.tolist(),
            received=SampleRanges(plan.receive_offsets, plan.receive_section_bytes, offset_of_source),
            kept=SampleRanges(
                rows.starts[:, plan.kept_rows],
                kept_bytes,
                offset_of_source[:, plan.rank : plan.rank + 1] + kept_offsets,
            ),
        )

    def start(
        self, layout: CollectiveLayout, send: Tensor, receive: Tensor, group: FailFastGroup, *, async_op: bool
    ) -> Work | None:
        """Start the collective; for `async_op` and the result see `FailFastGroup.all_gather`."""
        return group.all_to_all(receive, send, layout.receive_splits, layout.send_splits, async_op=async_op)


class AllGather:
    """One all-gather sends all samples to every rank, which keeps those that it trains.

    It moves W times as many bytes as the all-to-all; on some networks with few ranks it is faster nevertheless.
    """

    def layout(self, plan: Plan, rows: RowLayout) -> CollectiveLayout:
        """Lay out one chunk for all ranks, given the layout of the loaded batch; all chunks have the largest's size."""
        rank_of, world_lengths = plan.rank_of, plan.world_lengths
        world_size, batch_size = rank_of.shape
        lengths = world_lengths.transpose(1, 0, 2).reshape(world_lengths.shape[1], rank_of.size)  # [K, W * B]
        num_bytes = row_bytes(plan.sections, lengths).reshape(-1, world_size, batch_size)
        num_bytes[:, rank_of < 0] = 0
        chunk_bytes, offsets = lay_out_chunks(num_bytes.sum(axis=2))
        offsets -= np.cumsum(chunk_bytes) - chunk_bytes  # from the start of each chunk
        max_chunk_bytes = int(chunk_bytes.max())
        num_real = np.count_nonzero(rank_of[plan.rank] >= 0)
        section_starts = offsets + max_chunk_bytes * np.arange(world_size)
        row_starts = section_starts[:, :, np.newaxis] + np.cumsum(num_bytes, axis=2) - num_bytes
        is_trained_here = rank_of == plan.rank
        trained_bytes = num_bytes[:, is_trained_here]
        nothing = np.zeros((len(plan.sections), 0), dtype=np.int64)
        return CollectiveLayout(
            pack=_pack_rows(rows, np.arange(num_real), np.array([num_real]), offsets[:, plan.rank : plan.rank + 1]),
            send_splits=[max_chunk_bytes],
            receive_splits=[max_chunk_bytes] * world_size,
            received=SampleRanges(
                row_starts[:, is_trained_here], trained_bytes, np.cumsum(trained_bytes, axis=1) - trained_bytes
            ),
            kept=SampleRanges(nothing, nothing, nothing),
        )

    def start(
        self, layout: CollectiveLayout, send: Tensor, receive: Tensor, group: FailFastGroup, *, async_op: bool
    ) -> Work | None:
        """Start the collective; see `AllToAll.start`."""
        return group.all_gather(receive.split(layout.receive_splits), send, async_op=async_op)


Collective = AllToAll | AllGather
"""Brings every rank the samples that it trains; both give the same batches, bit for bit."""

COLLECTIVES: dict[str, type[AllToAll] | type[AllGather]] = {"all-to-all": AllToAll, "all-gather": AllGather}


def warmup_layout(collective: Collective, world_size: int) -> CollectiveLayout:
    """Lay out 16 meaningless bytes for each chunk, enough to connect all ranks."""
    num_chunks = world_size if isinstance(collective, AllToAll) else 1
    start, total = np.zeros(1, dtype=np.int64), np.array([num_chunks * ALIGNMENT])
    nothing = np.zeros((0, 0), dtype=np.int64)
    no_ranges = SampleRanges(nothing, nothing, nothing)
    return CollectiveLayout(
        pack=ByteCopies.from_source(0, start, start, total),
        send_splits=[ALIGNMENT] * num_chunks,
        receive_splits=[ALIGNMENT] * world_size,
        received=no_ranges,
        kept=no_ranges,
    )


def _pack_rows(
    rows: RowLayout, chunk_rows: NDArray[np.int64], counts: NDArray[np.int64], offsets: NDArray[np.int64]
) -> ByteCopies:
    """Return the copies to a send buffer of the rows of C chunks [n], given their counts [C] and offsets [S, C]."""
    chunk_of = np.repeat(np.arange(len(counts)), counts)
    first_of_chunk = np.cumsum(counts) - counts
    num_bytes = rows.num_bytes[:, chunk_rows]
    running = np.cumsum(num_bytes, axis=1) - num_bytes
    offset_in_section = running - running[:, first_of_chunk[chunk_of]]
    return ByteCopies.from_source(0, rows.starts[:, chunk_rows], offsets[:, chunk_of] + offset_in_section, num_bytes)
