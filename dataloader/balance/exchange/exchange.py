"""`Handle`: a step, from the loaded batch to the balanced one. `Exchange`: lays it out, moves it, makes the new batch.

    prepare    in the background: write the samples, by destination, to one host buffer, followed by what the host knows
               of the new batch, and the tiles of the copies that fill it
    launch     upload the host buffer, start the collective
    finish     wait for the collective, then copy received and kept samples to the new batch

On a GPU, launch and finish are enqueued on a side stream, and the host never waits. Device memory is taken from launch
on: twice a batch until finish, where the new batch takes its own.

Why this cannot deadlock: collectives are started on the consumer's thread, by `launch`, at one fixed point of each
`next()` of a Balancer. Between two such points the training loop starts its own collectives (gradients, sharded
embeddings) in an order that its program fixes. So all ranks start all collectives, on all communicators, in the same
order, which NCCL requires of communicators that are in use at the same time. On the device, a wait is always for work
that was enqueued earlier on the same rank: the exchange waits for earlier copies on the side stream and for the work
that was enqueued before the last batch was handed out; the training waits for a finished exchange. The first collective
of that common order that is not complete waits for no other collective on any rank, so it completes; then the next one.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.exchange.device import ALIGNMENT, ExchangeDevice, copy_ranges
from evenrank.dataloader.balance.exchange.fields import caches_of, make_fields, tensors_of, wire_format
from evenrank.dataloader.balance.exchange.layout import Layout, Sections, lay_out, new_rows, write_host_buffer
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics
from evenrank.dataloader.balance.ranks.connection import check_process
from evenrank.dataloader.balance.ranks.metadata import StepMetadata
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Work
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.schema import BatchSchema, describe_lengths
from evenrank.dataloader.batches.tensors import outside_inference_mode
from evenrank.dataloader.state.resume_point import Left

State = Literal["started", "launched", "finished"]


@dataclass(slots=True, eq=False)
class Handle:
    """A step between `Balancer.start` and `Balancer.finish`, which fill its fields. Buffers are uint8."""

    loaded: JaggedBatch | None
    """This rank's batch before balancing, on the CPU, until it is finished; None once the rank has no more."""
    error: Exception | None = None
    """What the loader has raised instead or, once the step is planned, what it ends with."""
    _: KW_ONLY
    process: int = field(default_factory=os.getpid, repr=False)
    """Id of the process that started it."""
    state: State = "started"
    group: "Future[Sequence[Handle]] | None" = field(default=None, init=False, repr=False)
    """From its start until it is awaited: what the steps that were started with it have become, planned in the
    background. Not longer, because they refer to one another."""

    known: StepMetadata = field(init=False, repr=False)
    """[W]: what all ranks know of it or, if it is made of several loaded steps, of the one in whose place it comes."""
    rows: NDArray[np.int64] | None = field(default=None, repr=False)
    """If it is made of n loaded steps: the rows of its samples, ascending, among those of all ranks, [W, n * B]."""
    fields: dict[str, Any] = field(default_factory=dict)
    """If it is: the fields of the new batch that differ from those of the loaded one, besides tensors."""
    left: Left | None = None
    """If it is: what is left after it."""
    metrics: StepMetrics | None = None
    """If they are measured; the times of the exchange are 0."""

    layout: Layout | None = field(default=None, repr=False)
    """What moves, once it is planned; None if no rank has batches left."""
    send_bytes: list[int] = field(default_factory=list, repr=False)
    """See `Layout`; as lists, made before the training thread needs them."""
    receive_bytes: list[int] = field(default_factory=list, repr=False)
    host_buffer: Tensor = field(init=False, repr=False)
    """[host_bytes], until it is finished, as the next ones: what this rank sends, and knows of the new batch."""
    make_batch: Callable[[Tensor], JaggedBatch] = field(init=False, repr=False)
    """Makes the new batch of the filled output buffer, [output_bytes]."""
    uploaded: Tensor = field(init=False, repr=False)
    """The host buffer on the device, once it is launched, as the next ones."""
    received: Tensor = field(init=False, repr=False)
    """What all ranks send, on the device."""
    work: Work | None = field(default=None, repr=False)
    """The collective, if the host must wait for it."""
    batch: JaggedBatch | None = None
    """The balanced batch, from its finish until it is handed out."""
    waited_seconds: float = 0.0
    """See `StepMetrics`, also for the next one."""
    exchange_seconds: float = 0.0

    def check(self, call: str, needed: State) -> None:
        """Raise a ConfigError unless a call comes after the one that it needs, and once."""
        if self.state != needed:
            found = "only started" if self.state == "started" else f"already {self.state}"
            raise ConfigError(f"{call}() needs a {needed} step; this step is {found}")

    def await_plan(self) -> None:
        """Wait until the step is planned and prepared, or raise its error."""
        check_process(self.process)
        if self.group is not None:
            self.group.result()
            self.group = None
        if self.error is not None:
            raise self.error


