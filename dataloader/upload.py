"""`Upload`: batches on the host -> the same batches on a device, made by the thread that makes batches.

A training thread that is bound by the host waits for every call between two steps, also for those that only enqueue
work: a copy of each tensor takes it several times as long as a thread that uploads one batch after another, whose code
and data stay in its core's caches. So a worker copies a batch as one buffer, on a stream of its own, waits until it is
on the device, and the training thread has nothing left to wait for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.exchange.device import addresses_of, copy_bytes, make_device
from evenrank.dataloader.balance.exchange.fields import WireFormat, caches_of, make_fields, tensors_of, wire_format
from evenrank.dataloader.balance.exchange.layout import Sections, output_parts, write_lengths
from evenrank.dataloader.batches.batch import Batch, JaggedBatch
from evenrank.dataloader.batches.schema import check_contents, schema_of


class Upload:
    """Uploads batches to a device. Any thread may call it; a ConfigError if there is no such device."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = make_device(device)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._device.device,)  # streams are of one process

    def __call__(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return batches on the device, once they are there; they share one buffer, which is copied at once."""
        if self._device.device.type == "cpu":
            return list(batches)
        read = [_read(batch) for batch in batches]
        ends = np.cumsum([of_batch.num_bytes for of_batch in read]).tolist()
        host_buffer = self._device.host_buffer(ends[-1])
        views = [
            of_batch.write(host_buffer.numpy()[end - of_batch.num_bytes : end])
            for of_batch, end in zip(read, ends, strict=True)
        ]
        self._device.use_in_thread()
        with self._device.side_stream():
            buffer = self._device.upload(host_buffer)
            torch.cuda.current_stream(self._device.device).synchronize()
        parts = buffer.split([of_batch.num_bytes for of_batch in read])
        return [
            batch.replace(
                **make_fields(
                    part, of_batch.wire, sizes, caches_of(of_batch.wire, of_batch.lengths.sum(axis=1).tolist())
                )
            )
            for batch, of_batch, part, sizes in zip(batches, read, parts, views, strict=True)
        ]

    def hand_out(self, batch: Batch) -> Batch:
        """Return an uploaded batch, whose memory the current stream uses from now on."""
        if self._device.device.type != "cpu":
            stream = torch.cuda.current_stream(self._device.device)
            for _, value in batch.tensors():
                if value is not None:
                    tensor: Tensor = value.values() if isinstance(value, KeyedJaggedTensor) else value
                    tensor.record_stream(stream)  # that of the buffer, which all tensors share
                    break
        return batch


class _Read(NamedTuple):
    """A batch on the host, and how it is laid out in a buffer."""

    wire: WireFormat
    lengths: NDArray[np.int64]  # [K, B]
    bounds: NDArray[np.int64]  # see `output_parts`
    num_bytes: int
    tensors: list[Tensor]

    def write(self, buffer: NDArray[np.uint8]) -> list[int]:
        """Fill a buffer, and return the elements of its views."""
        sizes = np.array([tensor.nbytes for tensor in self.tensors])
        views: list[int] = write_batch(
            self.wire.sections, self.bounds, addresses_of(self.tensors), sizes, self.lengths, buffer
        ).tolist()
        return views


def _read(batch: JaggedBatch) -> _Read:
    schema = schema_of(batch)
    wire, lengths = wire_format(schema), check_contents(batch, schema)
    _, bounds, _, num_bytes = output_parts(wire.sections, lengths)
    return _Read(wire, lengths, bounds, num_bytes, tensors_of(batch))


@compiled
def write_batch(
    sections: Sections,
    bounds: NDArray[np.int64],
    tensors: NDArray[np.int64],
    sizes: NDArray[np.int64],
    lengths: NDArray[np.int64],
    buffer: NDArray[np.uint8],
) -> NDArray[np.int64]:
    """Fill a buffer, laid out as by `output_parts`, and return the elements of its V views.

    Given the addresses of T contiguous tensors, [T], their bytes, [T], and the lengths of all keys, [K, B].
    """
    for tensor in range(len(tensors)):
        copy_bytes(buffer.ctypes.data + bounds[2 * tensor + 2], tensors[tensor], sizes[tensor])
    begin = 2 * len(tensors) + 2
    for i in range(len(sections.jagged_fields)):
        first_key, num_keys, length_bytes = sections.jagged_fields[i]
        write_lengths(lengths[first_key : first_key + num_keys].reshape(-1), length_bytes, buffer[bounds[begin] :])
        begin += 4
    views = np.empty(len(sections.views), dtype=np.int64)
    for view in range(len(views)):
        first, last, element_bytes = sections.views[view]
        views[view] = (bounds[last] - bounds[first]) // element_bytes
    return views
