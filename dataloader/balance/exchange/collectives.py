"""Which way the bytes of a step go: what is packed, in which chunks, and where what arrives belongs. Pure functions."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.exchange.batch_buffer import Rows
from evenrank.dataloader.balance.exchange.byte_copy import Copies
from evenrank.dataloader.balance.exchange.plan import ALIGNMENT, Plan, lay_out, row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranges:
    """Ranges that make up the sections of a batch, in ascending order of positions: int64 [S, n], in bytes."""

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    before: NDArray[np.int64]  # bytes of their section that come before them


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """A way through one collective."""

    packing: Copies  # from the batch's memory (0) to the send buffer
    sent_splits: list[int]  # bytes of the chunks of the send buffer: one for each rank, or one for all
    sent_bytes: int
    received_splits: list[int]  # [W]: bytes from each rank
    received_bytes: int
    arrived: Ranges  # of the receive buffer
    stayed: Ranges  # of the batch's memory

    def place(self, rows: Rows) -> Copies:
        """Say where ranges of the receive buffer (0) and of the batch's memory (1) go in a new one."""
        # Rows of a section follow each other, so where the first is all begins; without any there is nothing to place.
        begins = rows.starts[:, :1]
        return Copies.joined(
            [
                Copies.of(which, ranges.starts, begins + ranges.before, ranges.sizes)
                for which, ranges in enumerate((self.arrived, self.stayed))
            ]
        )


def all_to_all_route(plan: Plan, rows: Rows) -> Route:
    """Send each rank its chunk.

    What other ranks send lies in the receive buffer in ascending order of positions already, so a section of a chunk is
    one range; what stays comes between those of lower and of higher ranks.
    """
    sizes = rows.sizes[:, plan.stay_rows]
    by_source = plan.receive_sizes.copy()  # [S, W]
    by_source[:, plan.rank] = sizes.sum(axis=1)
    before = np.cumsum(by_source, axis=1) - by_source
    return Route(
        packing=_pack(rows, plan.send_rows, plan.send_counts, plan.send_offsets),
        sent_splits=plan.send_bytes.tolist(),
        sent_bytes=int(plan.send_bytes.sum()),
        received_splits=plan.receive_bytes.tolist(),
        received_bytes=int(plan.receive_bytes.sum()),
        arrived=Ranges(starts=plan.receive_offsets, sizes=plan.receive_sizes, before=before),
        stayed=Ranges(
            starts=rows.starts[:, plan.stay_rows],
            sizes=sizes,
            before=before[:, plan.rank : plan.rank + 1] + np.cumsum(sizes, axis=1) - sizes,
        ),
    )


def all_gather_route(plan: Plan, rows: Rows) -> Route:
    """Send everybody all; each rank's samples are a chunk, and all chunks are as long as the longest."""
    rank_of, lengths = plan.rank_of, plan.dealt_lengths
    world_size, batch_size = rank_of.shape
    flat = lengths.transpose(1, 0, 2).reshape(lengths.shape[1], rank_of.size)
    sizes = row_bytes(plan.sections, flat).reshape(-1, world_size, batch_size)
    sizes[:, rank_of < 0] = 0
    chunks, offsets = lay_out(sizes.sum(axis=2))
    offsets -= np.cumsum(chunks) - chunks  # from the beginning of each chunk
    longest = int(chunks.max())
    num_real = np.count_nonzero(rank_of[plan.rank] >= 0)
    begins = offsets + longest * np.arange(world_size)
    starts = begins[:, :, np.newaxis] + np.cumsum(sizes, axis=2) - sizes
    mine = rank_of == plan.rank
    arriving = sizes[:, mine]
    nothing = np.zeros((len(plan.sections), 0), dtype=np.int64)
    return Route(
        packing=_pack(rows, np.arange(num_real), np.array([num_real]), offsets[:, plan.rank : plan.rank + 1]),
        sent_splits=[longest],
        sent_bytes=longest,
        received_splits=[longest] * world_size,
        received_bytes=world_size * longest,
        arrived=Ranges(starts=starts[:, mine], sizes=arriving, before=np.cumsum(arriving, axis=1) - arriving),
        stayed=Ranges(starts=nothing, sizes=nothing, before=nothing),
    )


def trial_route(chunks: int, world_size: int) -> Route:
    """Send chunks of 16 bytes, which mean nothing: enough to connect all ranks."""
    size = np.array([chunks * ALIGNMENT])
    nothing = np.zeros((0, 0), dtype=np.int64)
    none = Ranges(starts=nothing, sizes=nothing, before=nothing)
    return Route(
        packing=Copies.of(0, np.zeros_like(size), np.zeros_like(size), size),
        sent_splits=[ALIGNMENT] * chunks,
        sent_bytes=chunks * ALIGNMENT,
        received_splits=[ALIGNMENT] * world_size,
        received_bytes=world_size * ALIGNMENT,
        arrived=none,
        stayed=none,
    )


def _pack(rows: Rows, chosen: NDArray[np.int64], counts: NDArray[np.int64], offsets: NDArray[np.int64]) -> Copies:
    """Say how rows get into a buffer, chunk after chunk.

    Args:
        rows: of the batch.
        chosen: int64 [n], those to pack, by chunk.
        counts: int64 [C], how many of them are in each chunk.
        offsets: int64 [S, C], where each section of each chunk begins.

    """
    chunks = np.repeat(np.arange(len(counts)), counts)
    first_of_chunk = np.cumsum(counts) - counts
    sizes = rows.sizes[:, chosen]
    running = np.cumsum(sizes, axis=1) - sizes
    within_chunk = running - running[:, first_of_chunk[chunks]]
    return Copies.of(0, rows.starts[:, chosen], offsets[:, chunks] + within_chunk, sizes)
