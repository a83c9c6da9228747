"""Carries a plan out: packs what leaves, moves it in one collective, and unpacks what arrives into a batch.

    prepare    in the background: the batch is written to one memory, with all that the device has to know of the plan
    launch     that memory is brought to the device, what leaves is packed, and the collective begins
    finish     what arrived, and what stayed, is copied to where it belongs; the new batch is views of that

On a GPU the last two are enqueued on a side stream, and the host never waits.

Collectives are started on the consumer's thread, by `launch`, at one fixed point of each `next()` of a Balancer.
Between two of those points a training loop starts its own (gradients, sharded embeddings), in an order that its program
fixes. So all ranks start all collectives, on all communicators, in one order, as NCCL asks of communicators that are
used at the same time. On a device, whatever waits for something waits for what was started before it on the same rank:
an exchange for the copies before it on the side stream, and for what the training had been given when the last batch
was handed out; the training for a finished exchange. The first collective in that one order which is not done yet waits
for no other, on any rank, so it gets done, and so do all.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from evenrank.dataloader.balance.carrier import Carrier
from evenrank.dataloader.balance.channel import Channel
from evenrank.dataloader.balance.copying import Copies
from evenrank.dataloader.balance.packing import NewBatch, Rows, build_batch, lay_out_batch, rows_of, write_batch
from evenrank.dataloader.balance.plan import Plan
from evenrank.dataloader.balance.routes import Route, all_gather_route, all_to_all_route, trial_route
from evenrank.dataloader.batch import JaggedBatch


class Transfer(Protocol):
    """A collective that is under way."""

    def wait(self) -> Any:
        """Return once it is done; on a GPU, let the current stream wait for it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A step that can be launched."""

    batch: JaggedBatch  # as it was before, on the CPU
    route: Route
    new: NewBatch
    placing: Copies  # from what arrived (0) and from the memory (1) to the new batch
    memory: Tensor  # uint8, of the host: the batch and the facts of the new one, then instructions
    splits: list[int]  # bytes of the memory: the batch and the facts, instructions to pack, instructions to place


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """A batch whose rows are on their way."""

    prepared: Prepared
    memory: Tensor  # on the device
    placing_code: Tensor  # a part of it
    sent: Tensor  # kept until the collective is done
    received: Tensor
    transfer: Transfer | None  # None where the host need not wait


class Exchange:
    """A way to carry plans out; all give the same batches, bit for bit.

    Args:
        channel: the process group to use; None where there is no other rank.
        carrier: the device.

    """

    def __init__(self, channel: Channel | None, carrier: Carrier) -> None:
        self._channel = channel
        self._carrier = carrier

    def connect(self) -> None:
        """Compile and connect, so that the first step does not wait for that. All ranks call it alike."""
        world_size = 1 if self._channel is None else dist.get_world_size(self._channel.group)
        route = self._trial(world_size)
        with self._carrier.beside("connect"):
            code = torch.from_numpy(self._carrier.instructions(route.packing))
            memory, sent = self._empty(route.sent_bytes), self._empty(route.sent_bytes)
            received = self._empty(route.received_bytes)
            self._carrier.copy(route.packing, code.to(self._carrier.device), (memory,), sent)
            transfer = self._begin(route, sent, received)
            self._await(transfer)
        self._carrier.hand_over((memory, sent, received))
        if self._carrier.device.type == "cuda":
            torch.cuda.synchronize(self._carrier.device)

    def prepare(self, batch: JaggedBatch, plan: Plan) -> Prepared:
        """Do all that needs neither the device nor other ranks."""
        rows = rows_of(plan.sections, plan.dealt_lengths[plan.rank], batch.num_real)
        route = self._route(plan, rows)
        new = lay_out_batch(plan)
        facts_at = len(rows)
        from_facts = dataclasses.replace(new.copies, starts=new.copies.starts + facts_at)
        placing = Copies.joined([route.place(new.rows), from_facts])
        codes = [self._carrier.instructions(copies) for copies in (route.packing, placing)]
        splits = [facts_at + len(new.facts), *map(len, codes)]
        memory = self._carrier.host_memory(sum(splits))
        write_batch(batch, plan.sections, rows, memory)
        data = memory.numpy()
        data[facts_at:] = np.concatenate([new.facts, *codes])
        return Prepared(
            batch=batch,
            route=route,
            new=new,
            placing=placing,
            memory=memory,
            splits=splits,
        )

    def launch(self, prepared: Prepared) -> InFlight:
        """Begin. All ranks call it in the same order."""
        route = prepared.route
        with self._carrier.beside("launch"):
            memory = self._carrier.bring(prepared.memory)
            # A collective holds multiprocessors while it waits for other ranks. At the beginning of a training step,
            # after the gradients' all-reduce, no rank is far ahead, so that is where it starts.
            self._carrier.await_training()
            sent, received = self._empty(route.sent_bytes), self._empty(route.received_bytes)
            _, packing_code, placing_code = memory.split_with_sizes(prepared.splits)
            self._carrier.copy(route.packing, packing_code, (memory,), sent)
            transfer = self._begin(route, sent, received)
        return InFlight(
            prepared=prepared,
            memory=memory,
            placing_code=placing_code,
            sent=sent,
            received=received,
            transfer=transfer,
        )

    def finish(self, flight: InFlight) -> JaggedBatch:
        """Wait for the collective, on a GPU without the host, and return the new batch."""
        prepared = flight.prepared
        new = prepared.new
        with self._carrier.beside("finish"):
            self._await(flight.transfer)
            made = self._empty(new.size)
            received = flight.received if self._channel is not None else flight.sent
            self._carrier.copy(prepared.placing, flight.placing_code, (received, flight.memory), made)
        self._carrier.hand_over((made,))
        return build_batch(prepared.batch, new, made)

    def _begin(self, route: Route, sent: Tensor, received: Tensor) -> Transfer | None:
        if self._channel is None:
            return None
        with self._channel.watched():
            return self._start(route, sent, received, self._channel)

    def _await(self, transfer: Transfer | None) -> None:
        if self._channel is not None and transfer is not None:
            with self._channel.watched():
                transfer.wait()

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._carrier.device)

    def _trial(self, world_size: int) -> Route:
        raise NotImplementedError

    def _route(self, plan: Plan, rows: Rows) -> Route:
        raise NotImplementedError

    def _start(self, route: Route, sent: Tensor, received: Tensor, channel: Channel) -> Transfer | None:
        raise NotImplementedError


class AllToAll(Exchange):
    """One all-to-all a step carries every key and every dense field, as bytes: to each rank what it trains."""

    def _trial(self, world_size: int) -> Route:
        return trial_route(world_size, world_size)

    def _route(self, plan: Plan, rows: Rows) -> Route:
        return all_to_all_route(plan, rows)

    def _start(self, route: Route, sent: Tensor, received: Tensor, channel: Channel) -> Transfer | None:
        transfer: Transfer | None = dist.all_to_all_single(
            received,
            sent,
            route.received_splits,
            route.sent_splits,
            group=channel.group,
            async_op=self._carrier.waits,
        )
        return transfer


class AllGather(Exchange):
    """One all-gather a step brings every rank all samples, of which it keeps its own.

    It moves W times as many bytes; on some networks with few ranks it is the quicker one all the same.
    """

    def _trial(self, world_size: int) -> Route:
        return trial_route(1, world_size)

    def _route(self, plan: Plan, rows: Rows) -> Route:
        return all_gather_route(plan, rows)

    def _start(self, route: Route, sent: Tensor, received: Tensor, channel: Channel) -> Transfer | None:
        chunks = list(received.split(route.received_splits))
        transfer: Transfer | None = dist.all_gather(chunks, sent, group=channel.group, async_op=self._carrier.waits)
        return transfer


EXCHANGES: dict[str, Callable[[Channel | None, Carrier], Exchange]] = {
    "all-to-all": AllToAll,
    "all-gather": AllGather,
}
