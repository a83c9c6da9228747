"""Carries a plan out: packs what leaves, moves it in one collective, and unpacks what arrives into a batch.

    prepare    in the background: the batch is written to one memory, with all that the device has to know of the plan,
               and the new batch's tensors are made: views of a memory that is still to be filled
    launch     the first memory is brought to the device, what leaves is packed, and the collective begins
    finish     what arrived, and what stayed, is copied to where it belongs

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

from evenrank.dataloader.balance.control.process_group import Channel
from evenrank.dataloader.balance.exchange.batch_buffer import Rows, fields_in, lay_out_batch, rows_of, write_batch
from evenrank.dataloader.balance.exchange.byte_copy import Copies
from evenrank.dataloader.balance.exchange.collectives import Route, all_gather_route, all_to_all_route, trial_route
from evenrank.dataloader.balance.exchange.device import Carrier
from evenrank.dataloader.balance.exchange.plan import Plan
from evenrank.dataloader.batch import JaggedBatch


class Transfer(Protocol):
    """A collective that is under way, for which the host has to wait."""

    def wait(self) -> Any:
        """Return once it is done."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A step that can be launched, once. Memories are uint8, and on the device but for one."""

    route: Route
    placing: Copies  # from what arrived (0) and from the memory (1) to the new batch
    host: Tensor  # memory of the host: the batch and the facts of the new one, then instructions
    memory: Tensor  # room for it
    packing_code: Tensor  # a part of that
    placing_code: Tensor  # likewise
    sent: Tensor
    received: Tensor
    made: Tensor
    batch: JaggedBatch  # as it was before, on the CPU
    fields: dict[str, Any]  # what the new one has instead: views of `made`, which is still to be filled

    def balanced(self) -> JaggedBatch:
        """Return the new batch, once it is finished."""
        return dataclasses.replace(self.batch, **self.fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """A batch whose rows are on their way."""

    prepared: Prepared
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
            memory, sent = self._carrier.empty(route.sent_bytes), self._carrier.empty(route.sent_bytes)
            received = self._carrier.empty(route.received_bytes)
            self._carrier.copy(route.packing, code.to(self._carrier.device), (memory,), sent)
            transfer = self._begin(route, sent, received)
            self._await(transfer)
        self._carrier.hand_over((memory, sent, received))
        if self._carrier.device.type == "cuda":
            torch.cuda.synchronize(self._carrier.device)

    def prepare(self, batch: JaggedBatch, plan: Plan) -> Prepared:
        """Do all that needs no other ranks, and moves nothing on the device; on any thread."""
        rows = rows_of(plan.sections, plan.dealt_lengths[plan.rank], batch.num_real)
        route = self._route(plan, rows)
        new = lay_out_batch(plan)
        facts_at = len(rows)
        from_facts = dataclasses.replace(new.copies, starts=new.copies.starts + facts_at)
        placing = Copies.joined([route.place(new.rows), from_facts])
        codes = [self._carrier.instructions(copies) for copies in (route.packing, placing)]
        splits = [facts_at + len(new.facts), *map(len, codes)]
        host = self._carrier.host_memory(sum(splits))
        write_batch(batch, plan.sections, rows, host)
        host.numpy()[facts_at:] = np.concatenate([new.facts, *codes])
        memory = self._carrier.room_for(host)
        sent, made = self._carrier.empty(route.sent_bytes), self._carrier.empty(new.size)
        received = sent if self._channel is None else self._carrier.empty(route.received_bytes)
        _, packing_code, placing_code = memory.split_with_sizes(splits)
        return Prepared(
            route=route,
            placing=placing,
            host=host,
            memory=memory,
            packing_code=packing_code,
            placing_code=placing_code,
            sent=sent,
            received=received,
            made=made,
            batch=batch,
            fields=fields_in(made, new),
        )

    def launch(self, prepared: Prepared) -> InFlight:
        """Begin. All ranks call it in the same order."""
        with self._carrier.beside("launch"):
            self._carrier.bring(prepared.host, prepared.memory)
            # A collective holds multiprocessors while it waits for other ranks. At the beginning of a training step,
            # after the gradients' all-reduce, no rank is far ahead, so that is where it starts.
            self._carrier.await_training()
            self._carrier.copy(prepared.route.packing, prepared.packing_code, (prepared.memory,), prepared.sent)
            transfer = self._begin(prepared.route, prepared.sent, prepared.received)
        return InFlight(prepared=prepared, transfer=transfer)

    def finish(self, flight: InFlight) -> None:
        """Wait for the collective, and fill the new batch; on a GPU without the host."""
        prepared = flight.prepared
        with self._carrier.beside("finish"):
            self._await(flight.transfer)
            sources = prepared.received, prepared.memory
            self._carrier.copy(prepared.placing, prepared.placing_code, sources, prepared.made)
        self._carrier.hand_over((prepared.made,))

    def _begin(self, route: Route, sent: Tensor, received: Tensor) -> Transfer | None:
        if self._channel is None:
            return None
        with self._channel.watched():
            return self._start(route, sent, received, self._channel)

    def _await(self, transfer: Transfer | None) -> None:
        if self._channel is not None and transfer is not None:
            with self._channel.watched():
                transfer.wait()

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
