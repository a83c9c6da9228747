"""Carries a plan out: packs what leaves, moves it in one collective, and unpacks what arrives into a batch.

An exchange begins in `launch` and ends in `finish`; between the two the collective is under way.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.balance.copying import as_bytes, copy_ranges
from evenrank.dataloader.balance.plan import Plan, Section, row_bytes
from evenrank.dataloader.batch import JaggedBatch, keyed_jagged_tensor, lengths_of, schema_of
from evenrank.datasets.errors import RankError

Batch = TypeVar("Batch", bound=JaggedBatch)


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
    transfer: Transfer | None  # None where nobody else takes part


class Exchange(Protocol):
    """A way to carry plans out."""

    def launch(self, batch: JaggedBatch, plan: Plan) -> InFlight:
        """Begin: pack the batch and start the collective. All ranks call it in the same order."""
        ...

    def finish(self, flight: InFlight) -> JaggedBatch:
        """Wait for the collective and return the new batch."""
        ...


@contextlib.contextmanager
def lost_ranks_reported() -> Iterator[None]:
    """Turn what a backend says when a rank has gone, or does not answer in time, into one line."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RankError(f"a rank has gone, or does not answer ({reason}); look for its own error") from error


class AllToAll:
    """One all-to-all a step carries every key and every dense field, as bytes.

    Args:
        group: the process group to use; None where there is no other rank.

    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def launch(self, batch: JaggedBatch, plan: Plan) -> InFlight:
        """Pack the batch and start the all-to-all."""
        sent = pack(batch, plan)
        if self._group is None:
            return InFlight(batch=batch, plan=plan, sent=sent, received=sent, transfer=None)
        received = torch.empty(int(plan.receive_bytes.sum()), dtype=torch.uint8)
        with lost_ranks_reported():
            transfer = dist.all_to_all_single(
                received,
                sent,
                output_split_sizes=plan.receive_bytes.tolist(),
                input_split_sizes=plan.send_bytes.tolist(),
                group=self._group,
                async_op=True,
            )
        return InFlight(batch=batch, plan=plan, sent=sent, received=received, transfer=transfer)

    def finish(self, flight: InFlight) -> JaggedBatch:
        """Wait for the all-to-all and unpack."""
        if flight.transfer is not None:
            with lost_ranks_reported():
                flight.transfer.wait()
        return unpack(flight.batch, flight.plan, flight.received)


EXCHANGES: dict[str, Callable[[dist.ProcessGroup | None], Exchange]] = {"all-to-all": AllToAll}


def pack(batch: JaggedBatch, plan: Plan) -> Tensor:
    """Copy the rows of a CPU batch into a send buffer, chunk after chunk: uint8 [sum of plan.send_bytes]."""
    buffer = torch.zeros(int(plan.send_bytes.sum()), dtype=torch.uint8)
    target = as_bytes(buffer)
    lengths = lengths_of(batch)
    destinations = np.repeat(np.arange(len(plan.send_counts)), plan.send_counts)
    first_of_chunk = np.cumsum(plan.send_counts) - plan.send_counts
    tensors = dict(batch.tensors())
    for _, group in itertools.groupby(enumerate(plan.sections), lambda pair: (pair[1].field, pair[1].is_weights)):
        begin = 0  # of the section's rows in their tensor: the keys of a field lie one behind the other
        for index, section in group:
            sizes = row_bytes(section, lengths)
            starts = begin + np.cumsum(sizes) - sizes
            begin += int(sizes.sum())
            moved = sizes[plan.send_rows]
            running = np.concatenate(([0], np.cumsum(moved)))
            within_chunk = running[:-1] - running[first_of_chunk[destinations]]
            copy_ranges(
                as_bytes(_storage(tensors[section.field], section)),
                target,
                starts[plan.send_rows],
                plan.send_offsets[index][destinations] + within_chunk,
                moved,
            )
    return buffer


def _storage(value: "KeyedJaggedTensor | Tensor | None", section: Section) -> Tensor:
    if isinstance(value, KeyedJaggedTensor):
        stored: Tensor = value.weights() if section.is_weights else value.values()
    else:
        assert value is not None  # a field that is None has no section
        stored = value
    return stored.contiguous()


def unpack(batch: Batch, plan: Plan, received: Tensor) -> Batch:
    """Build the new batch from a receive buffer; facts about the step stay those of the old one.

    What ranks sent lies in the buffer in ascending order of positions already, so a section of a chunk is one range.
    """
    source = as_bytes(received)
    schema = schema_of(batch)
    fields: dict[str, Any] = {}
    index = 0  # of the next section
    key = 0  # of the next row of the lengths
    for spec in schema.fields:
        if spec.dtype is None:
            continue
        if spec.keys is None:
            tensor = torch.full((batch.batch_size, *spec.shape), spec.fill, dtype=spec.dtype)
            _fill(tensor, source, plan, slice(index, index + 1))
            fields[spec.name] = tensor
            index += 1
            continue
        count = len(spec.keys)
        lengths = plan.lengths[key : key + count]
        key += count
        total = int(lengths.sum())
        values = torch.empty((total, *spec.shape), dtype=spec.dtype)
        _fill(values, source, plan, slice(index, index + count))
        index += count
        weights = None
        if spec.weights_dtype is not None:
            weights = torch.empty(total, dtype=spec.weights_dtype)
            _fill(weights, source, plan, slice(index, index + count))
            index += count
        counts = torch.from_numpy(lengths).to(spec.lengths_dtype).numpy()
        fields[spec.name] = keyed_jagged_tensor(spec.keys, values, counts, weights)
    return dataclasses.replace(
        batch,
        num_real=plan.num_real,
        loss_tokens=plan.loss_tokens,
        world_loss_tokens=plan.world_loss_tokens,
        max_lengths=schema.max_lengths(plan.lengths),
        **fields,
    )


def _fill(tensor: Tensor, source: NDArray[np.uint8], plan: Plan, sections: slice) -> None:
    """Copy sections, one behind the other, to the front of a tensor."""
    sizes = plan.receive_sizes[sections].reshape(-1)
    copy_ranges(source, as_bytes(tensor), plan.receive_offsets[sections].reshape(-1), np.cumsum(sizes) - sizes, sizes)
