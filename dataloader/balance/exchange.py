"""Carries a plan out: packs what leaves, moves it in one collective, and unpacks what arrives into a batch.

An exchange begins in `launch` and ends in `finish`; between the two the collective is under way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from evenrank.dataloader.balance.channel import Channel
from evenrank.dataloader.balance.packing import pack, unpack
from evenrank.dataloader.balance.plan import Plan, lay_out, row_bytes
from evenrank.dataloader.batch import JaggedBatch


class Transfer(Protocol):
    """A collective that is under way."""

    def wait(self) -> Any:
        """Return once it is done."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """A batch whose rows are on their way."""

    batch: JaggedBatch  # as it was before
    plan: Plan
    sent: Tensor  # kept until the collective is done
    received: Tensor  # uint8
    starts: NDArray[np.int64]  # [S, n]: the ranges of `received` that make up each section of the new batch
    sizes: NDArray[np.int64]  # [S, n]: in bytes
    channel: Channel | None  # None where nobody else takes part
    transfer: Transfer | None  # likewise


class Exchange(Protocol):
    """A way to carry plans out; all give the same batches, bit for bit."""

    def launch(self, batch: JaggedBatch, plan: Plan) -> InFlight:
        """Begin: pack the batch and start the collective. All ranks call it in the same order."""
        ...


def finish(flight: InFlight) -> JaggedBatch:
    """Wait for the collective and return the new batch."""
    if flight.channel is not None and flight.transfer is not None:
        with flight.channel.watched():
            flight.transfer.wait()
    return unpack(flight.batch, flight.plan, flight.received, starts=flight.starts, sizes=flight.sizes)


class AllToAll:
    """One all-to-all a step carries every key and every dense field, as bytes: to each rank what it trains.

    What ranks sent lies in the buffer in ascending order of positions already, so a section of a chunk is one range.

    Args:
        channel: the process group to use; None where there is no other rank.

    """

    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel

    def launch(self, batch: JaggedBatch, plan: Plan) -> InFlight:
        """Pack what leaves and start the all-to-all."""
        sent = received = pack(
            batch,
            plan.sections,
            rows=plan.send_rows,
            counts=plan.send_counts,
            offsets=plan.send_offsets,
            size=int(plan.send_bytes.sum()),
        )
        transfer = None
        if self._channel is not None:
            received = torch.empty(int(plan.receive_bytes.sum()), dtype=torch.uint8)
            with self._channel.watched():
                transfer = dist.all_to_all_single(
                    received,
                    sent,
                    output_split_sizes=plan.receive_bytes.tolist(),
                    input_split_sizes=plan.send_bytes.tolist(),
                    group=self._channel.group,
                    async_op=True,
                )
        return InFlight(
            batch=batch,
            plan=plan,
            sent=sent,
            received=received,
            starts=plan.receive_offsets,
            sizes=plan.receive_sizes,
            channel=self._channel,
            transfer=transfer,
        )


class AllGather:
    """One all-gather a step brings every rank all samples, of which it keeps its own.

    It moves W times as many bytes; on some networks with few ranks it is the quicker one all the same.

    Args:
        channel: the process group to use; None where there is no other rank.

    """

    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel

    def launch(self, batch: JaggedBatch, plan: Plan) -> InFlight:
        """Pack the whole batch and start the all-gather."""
        rank_of, lengths = plan.rank_of, plan.dealt_lengths
        world_size, batch_size = rank_of.shape
        flat = lengths.transpose(1, 0, 2).reshape(lengths.shape[1], -1)
        rows = np.zeros((len(plan.sections), world_size, batch_size), dtype=np.int64)  # in bytes
        for section, sizes in zip(plan.sections, rows, strict=True):
            sizes[:] = np.where(rank_of >= 0, row_bytes(section, flat).reshape(rank_of.shape), 0)
        # Each rank's samples are a chunk; all are as long as the longest.
        chunks, offsets = lay_out(rows.sum(axis=2))
        offsets -= np.cumsum(chunks) - chunks  # from the beginning of each chunk
        longest = int(chunks.max())
        sent = pack(
            batch,
            plan.sections,
            rows=np.arange(batch.num_real),
            counts=np.array([batch.num_real]),
            offsets=offsets[:, plan.rank : plan.rank + 1],
            size=longest,
        )
        received, transfer = sent, None
        if self._channel is not None:
            received = torch.empty(world_size * longest, dtype=torch.uint8)
            with self._channel.watched():
                transfer = dist.all_gather(
                    list(received.view(world_size, longest)), sent, group=self._channel.group, async_op=True
                )
        begins = offsets + longest * np.arange(world_size)
        starts = begins[:, :, np.newaxis] + np.cumsum(rows, axis=2) - rows
        mine = rank_of == plan.rank
        return InFlight(
            batch=batch,
            plan=plan,
            sent=sent,
            received=received,
            starts=starts[:, mine],
            sizes=rows[:, mine],
            channel=self._channel,
            transfer=transfer,
        )


EXCHANGES: dict[str, Callable[[Channel | None], Exchange]] = {
    "all-to-all": AllToAll,
    "all-gather": AllGather,
}
