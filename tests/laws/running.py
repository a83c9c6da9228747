"""Runs a job on all ranks and returns what each saw: in this process or, where they exchange samples, in one each."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import one_line
from evenrank.dataloader.balance.ranks import connection
from tests.dataloader.batch_helpers import ids_of
from tests.laws.data import Values
from tests.laws.kinds import make
from tests.laws.making import Job
from tests.ranks import RankPool

Pool = RankPool | None


class Seen(NamedTuple):
    """A batch."""

    epoch: int
    step: int
    position: int
    num_rows: int
    ids: list[int]
    ids_of_padding: list[int]
    plan_hash: int | None


def see(batch: Any) -> Seen:
    padding = batch.sample_ids[batch.num_real :].tolist()
    numbers = batch.epoch, batch.step, batch.position, batch.batch_size
    return Seen(*numbers, ids_of(batch), padding, batch.plan_hash)


def see_bits(batch: Any) -> list[Any]:
    """Return all of a batch, every bit of its tensors included, but not its step, which counts from a resumption on."""
    bits: list[Any] = [see(batch)._replace(step=0, plan_hash=None)]
    bits += [batch.loss_tokens, batch.world_loss_tokens, batch.dp_size, batch.max_lengths]
    for field, value in batch.tensors():
        parts = [value]
        if isinstance(value, KeyedJaggedTensor):
            bits.append(value.keys())
            parts = [value.values(), value.lengths(), value.weights_or_none()]
        bits += [(field, part.dtype, part.shape, part.numpy().tobytes()) for part in parts if part is not None]
    return bits


def see_values(batch: Any) -> list[tuple[int, Values]]:
    """Return the id and all values of each row, padding included, of every tensor of a batch."""
    rows: list[dict[str, bytes]] = [{} for _ in range(batch.batch_size)]
    for field, value in batch.tensors():
        if isinstance(value, KeyedJaggedTensor):
            for key, of_key in value.to_dict().items():
                of_rows: Sequence[Tensor] = torch.split(of_key.values(), of_key.lengths().tolist())
                for row, of_row in zip(rows, of_rows, strict=True):
                    row[f"{field}.{key}"] = of_row.numpy().tobytes()
        elif value is not None and field != "sample_ids":
            for row, of_row in zip(rows, value, strict=True):
                row[field] = of_row.numpy().tobytes()
    return list(zip(batch.sample_ids.tolist(), rows, strict=True))


class Ran(NamedTuple):
    """What a rank saw."""

    batches: list[Any]
    """Of its epochs, one after the other."""
    state: Mapping[str, Any]
    """After the last of these batches."""
    lengths: list[tuple[int | None, int]]
    """Per epoch: its batches as they were announced, and as they came."""


class Part(NamedTuple):
    """What part of its data a job sees."""

    state: Mapping[str, Any] | None = None
    """Where it begins."""
    epochs: int = 1
    stop: int | None = None
    """Steps after which it stops in each epoch; None: it does not."""
    ahead: int = 0
    """Steps that are pulled ahead of these, if there are any."""
    pause: float = 0.0
    """Seconds from one batch to the next."""


class _Rank:
    def __init__(self, data: Path, job: Job, part: Part) -> None:
        self._loader = make(data, job)
        self._part = part
        if part.state is not None:
            self._loader.load_state_dict(part.state)
        self.of_epochs: list[list[Any]] = []
        self.lengths: list[tuple[int | None, int]] = []

    def iterate(self) -> Iterator[None]:
        """Iterate, one step at a time."""
        for _ in range(self._part.epochs):
            batches, num_pulled = [], 0
            length = _remaining(self._loader)
            stop = self._part.stop and self._part.stop + self._part.ahead
            for batch in itertools.islice(iter(self._loader), stop):
                num_pulled += 1
                time.sleep(self._part.pause)
                if self._part.stop is None or num_pulled <= self._part.stop:
                    batches.append(batch)
                yield
            self.of_epochs.append(batches)
            self.lengths.append((length, num_pulled))

    def ran(self, see: Callable[[Any], Any], last: Any) -> Ran:
        """Return what it saw, with the state after a batch; None: before the first one."""
        batches = [see(batch) for of_epoch in self.of_epochs for batch in of_epoch]
        return Ran(batches, self._loader.state_dict(after=last), self.lengths)

    def close(self) -> None:
        if close := getattr(self._loader, "close", None):
            close()


def _remaining(loader: Any) -> int | None:
    try:
        return int(loader.remaining_batches())
    except (AttributeError, TypeError):
        return None


def run_rank(rank: int, world_size: int, data: Path, job: Job, part: Part, see: Callable[[Any], Any]) -> Ran:
    """Run a job in the process of one rank."""
    of_rank = _Rank(data, job.of(rank, world_size), part)
    for _ in of_rank.iterate():
        pass
    ran = of_rank.ran(see, next(reversed(of_rank.of_epochs[-1]), None))
    of_rank.close()
    return ran


WHOLE = Part()


def run(pool: Pool, data: Path, job: Job, part: Part = WHOLE, see: Callable[[Any], Any] = see) -> list[Ran]:
    """Run a job on all ranks; without a pool, in this process, where the ranks take turns."""
    if pool is not None:
        return pool.run(job.world_size, run_rank, data, job, part, see)
    ranks = [_Rank(data, job.of(rank, job.world_size), part) for rank in range(job.world_size)]
    for _ in itertools.zip_longest(*(rank.iterate() for rank in ranks)):
        pass
    # Ranks that ran out of data before the others ask for the state after the others' step.
    lasts = [rank.of_epochs[-1][-1] for rank in ranks if rank.of_epochs[-1]]
    last = max(lasts, key=lambda batch: batch.position, default=None)
    runs = [rank.ran(see, last) for rank in ranks]
    for rank in ranks:
        rank.close()
    return runs


def state_of(runs: Sequence[Ran]) -> Mapping[str, Any]:
    """Return the state of all ranks."""
    states = [ran.state for ran in runs]
    if "ranks" in states[0]:  # as torch.distributed.checkpoint joins them
        joined = {**states[0], "ranks": {name: text for state in states for name, text in state["ranks"].items()}}
        assert all({**state, "ranks": joined["ranks"]} == joined for state in states)
        return joined
    assert all(state == states[0] for state in states)
    return states[0]


def failure_of(rank: int, world_size: int, data: Path, job: Job) -> str:
    """Return the line of the error with which a job ends on a rank."""
    # Seconds, after which ranks that wait for the end of an epoch look whether another one has failed.
    with patch.object(connection, "_POLL", timedelta(seconds=0.05)):
        try:
            for _ in make(data, job.of(rank, world_size)):
                pass
        except Exception as error:
            return one_line(error)
    return "no error"
