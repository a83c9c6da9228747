"""Carries a plan out: packs what leaves, moves it in one collective, and unpacks what arrives into a batch.

An exchange begins in `launch` and ends in `finish`; between the two the collective is under way. On a GPU all of it is
enqueued on a side stream, and the host never waits.

Collectives are started on the consumer's thread, by `launch`, at one fixed point of each `next()` of a Balancer.
Between two of those points a training loop starts its own (gradients, sharded embeddings), in an order that its program
fixes. So all ranks start all collectives, on all communicators, in one order, as NCCL asks of communicators that are
used at the same time. None of them can wait for another's: each communicator has a stream of its own, and an all-to-all
here waits for nothing but the copies before it on the side stream, which wait for nobody.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from evenrank.dataloader.balance.carrier import Carrier
from evenrank.dataloader.balance.channel import Channel
from evenrank.dataloader.balance.packing import Arrivals, Rows, pack, rows_of, tensors_of, unpack
from evenrank.dataloader.balance.plan import Plan, lay_out, row_bytes
from evenrank.dataloader.batch import JaggedBatch


class Transfer(Protocol):
    """A collective that is under way."""

    def wait(self) -> Any:
        """Return once it is done; on a GPU, let the current stream wait for it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """A batch whose rows are on their way."""

    batch: JaggedBatch  # as it was before, on the CPU
    plan: Plan
    tensors: dict[tuple[str, bool], Tensor]  # of the batch, on the device
    sent: Tensor  # kept until the collective is done
    received: Tensor  # uint8
    arrived: Arrivals  # ranges of `received`
    stayed: Arrivals  # ranges of `tensors`
    transfer: Transfer | None  # None where nobody else takes part


class Exchange(Protocol):
    """A way to carry plans out; all give the same batches, bit for bit."""

    def launch(self, batch: JaggedBatch, plan: Plan) -> InFlight:
        """Begin: pack the batch and start the collective. All ranks call it in the same order."""
        ...

    def finish(self, flight: InFlight) -> JaggedBatch:
        """Wait for the collective, on a GPU without the host, and return the new batch."""
        ...


class _Exchange:
    """What both ways have in common.

    Args:
        channel: the process group to use; None where there is no other rank.
        carrier: the device.

    """

    def __init__(self, channel: Channel | None, carrier: Carrier) -> None:
        self._channel = channel
        self._carrier = carrier

    def finish(self, flight: InFlight) -> JaggedBatch:
        """Wait for the collective and unpack."""
        with self._carrier.beside("finish"):
            if self._channel is not None and flight.transfer is not None:
                with self._channel.watched():
                    flight.transfer.wait()
            batch = unpack(
                flight.batch,
                flight.plan,
                flight.tensors,
                flight.received,
                arrived=flight.arrived,
                stayed=flight.stayed,
                copy=self._carrier.copy,
            )
        return self._carrier.hand_over(batch)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._carrier.device)


class AllToAll(_Exchange):
    """One all-to-all a step carries every key and every dense field, as bytes: to each rank what it trains.

    What ranks sent lies in the buffer in ascending order of positions already, so a section of a chunk is one range.
    """

    def launch(self, batch: JaggedBatch, plan: Plan) -> InFlight:
        """Pack what leaves and start the all-to-all."""
        rows = rows_of(plan.sections, plan.dealt_lengths[plan.rank])
        with self._carrier.beside("launch"):
            tensors = self._carrier.bring(tensors_of(batch, plan.sections))
            sent = self._empty(int(plan.send_bytes.sum()))
            received = self._empty(int(plan.receive_bytes.sum()))
            self._carrier.copy(
                pack(
                    tensors,
                    plan.sections,
                    rows,
                    chosen=plan.send_rows,
                    counts=plan.send_counts,
                    offsets=plan.send_offsets,
                    buffer=sent,
                )
            )
            transfer = None
            if self._channel is not None:
                with self._channel.watched():
                    transfer = dist.all_to_all_single(
                        received,
                        sent,
                        output_split_sizes=plan.receive_bytes.tolist(),
                        input_split_sizes=plan.send_bytes.tolist(),
                        group=self._channel.group,
                        async_op=True,
                    )
        arrived, stayed = around_own_rows(plan, rows)
        return InFlight(
            batch=batch,
            plan=plan,
            tensors=tensors,
            sent=sent,
            received=received,
            arrived=arrived,
            stayed=stayed,
            transfer=transfer,
        )