class Exchange:
    """Exchanges samples over a process group, with one collective a step, or none if the rank is alone.

    `collective` is `all-to-all` or `all-gather`, which give the same batches, bit for bit.
    """

    def __init__(self, collective: str, group: FailFastGroup, device: ExchangeDevice, *, rank: int) -> None:
        self._sends_all = collective == "all-gather" and not group.is_alone
        self._group = group
        self._device = device
        self._rank = rank

    def connect(self) -> None:
        """Compile kernels and connect all ranks, so that the first step does not wait for it.

        Collective: every rank must call this, on any thread.
        """
        device = self._device
        device.use_in_thread()
        splits = [ALIGNMENT] * self._group.world_size
        with device.side_stream():
            sent, received = (device.buffer(sum(splits)).zero_() for _ in range(2))
            self._wait(self._start(sent, splits[:1] if self._sends_all else splits, received, splits))
            device.warm_up(sent, received)
        device.hand_over((sent, received))
        device.synchronize()

    def prepare(
        self,
        step: Handle,
        batches: Sequence[JaggedBatch],
        schema: BatchSchema,
        rank_of: NDArray[np.int32],
        lengths: NDArray[np.int64],
    ) -> None:
        """Do all that needs no other rank and moves nothing on the device; on any thread.

        `rank_of` is who trains on each row of the n batches of each rank, [W, n * B], -1 for nobody; `lengths` are
        those of all ranks' rows, [W, K, n * B]. A batch may have fewer rows than B.
        """
        wire, tile_bytes, rank, first = wire_format(schema), self._device.tile_bytes, self._rank, batches[0]
        chosen = (rank_of, lengths) if len(batches) == 1 else chosen_rows(rank_of, lengths)
        rows = new_rows(wire.sections, *chosen, wire.num_rows, rank)
        if wire.padding is not None:
            wire.padding.fill(schema.jagged_keys, rows[-1], rows[0])
        layout = lay_out(wire.sections, *chosen, rows, rank, self._sends_all, tile_bytes)
        host_buffer = self._device.host_buffer(layout.host_bytes)
        tensors = [tensors_of(batch) for batch in batches]  # kept while their addresses are used
        addresses = np.array([[tensor.data_ptr() for tensor in of_batch] for of_batch in tensors], dtype=np.int64)
        own = addresses, lengths[rank], rank_of[rank]
        write_host_buffer(layout, wire.sections, *own, tile_bytes, host_buffer.numpy())
        fields = {
            **step.fields,
            "batch_size": wire.num_rows,
            "num_real": layout.num_real,
            "loss_tokens": layout.loss_tokens,
            "world_loss_tokens": layout.world_loss_tokens,
            "dp_size": len(rank_of),
            "max_lengths": dict(zip(schema.key_names, layout.max_lengths.tolist(), strict=True)),
        }
        sizes, caches = layout.views.tolist(), caches_of(wire, layout.length_per_key.tolist())

        def make_batch(output: Tensor) -> JaggedBatch:
            return first.replace(**fields, **make_fields(output, wire, sizes, caches))

        step.layout, step.host_buffer, step.make_batch = layout, host_buffer, make_batch
        step.send_bytes, step.receive_bytes = layout.send_bytes.tolist(), layout.receive_bytes.tolist()

    def launch(self, step: Handle) -> None:
        """Start the collective of a prepared step. Collective: every rank must call this, in the same order."""
        device = self._device
        with device.side_stream():
            step.uploaded = device.upload(step.host_buffer)
            step.received = device.buffer(sum(step.receive_bytes))
            # A collective occupies multiprocessors while it waits for other ranks. Right after the all-reduce of the
            # gradients, where a training step begins, no rank is far ahead, so it hardly waits.
            device.wait_for_training()
            step.work = self._start(step.uploaded, step.send_bytes, step.received, step.receive_bytes)

    def finish(self, step: Handle) -> None:
        """Wait for the collective and make the new batch; on a GPU the side stream waits, not the host."""
        if torch.is_inference_mode_enabled():  # a batch that is made during an evaluation may be trained after it
            with outside_inference_mode():
                self.finish(step)
            return
        device, layout = self._device, step.layout
        assert layout is not None
        with device.side_stream():
            self._wait(step.work)
            output = device.buffer(layout.output_bytes)
            device.copy(layout.copies, step.uploaded[layout.tiles :], (step.received, step.uploaded), output)
        device.hand_over((output,))
        step.batch, step.loaded, step.work = step.make_batch(output), None, None
        del step.host_buffer, step.make_batch, step.uploaded, step.received  # the caller may keep the step

    def _start(self, sent: Tensor, send_bytes: list[int], received: Tensor, receive_bytes: list[int]) -> Work | None:
        if (group := self._group).is_alone:
            return None
        sent, async_op = sent[: sum(send_bytes)], self._device.async_collectives
        if self._sends_all:
            return group.all_gather(received.split(receive_bytes), sent, async_op=async_op)
        return group.all_to_all(received, sent, receive_bytes, send_bytes, async_op=async_op)

    def _wait(self, work: Work | None) -> None:
        if work is not None:
            with self._group.guard():
                work.wait()


