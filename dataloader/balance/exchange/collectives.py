"""The collectives that move samples: what they send, how their buffers are laid out, and the calls that start them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evenrank.dataloader.balance.exchange.batch_buffer import RowLayout
from evenrank.dataloader.balance.exchange.cpu_copy import ByteCopies
from evenrank.dataloader.balance.exchange.plan import ALIGNMENT, Plan, lay_out_chunks, row_bytes, starts_of
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveLayout:
    """The buffers of one collective on one rank, in bytes."""

    pack: ByteCopies  # from the buffer of the loaded batch (source 0) to the send buffer
    unpack: ByteCopies  # from the receive buffer (source 0) and the loaded batch (source 1) to the output buffer
    send_splits: list[int]  # bytes of each chunk of the send buffer: one per rank, or one for all ranks
    receive_splits: list[int]  # [W]: bytes received from each rank


class AllToAll:
    """One all-to-all sends each rank the samples that it trains: every key and every dense field, as bytes."""

    def layout(self, plan: Plan, loaded: RowLayout, output: RowLayout) -> CollectiveLayout:
        """Lay out one chunk per rank, given the layouts of the loaded batch and of the new one.

        Received chunks are in ascending order already, so a section of a chunk is one range. Samples that stay come
        between those of lower and of higher ranks.
        """
        kept_bytes = loaded.num_bytes[:, plan.kept_rows]
        bytes_by_source = plan.receive_section_bytes.copy()  # [S, W]
        bytes_by_source[:, plan.rank] = kept_bytes.sum(axis=1)
        targets = output.section_starts[:, np.newaxis] + starts_of(bytes_by_source)
        kept_targets = targets[:, [plan.rank]] + starts_of(kept_bytes)
        received = ByteCopies.from_source(0, plan.receive_offsets, targets, plan.receive_section_bytes)
        kept = ByteCopies.from_source(1, loaded.starts[:, plan.kept_rows], kept_targets, kept_bytes)
        return CollectiveLayout(
            pack=_pack_rows(loaded, plan.send_rows, plan.send_counts, plan.send_offsets),
            unpack=ByteCopies.concatenate([received, kept]),
            send_splits=plan.send_bytes.tolist(),
            receive_splits=plan.receive_bytes.tolist(),
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

    def layout(self, plan: Plan, loaded: RowLayout, output: RowLayout) -> CollectiveLayout:
        """Lay out one chunk for all ranks; all chunks have the largest's size. See `AllToAll.layout`."""
        rank_of, world_lengths = plan.rank_of, plan.world_lengths
        lengths = world_lengths.transpose(1, 0, 2).reshape(world_lengths.shape[1], rank_of.size)  # [K, W * B]
        num_bytes = row_bytes(plan.sections, lengths).reshape(-1, *rank_of.shape)
        num_bytes[:, rank_of < 0] = 0
        chunk_bytes, offsets = lay_out_chunks(num_bytes.sum(axis=2))
        offsets -= starts_of(chunk_bytes)  # from the start of each chunk
        max_chunk_bytes = int(chunk_bytes.max())
        num_real = np.count_nonzero(rank_of[plan.rank] >= 0)
        section_starts = offsets + max_chunk_bytes * np.arange(len(rank_of))
        row_starts = section_starts[:, :, np.newaxis] + starts_of(num_bytes)
        is_trained_here = rank_of == plan.rank
        trained_bytes = num_bytes[:, is_trained_here]
        targets = output.section_starts[:, np.newaxis] + starts_of(trained_bytes)
        return CollectiveLayout(
            pack=_pack_rows(loaded, np.arange(num_real), np.array([num_real]), offsets[:, [plan.rank]]),
            unpack=ByteCopies.from_source(0, row_starts[:, is_trained_here], targets, trained_bytes),
            send_splits=[max_chunk_bytes],
            receive_splits=[max_chunk_bytes] * len(rank_of),
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
    start = np.zeros(1, dtype=np.int64)
    copies = ByteCopies.from_source(0, start, start, np.array([num_chunks * ALIGNMENT]))
    send_splits, receive_splits = [ALIGNMENT] * num_chunks, [ALIGNMENT] * world_size
    return CollectiveLayout(pack=copies, unpack=copies, send_splits=send_splits, receive_splits=receive_splits)


def _pack_rows(
    rows: RowLayout, chunk_rows: NDArray[np.int64], counts: NDArray[np.int64], offsets: NDArray[np.int64]
) -> ByteCopies:
    """Return the copies to a send buffer of the rows of C chunks [n], given their counts [C] and offsets [S, C]."""
    chunk_of = np.repeat(np.arange(len(counts)), counts)
    num_bytes = rows.num_bytes[:, chunk_rows]
    running = starts_of(num_bytes)
    offset_in_section = running - running[:, starts_of(counts)[chunk_of]]
    return ByteCopies.from_source(0, rows.starts[:, chunk_rows], offsets[:, chunk_of] + offset_in_section, num_bytes)
