"""`LogLoader`: a log that grows -> this rank's batches, each record once, resumable on any number of ranks."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Seed
from evenrank.dataloader.batches.batch import Batch, JaggedBatch
from evenrank.dataloader.collate.gather import StoreRows
from evenrank.dataloader.config import ReadConfig
from evenrank.dataloader.rank_loader import RankLoader, Transform, shared_settings
from evenrank.dataloader.routing.remap import DIST_TYPE, check_dist_type, dist_type
from evenrank.dataloader.state import checks
from evenrank.dataloader.state.checks import Natural, StateFormat, Text, checksum
from evenrank.dataloader.state.resume_point import CurrentPosition, Position, ResumePoint
from evenrank.datasets.continuous_log import LogEnd, LogSource
from evenrank.datasets.schema import NUM_TARGETS
from evenrank.datasets.store import SequenceStore
from evenrank.datasets.stream import StreamConfig

_log = logging.getLogger("evenrank")

FORMAT = StateFormat(
    owner="the log's loader",
    version=1,
    fields={
        "epoch": Literal[0],
        "position": Natural,
        "seed": Seed,
        "mark": Text,
        checks.VOCABULARY: Text,
        DIST_TYPE: Text,
    },
    not_covered=frozenset({DIST_TYPE}),
)


class LogLoader(RankLoader[Batch]):
    """The batches of one rank, of a log that grows; its one iteration waits for records until the log ends.

    A step is the next world_size x batch_size records, of which each rank gets consecutive ones; ranks wait until all
    of them are there. So the steps follow from the log alone: ranks have equally many, and the same state, without a
    collective. The last step of a log that has ended may have fewer records, and padding. The iterating thread reads
    and collates; `num_workers` has no effect.

    Attributes:
        left_out: per reason, how many of the rows that this rank has read are not samples.
    """

    def __init__(
        self,
        source: LogSource,
        config: ReadConfig[Batch],
        stream: StreamConfig,
        *,
        rank: int,
        world_size: int,
        transform: Transform[Batch] | None = None,
    ) -> None:
        if config.order != "rows":
            raise ConfigError(f"a log is read in its order; order must be 'rows', got {config.order!r}")
        super().__init__(config, rank=rank, world_size=world_size, transform=transform, sources=[source])
        self._current = CurrentPosition(config.seed, has_epochs=False)
        self._source = source
        self._stream = stream
        self._columns: dict[str, str] = {}  # types of the records read last, by name
        self._check_columns(self._read(0, 0))
        self.left_out: Counter[str] = Counter()
        self._end = LogEnd(0, False)
        self._is_iterated = False

    def __iter__(self) -> Iterator[Batch]:
        if self._is_iterated:
            raise ConfigError(
                "a log is iterated over once; to go on, load_state_dict what state_dict(after=batch) says"
            )
        self._is_iterated = True
        position, step = self._current.next.position, 0
        batch_size, ranks = self._config.batch_size, self._world_size
        while num_records := self._wait_for(position, batch_size * ranks):
            if self._config.drop_last and num_records < batch_size * ranks:
                return
            first, end = (position + num_records * rank // ranks for rank in (self._rank, self._rank + 1))
            store = self._read(first, end).remapped(self._config.key_maps)
            rows = np.flatnonzero(self._find_samples(store, self.left_out))
            after, groups = position + num_records, [StoreRows(store, rows, np.arange(len(rows)))]
            # Each rank numbers the records alone, and all should have the same mark.
            of_step = {"step": step, "position": after, "plan_hash": int(checksum(self._source.mark(after)), 16) >> 1}
            batch = self._make_batch(groups, first + rows, self._current.seed, after, self._rank, epoch=0, **of_step)
            position, step = after, step + 1
            self._current.after_last = Position(0, after)
            yield batch

    def _wait_for(self, position: int, max_records: int) -> int:
        """Return the number of records of the next step: `max_records`, or what is left of a log that has ended."""
        is_waiting = False
        while (available := self._end.position - position) < max_records and not self._end.is_final:
            end = self._source.end()
            if not isinstance(end, LogEnd) or type(end.position) is not int or end.position < self._end.position:
                fault = f"{type(self._source).__name__}.end() returned {end!r} after position {self._end.position}"
                raise ConfigError(f"{fault}; return a LogEnd(position, is_final) whose integer position never falls")
            self._end = end
            if end.position - position < max_records and not end.is_final:
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

    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the position after the batch yielded last, or after another one: the same on all ranks.

        It can be loaded with any world size and batch size.
        """
        position = self._current.after(after).position
        return FORMAT.make(
            epoch=0,
            position=position,
            seed=self._current.seed,
            mark=self._source.mark(position),
            vocabulary=checks.vocabulary_entry(self._source.manifest.ids),
            dist_type=dist_type(self._config.key_maps),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, from the next iteration on, at the position of a state of any rank.

        Raises:
            StateError: the state is damaged, or of another log or of other `key_maps`.
            DataError: the file that it is in was replaced or deleted.
        """
        state = FORMAT.check(state)
        checks.check_vocabulary(state[checks.VOCABULARY], self._source.manifest.ids, source="the log's state")
        check_dist_type(state[DIST_TYPE], self._config.key_maps, source="the log's state")
        self._source.resume(state["position"], state["mark"])
        self._current.move_to(ResumePoint(position=state["position"]))
        self._current.seed, self._end, self._is_iterated = state["seed"], LogEnd(state["position"], False), False

    def _own_invariants(self) -> dict[str, Any]:
        return {**shared_settings(self._stream), "log": self._source.manifest.content_hash}