def chosen_rows(rank_of: NDArray[np.int32], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the rows that are trained, in their order: as many of each rank as of that with the most; see `prepare`.

    Most rows of several batches are trained in other steps.
    """
    is_chosen = rank_of >= 0
    chosen = np.argsort(~is_chosen, axis=1, kind="stable")[:, : max(1, int(is_chosen.sum(axis=1).max()))]
    return np.take_along_axis(rank_of, chosen, axis=1), np.take_along_axis(lengths, chosen[:, np.newaxis], axis=2)


def warm_up() -> None:
    """Call the compiled functions of an exchange once, with its dtypes; see that of `partition`."""
    none, one, rows = np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64), np.full((1, 1), -1, dtype=np.int32)
    no_bytes, no_fields = np.empty(0, dtype=np.uint8), np.empty((0, 3), dtype=np.int64)
    sections = Sections(none, none, none, one, no_bytes, no_fields, no_fields, -1, 0)
    lengths = np.zeros((1, 1, 1), dtype=np.int64)
    describe_lengths(lengths[0], 0)
    layout = lay_out(sections, rows, lengths, new_rows(sections, rows, lengths, 1, 0), 0, False, 0)
    no_tensors, buffer = none.reshape(1, 0), np.empty(layout.host_bytes, dtype=np.uint8)
    write_host_buffer(layout, sections, no_tensors, lengths[0], rows[0], 0, buffer)
    copy_ranges(np.empty((0, 4), dtype=np.int64), one, 0)