def around_own_rows(plan: Plan, rows: Rows) -> tuple[Arrivals, Arrivals]:
    """Say where in each section goes what other ranks sent, and what stayed: sources ascend, this rank among them."""
    sizes = rows.sizes[:, plan.stay_rows]
    by_source = plan.receive_sizes.copy()  # [S, W]
    by_source[:, plan.rank] = sizes.sum(axis=1)
    begins = np.cumsum(by_source, axis=1) - by_source
    arrived = Arrivals(starts=plan.receive_offsets, targets=begins, sizes=plan.receive_sizes)
    within = np.cumsum(sizes, axis=1) - sizes
    targets = begins[:, plan.rank : plan.rank + 1] + within
    return arrived, Arrivals(starts=rows.starts[:, plan.stay_rows], targets=targets, sizes=sizes)


class AllGather(_Exchange):
    """One all-gather a step brings every rank all samples, of which it keeps its own.

    It moves W times as many bytes; on some networks with few ranks it is the quicker one all the same.
    """

    def launch(self, batch: JaggedBatch, plan: Plan) -> InFlight:
        """Pack the whole batch and start the all-gather."""
        rank_of, lengths = plan.rank_of, plan.dealt_lengths
        world_size, batch_size = rank_of.shape
        flat = lengths.transpose(1, 0, 2).reshape(lengths.shape[1], -1)
        sizes = np.zeros((len(plan.sections), world_size, batch_size), dtype=np.int64)
        for section, of_section in zip(plan.sections, sizes, strict=True):
            of_section[:] = np.where(rank_of >= 0, row_bytes(section, flat).reshape(rank_of.shape), 0)
        # Each rank's samples are a chunk; all are as long as the longest.
        chunks, offsets = lay_out(sizes.sum(axis=2))
        offsets -= np.cumsum(chunks) - chunks  # from the beginning of each chunk
        longest = int(chunks.max())
        with self._carrier.beside("launch"):
            tensors = self._carrier.bring(tensors_of(batch, plan.sections))
            sent = self._empty(longest)
            self._carrier.copy(
                pack(
                    tensors,
                    plan.sections,
                    rows_of(plan.sections, lengths[plan.rank]),
                    chosen=np.arange(batch.num_real),
                    counts=np.array([batch.num_real]),
                    offsets=offsets[:, plan.rank : plan.rank + 1],
                    buffer=sent,
                )
            )
            received, transfer = sent, None
            if self._channel is not None:
                received = self._empty(world_size * longest)
                with self._channel.watched():
                    transfer = dist.all_gather(
                        list(received.view(world_size, longest)), sent, group=self._channel.group, async_op=True
                    )
        begins = offsets + longest * np.arange(world_size)
        starts = begins[:, :, np.newaxis] + np.cumsum(sizes, axis=2) - sizes
        mine = rank_of == plan.rank
        arriving = sizes[:, mine]
        nothing = np.zeros((len(plan.sections), 0), dtype=np.int64)
        return InFlight(
            batch=batch,
            plan=plan,
            tensors=tensors,
            sent=sent,
            received=received,
            arrived=Arrivals(starts=starts[:, mine], targets=np.cumsum(arriving, axis=1) - arriving, sizes=arriving),
            stayed=Arrivals(starts=nothing, targets=nothing, sizes=nothing),
            transfer=transfer,
        )


EXCHANGES: dict[str, Callable[[Channel | None, Carrier], Exchange]] = {
    "all-to-all": AllToAll,
    "all-gather": AllGather,
}
