"""`LogLoader`: a log that grows -> this rank's batches, each record once, resumable on any number of ranks."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batches.batch import Batch
from evenrank.dataloader.collate.gather import StoreRows
from evenrank.dataloader.config import LoaderConfig
from evenrank.dataloader.rank_loader import RankLoader, Transform, shared_settings
from evenrank.dataloader.sampling.epoch_positions import ENDLESS
from evenrank.dataloader.sampling.steps import StepSamples
from evenrank.dataloader.state.checks import checksum
from evenrank.dataloader.state.resume_point import CurrentPosition, Position, ResumePoint
from evenrank.datasets.continuous_log import LogEnd, LogSource
from evenrank.datasets.schema import NUM_TARGETS
from evenrank.datasets.store import SequenceStore
from evenrank.datasets.stream import StreamConfig

_log = logging.getLogger("evenrank")

_FINGERPRINT = "log"  # its mark tells one from another
_NO_SAMPLES = StepSamples(np.empty(0, dtype=np.int64), {})


class LogLoader(RankLoader[Batch]):
    """The batches of one rank, of a log that grows; its one iteration waits for records until the log ends.

    A step is the next world_size x batch_size records, of which each rank gets consecutive ones; ranks wait until all
    of them are there. So the steps follow from the log alone: ranks have equally many, and the same state, without a
    collective. The last step of a log that has ended may have fewer records, and padding. The iterating thread reads;
    `num_workers` threads collate, and transform, up to as many steps ahead as have their records.
    """

    def __init__(
        self,
        source: LogSource,
        config: LoaderConfig,
        stream: StreamConfig,
        *,
        rank: int,
        world_size: int,
        transform: Transform[Batch] | None = None,
    ) -> None:
        if config.order != "rows":
            raise ConfigError(f"a log is read in its order; order must be 'rows', got {config.order!r}")
        super().__init__(
            config, source.manifest, rank=rank, world_size=world_size, transform=transform, sources=[source]
        )
        self._current = CurrentPosition(config.seed, has_epochs=False)
        self._samples = self._in_order(ENDLESS, _FINGERPRINT)
        self._source = source
        self._stream = stream
        self._columns: dict[str, str] = {}  # types of the records read last, by name
        self._check_columns(self._read(0, 0))
        self._left_out: Counter[str] = Counter()
        self._end = LogEnd(0, False)
        self._is_iterated = False

    def _num_steps(self, point: ResumePoint) -> int:
        raise TypeError(
            "a log grows, so its batches are not numbered before it ends; iterate over them without a length"
        )

    @property
    def num_samples(self) -> int:
        """A TypeError, because the log grows."""
        return self._num_steps(self._current.next)

    def _make_steps(self) -> Iterator[tuple[Batch, Position, StepSamples]]:
        if self._is_iterated:
            raise ConfigError(
                "a log is iterated over once; to go on, load_state_dict what state_dict(after=batch) says"
            )
        self._is_iterated = True
        point, seed, step = self._begin_epoch().point, self._current.seed, 0
        batch_size, ranks, position = self._config.batch_size, self._world_size, point.position
        ahead: deque[Callable[[], tuple[Batch, Counter[str]]]] = deque()
        with self._workers.open() as submit:
            while True:
                is_room = len(ahead) <= self._config.num_workers
                # Nothing that is made waits for records that are not there.
                num_records = self._wait_for(position, batch_size * ranks, at_once=bool(ahead)) if is_room else 0
                if num_records == batch_size * ranks or (num_records and not self._config.drop_last):
                    first, end = (position + num_records * rank // ranks for rank in (self._rank, self._rank + 1))
                    store, position = self._read(first, end), position + num_records
                    # Each rank numbers the records alone, and all should have the same mark.
                    plan_hash = int(checksum(self._place(Position(point.epoch, position))), 16) >> 1
                    of_step = {"epoch": point.epoch, "step": step, "position": position, "plan_hash": plan_hash}
                    ahead.append(submit(partial(self._make, store, first, seed, of_step)))
                    step += 1
                elif ahead:
                    batch, left_out = ahead.popleft()()
                    self._left_out.update(left_out)
                    yield batch, Position(batch.epoch, batch.position), _NO_SAMPLES
                else:
                    return

    def _make(self, store: SequenceStore, first: int, seed: int, of_step: dict[str, int]) -> tuple[Batch, Counter[str]]:
        """Return the batch of the records of a step, from `first` on, and how many of them are no samples."""
        left_out: Counter[str] = Counter()
        store = store.remapped(self._config.key_maps)
        is_sample = np.ones(len(store), dtype=np.bool_)
        for reason, unusable in self._collate.unusable(store).items():
            left_out[reason] += len(unusable)
            is_sample[unusable] = False
        rows = np.flatnonzero(is_sample)
        groups = [StoreRows(store, rows, np.arange(len(rows)))]
        return self._make_batch(groups, first + rows, seed, of_step["position"], self._rank, **of_step), left_out

    def _wait_for(self, position: int, max_records: int, *, at_once: bool) -> int:
        """Return the number of records of the next step: `max_records`, or what is left of a log that has ended.

        With `at_once`, 0 if they are not there yet.
        """
        is_waiting = False
        while (available := self._end.position - position) < max_records and not self._end.is_final:
            end = self._source.end()
            if not isinstance(end, LogEnd) or type(end.position) is not int or end.position < self._end.position:
                fault = f"{type(self._source).__name__}.end() returned {end!r} after position {self._end.position}"
                raise ConfigError(f"{fault}; return a LogEnd(position, is_final) whose integer position never falls")
            self._end = end
            if end.position - position < max_records and not end.is_final:
                if at_once:
                    return 0
                if not is_waiting:
                    _log.info("waiting for records of the log from %d on", end.position)
                is_waiting = True
                time.sleep(self._stream.poll_seconds)
        return min(available, max_records)

    def _read(self, first: int, end: int) -> SequenceStore:
        """Return records first..end-1, or raise a ConfigError if the source returns anything else."""
        store: object = self._source.read(first, end)
        returned = f"{type(self._source).__name__}.read({first}, {end}) returned"
        if not isinstance(store, SequenceStore):
            found = "None" if store is None else f"a {type(store).__name__}"
            raise ConfigError(f"{returned} {found}; return a SequenceStore, as rows_of_table does")
        if len(store) != end - first:
            raise ConfigError(f"{returned} {len(store)} records; return the {end - first} that are asked for")
        columns = {name: str(values.dtype) for name, values in store.columns.items()}
        if len(store):
            columns[NUM_TARGETS] = str(getattr(store.num_targets, "dtype", None))
            for name, dtype in self._columns.items():
                if columns.get(name) != dtype:
                    raise ConfigError(f"{returned} {name} as {columns.get(name)}, before as {dtype}; return the same")
        self._columns |= columns
        return store

    def _place(self, position: Position) -> str:
        mark: object = self._source.mark(position.position)
        if not (isinstance(mark, str) and mark.isprintable()):
            fault = f"{type(self._source).__name__}.mark({position.position}) returned {mark!r}"
            raise ConfigError(f"{fault}; return text of one line, or a state that has it could not be loaded")
        return mark

    def _go_to(self, position: Position, place: str) -> None:
        self._source.resume(position.position, place)
        self._end, self._is_iterated = LogEnd(position.position, False), False

    def begin_after(self, state: Mapping[str, Any]) -> None:
        """Begin with the first record, in the epoch after that of a state of a dataset; go on after one of this log.

        Raises:
            StateError: the state is damaged, or its ids or keys mean something else here, or it is of another log.
            DataError: the file that it is in was replaced or deleted.
        """
        left = self._left(state)
        epoch, position = left["epoch"] + 1, 0
        if "mark" in left or left["fingerprint"] == _FINGERPRINT:
            epoch, position = left["epoch"], left["position"]
        self._go_to(Position(epoch, position), left.get("mark", left.get("place", "")) if position else "")
        self._current.move_to(ResumePoint(epoch=epoch, start=position, position=position))

    def _own_invariants(self) -> dict[str, Any]:
        return {**shared_settings(self._stream), "log": self._source.manifest.content_hash}
