"""`Exchange`: carries out a plan. Packs what a rank sends, moves it in one collective, unpacks it into a batch.

    prepare    in the background: write the batch to one host buffer, followed by the descriptors of all copies, and
               create the tensors of the new batch as views of a buffer that is not filled yet
    launch     upload the host buffer, pack the send buffer, start the collective
    finish     wait for the collective, then copy received and kept samples to the new batch

On a GPU, launch and finish are enqueued on a side stream, and the host never waits.

Why this cannot deadlock: collectives are started on the consumer's thread, by `launch`, at one fixed point of each
`next()` of a Balancer. Between two such points the training loop starts its own collectives (gradients, sharded
embeddings) in an order that its program fixes. So all ranks start all collectives, on all communicators, in the same
order, which NCCL requires of communicators that are in use at the same time. On the device, a wait is always for work
that was enqueued earlier on the same rank: the exchange waits for earlier copies on the side stream and for the work
that was enqueued before the last batch was handed out; the training waits for a finished exchange. The first collective
of that common order that is not complete waits for no other collective on any rank, so it completes; then the next one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenrank.dataloader.balance.exchange.batch_buffer import lay_out_output, lay_out_rows, output_fields, write_batch
from evenrank.dataloader.balance.exchange.collectives import Collective, CollectiveLayout, warmup_layout
from evenrank.dataloader.balance.exchange.cpu_copy import ByteCopies
from evenrank.dataloader.balance.exchange.device import ExchangeDevice
from evenrank.dataloader.balance.exchange.plan import Plan
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Work
from evenrank.dataloader.batches.batch import JaggedBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedStep:
    """A step that can be launched, once. Buffers are uint8, on the device except for `host_buffer`."""

    layout: CollectiveLayout  # buffers of the collective
    unpack: ByteCopies  # from the receive buffer (source 0) and the device buffer (source 1) to the output buffer
    host_buffer: Tensor  # the loaded batch, the host data of the new one, and the descriptors of the two copies
    device_buffer: Tensor  # target of the upload of `host_buffer`
    descriptors: tuple[Tensor, Tensor]  # to pack and to unpack: parts of the device buffer
    send_buffer: Tensor
    receive_buffer: Tensor
    output_buffer: Tensor  # the new batch
    loaded_batch: JaggedBatch  # the batch before balancing, on the CPU
    new_fields: dict[str, Any]  # fields of the new batch that differ: views of the output buffer, not filled yet

    def balanced_batch(self) -> JaggedBatch:
        """Return the new batch; its tensors hold their values once the exchange is finished."""
        return self.loaded_batch.replace(**self.new_fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInFlight:
    """A launched step."""

    prepared: PreparedStep
    work: Work | None  # the collective, if the host must wait for it


class Exchange:
    """Carries out plans over a process group, with one collective; `group` is None if there is only one rank."""

    def __init__(
        self, collective: Collective, group: FailFastGroup | None, device: ExchangeDevice, *, world_size: int
    ) -> None:
        self._collective = collective
        self._group = group
        self._device = device
        self._world_size = world_size

    def connect(self) -> None:
        """Compile kernels and connect all ranks, so that the first step does not wait for it.

        Collective: every rank must call this, on any thread.
        """
        device = self._device
        device.use_in_thread()
        layout = warmup_layout(self._collective, self._world_size)
        with device.side_stream("connect"):
            descriptors = torch.from_numpy(device.descriptors(layout.pack)).to(device.device)
            source, send_buffer = device.buffer(sum(layout.send_splits)), device.buffer(sum(layout.send_splits))
            receive_buffer = device.buffer(sum(layout.receive_splits))
            device.copy(layout.pack, descriptors, (source,), send_buffer)
            self._wait(self._start(layout, send_buffer, receive_buffer))
        device.hand_over((source, send_buffer, receive_buffer))
        if device.device.type == "cuda":
            torch.cuda.synchronize(device.device)

    def prepare(self, batch: JaggedBatch, plan: Plan) -> PreparedStep:
        """Do all that needs no other rank and moves nothing on the device; on any thread."""
        device = self._device
        rows = lay_out_rows(plan.sections, plan.world_lengths[plan.rank], batch.num_real)
        batch_bytes = rows.total_bytes
        output = lay_out_output(plan, batch_bytes)
        layout = self._collective.layout(plan, rows, output.rows)
        unpack = ByteCopies.concatenate([layout.unpack, output.host_copies])
        descriptors = [device.descriptors(copies) for copies in (layout.pack, unpack)]
        splits = [batch_bytes + len(output.host_data), *map(len, descriptors)]
        host_buffer = device.host_buffer(sum(splits))
        write_batch(batch, plan.sections, rows, host_buffer)
        host_buffer.numpy()[batch_bytes:] = np.concatenate([output.host_data, *descriptors])
        device_buffer = device.upload_buffer(host_buffer)
        send_buffer, output_buffer = device.buffer(sum(layout.send_splits)), device.buffer(output.total_bytes)
        receive_buffer = send_buffer if self._group is None else device.buffer(sum(layout.receive_splits))
        _, pack_descriptors, unpack_descriptors = device_buffer.split_with_sizes(splits)
        return PreparedStep(
            layout=layout,
            unpack=unpack,
            host_buffer=host_buffer,
            device_buffer=device_buffer,
            descriptors=(pack_descriptors, unpack_descriptors),
            send_buffer=send_buffer,
            receive_buffer=receive_buffer,
            output_buffer=output_buffer,
            loaded_batch=batch,
            new_fields=output_fields(output_buffer, output),
        )

    def launch(self, step: PreparedStep) -> StepInFlight:
        """Start a step. Collective: every rank must call this, in the same order."""
        device = self._device
        with device.side_stream("launch"):
            device.upload(step.host_buffer, step.device_buffer)
            # A collective occupies multiprocessors while it waits for other ranks. Right after the all-reduce of the
            # gradients, where a training step begins, no rank is far ahead, so it hardly waits.
            device.wait_for_training()
            device.copy(step.layout.pack, step.descriptors[0], (step.device_buffer,), step.send_buffer)
            work = self._start(step.layout, step.send_buffer, step.receive_buffer)
        return StepInFlight(prepared=step, work=work)

    def finish(self, in_flight: StepInFlight) -> None:
        """Wait for the collective and fill the new batch; on a GPU the side stream waits, not the host."""
        device, step = self._device, in_flight.prepared
        sources = (step.receive_buffer, step.device_buffer)
        with device.side_stream("finish"):
            self._wait(in_flight.work)
            device.copy(step.unpack, step.descriptors[1], sources, step.output_buffer)
        device.hand_over((step.output_buffer,))

    def _start(self, layout: CollectiveLayout, send_buffer: Tensor, receive_buffer: Tensor) -> Work | None:
        if (group := self._group) is None:
            return None
        async_op = self._device.async_collectives
        return self._collective.start(layout, send_buffer, receive_buffer, group, async_op=async_op)

    def _wait(self, work: Work | None) -> None:
        if self._group is not None and work is not None:
            with self._group.guard():
                work.wait()
