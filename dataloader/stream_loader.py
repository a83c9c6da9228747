"""`build_stream_loader`: a dataset read sequentially -> this rank's batches, resumable on any number of ranks.

A step is the next world_size x batch_size rows of an order that all ranks compute alike (see `datasets.lanes`), of
which each rank reads its own. So (epoch, position) is the whole state, which is the same on all ranks.
"""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, overload

import numpy as np

from evenrank.core.errors import ConfigError, StateError
from evenrank.core.rules import Bounds, Seed
from evenrank.core.settings import check_types
from evenrank.dataloader.batches.batch import Batch, JaggedBatch
from evenrank.dataloader.collate.gather import StoreRows
from evenrank.dataloader.config import ReadConfig
from evenrank.dataloader.lane_reader import ReadRows, read_steps
from evenrank.dataloader.log_loader import LogLoader
from evenrank.dataloader.rank_loader import RankLoader, Transform, shared_settings
from evenrank.dataloader.routing.remap import DIST_TYPE, check_dist_type, dist_type
from evenrank.dataloader.state import checks
from evenrank.dataloader.state.checks import Epoch, Natural, StateFormat, Text
from evenrank.dataloader.state.resume_point import Position, ResumePoint
from evenrank.dataloader.workers import Workers
from evenrank.datasets.continuous_log import LogSource, open_log
from evenrank.datasets.lanes import EpochLanes, Span, num_lanes
from evenrank.datasets.order import EpochSchedule
from evenrank.datasets.stream import StreamConfig, StreamSource, open_stream

__all__ = ["StreamConfig", "StreamLoader", "build_stream_loader"]

_log = logging.getLogger("evenrank")

FORMAT = StateFormat(
    owner="the stream",
    version=4,
    fields={
        "epoch": Epoch,
        "position": Natural,
        "seed": Seed,
        "num_samples": Natural,
        "fingerprint": Text,
        checks.VOCABULARY: Text,
        DIST_TYPE: Text,
    },
    not_covered=frozenset({DIST_TYPE}),  # a remapped checkpoint has another one; it is compared with the job's
)
# Of one rank, or of all whose states were merged: after it, only another epoch can begin.
OF_SHARDS = StateFormat(
    owner="the stream",
    version=3,
    fields={
        "epoch": Epoch,
        "position": Annotated[int, Bounds(at_least=0, at_most=1 << 62)],
        "seed": Seed,
        "num_shards": Natural,
        "fingerprint": Text,
        checks.VOCABULARY: Text,
        "places": Mapping,
        DIST_TYPE: Text,
    },
    not_covered=frozenset({"places", DIST_TYPE}),
)


@overload
def build_stream_loader(
    url: Path | str,
    config: ReadConfig[Batch],
    stream: StreamConfig | None = None,
    *,
    rank: int,
    world_size: int,
    transform: Transform[Batch] | None = None,
    follow: Literal[False] = False,
) -> "StreamLoader[Batch]": ...


@overload
def build_stream_loader(
    url: Path | str | LogSource,
    config: ReadConfig[Batch],
    stream: StreamConfig | None = None,
    *,
    rank: int,
    world_size: int,
    transform: Transform[Batch] | None = None,
    follow: Literal[True],
) -> LogLoader[Batch]: ...


def build_stream_loader(
    url: Path | str | LogSource,
    config: ReadConfig[Batch],
    stream: StreamConfig | None = None,
    *,
    rank: int,
    world_size: int,
    transform: Transform[Batch] | None = None,
    follow: bool = False,
) -> "StreamLoader[Batch] | LogLoader[Batch]":
    """Open a dataset for sequential reading and return the loader of one rank.

    Args:
        url: of the dataset: a folder, or a URL that `open_stream` supports. With `follow` also a `LogSource`.
        config: the same on all ranks. Its order must be `shuffle`, or `rows` with `follow`; `drop_last` leaves out
            the last step if it does not fill all ranks; `num_workers` threads read the next window.
        stream: lanes and windows; the same on all ranks.
        rank: data-parallel rank of this process, 0..world_size-1.
        world_size: number of data-parallel ranks.
        transform: as in `build_loader`, but called by the consumer's thread; its generator also depends on the rank.
        follow: go on with the files that are added to the folder of the split, in the order of their names, and wait
            for more: see `LogLoader`.

    Raises:
        ConfigError: the rank or the order is not supported, or the settings do not fit the dataset.
        DataError: the dataset, or the file of codes, is missing or malformed.
    """
    check_types(build_stream_loader, locals())
    stream = StreamConfig() if stream is None else stream
    if follow:
        log = url if isinstance(url, LogSource) else open_log(url, config.split)
        return LogLoader(log, config, stream, rank=rank, world_size=world_size, transform=transform)
    if isinstance(url, LogSource):
        raise ConfigError("a log is read as it grows; pass follow=True")
    if config.order != "shuffle":
        raise ConfigError(f"streams are always shuffled; order must be 'shuffle', got {config.order!r}")
    source = open_stream(url, config.split)
    return StreamLoader(source, config, stream, rank=rank, world_size=world_size, transform=transform)


class StreamLoader(RankLoader[Batch]):
    """The batches of one rank; each iteration is one epoch. It is a torchdata node too.

    Every rank yields the same number of batches. Rows that are not samples are padding of their batches, see
    `num_real`, because which ones these are is known once they are read.

    Attributes:
        left_out: per reason, how many of the rows of this rank's batches are not samples.
    """

    def __init__(
        self,
        source: StreamSource,
        config: ReadConfig[Batch],
        stream: StreamConfig,
        *,
        rank: int,
        world_size: int,
        transform: Transform[Batch] | None = None,
    ) -> None:
        super().__init__(config, rank=rank, world_size=world_size, transform=transform, sources=[source])
        self._source = source
        self._stream = stream
        self._check_columns(source.read(0, 0))
        self._num_lanes = lanes = num_lanes(source.num_rows, stream.lanes, stream.window_rows)
        self.left_out: Counter[str] = Counter()
        if world_size > lanes and rank == 0:
            times = (lanes + world_size - math.gcd(lanes, world_size)) / lanes
            remedy = "set lanes to a multiple of the ranks" if lanes == stream.lanes else "lower window_rows"
            _log.warning("%d ranks share %d lanes and read rows %.1f times; %s", world_size, lanes, times, remedy)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return self._schedule(0).num_steps

    def remaining_batches(self) -> int:
        """Return the number of batches of the next iteration: fewer than an epoch's after `load_state_dict`."""
        return self._schedule(self._current.next.position).num_steps

    def _schedule(self, start: int) -> EpochSchedule:
        return EpochSchedule(
            num_samples=self._source.num_rows,
            world_size=self._world_size,
            batch_size=self._config.batch_size,
            start=start,
            drop_last=self._config.drop_last,
        )

    def __iter__(self) -> Iterator[Batch]:
        point, seed = self._current.begin(), self._current.seed
        epoch, schedule = point.epoch, self._schedule(point.position)
        sizes = {"max_lanes": self._num_lanes, "window_rows": self._stream.window_rows}
        order = EpochLanes(self._source.num_rows, **sizes, seed=seed, epoch=epoch)
        num_parts, ranks = max(1, self._config.num_workers), {"rank": self._rank, "world_size": self._world_size}
        try:
            with Workers(self._config.num_workers).open() as submit:
                steps = read_steps(order, schedule, read=self._read, submit=submit, num_parts=num_parts, **ranks)
                for step, (groups, sample_ids, left_out) in enumerate(steps):
                    self.left_out.update(left_out)
                    after = Position(epoch, schedule.position_after(step))
                    of_rank, of_step = groups or self._no_rows, {"step": step, **after._asdict()}
                    batch = self._make_batch(of_rank, sample_ids, seed, after.position, self._rank, **of_step)
                    self._current.after_last = after
                    yield batch
        finally:
            self._source.carried.clear()  # if not all of the epoch was read

    def _read(self, spans: list[Span]) -> ReadRows:
        """Read rows, and find those that are not samples."""
        store = self._source.read_spans(spans).remapped(self._config.key_maps)
        left_out = {}
        for reason, rows in self._collate.unusable(store).items():
            left_out[reason] = np.zeros(len(store), dtype=bool)
            left_out[reason][rows] = True
        return ReadRows(store, left_out)

    @cached_property
    def _no_rows(self) -> list[StoreRows]:
        """What a batch without samples is made of."""
        none = np.empty(0, dtype=np.int64)
        return [StoreRows(self._read([]).store, none, none)]

    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the position after the batch yielded last, or after another one.

        The state is the same on all ranks, and can be loaded with any world size, batch size and number of workers.
        """
        return FORMAT.make(
            **self._current.after(after)._asdict(),
            seed=self._current.seed,
            num_samples=self._source.num_rows,
            fingerprint=self._fingerprint,
            vocabulary=checks.vocabulary_entry(self._source.manifest.ids),
            dist_type=dist_type(self._config.key_maps),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, from the next iteration on, at the position that `state_dict` returned on any rank.

        Raises:
            StateError: the state is damaged, of another version, or of other data, filters, lanes or `key_maps`; to
                train on other data after it, or after a state of shards, call `begin_after`.
        """
        if _is_of_shards(state):
            raise StateError(
                f"the state of the stream has version {OF_SHARDS.version}, of shards, not of lanes; begin "
                "the next epoch with begin_after, or finish this one with the version of evenrank that saved it"
            )
        state = FORMAT.check(state)
        checks.check_vocabulary(state[checks.VOCABULARY], self._source.manifest.ids, source="the stream's state")
        if state["fingerprint"] != self._fingerprint:
            raise StateError(
                "the stream's state is of other data, codes, filters or lanes: it has fingerprint "
                f"{state['fingerprint'][:12]}, this stream {self._fingerprint[:12]}; load it with the dataset and the "
                "settings that it was saved with, or train on other data after it with begin_after"
            )
        position, num_rows = state["position"], self._source.num_rows
        if state["num_samples"] != num_rows or position > num_rows:
            raise StateError(
                f"the stream's state has position {position} of {state['num_samples']} rows, this stream {num_rows}; "
                "load a state that state_dict returned"
            )
        check_dist_type(state[DIST_TYPE], self._config.key_maps, source="the stream's state")
        self._current.seed = state["seed"]
        is_over = position > 0 and not self._schedule(position).num_steps
        self._current.move_to(ResumePoint(epoch=state["epoch"], start=position, position=position), is_over=is_over)

    def begin_after(self, state: Mapping[str, Any]) -> None:
        """Begin with the epoch after that of a state, which may be of another dataset; see `Loader.begin_after`."""
        state = (OF_SHARDS if _is_of_shards(state) else FORMAT).check(state)
        checks.check_vocabulary(state[checks.VOCABULARY], self._source.manifest.ids, source="the stream's state")
        check_dist_type(state[DIST_TYPE], self._config.key_maps, source="the stream's state", may_grow=True)
        self._current.start_epoch(state["epoch"] + 1)

    def _own_invariants(self) -> dict[str, Any]:
        return {**shared_settings(self._stream), "fingerprint": self._fingerprint}

    @cached_property
    def _fingerprint(self) -> str:
        """A hash of everything that decides on the samples and their order, besides the seed."""
        source, lanes = self._source, (self._num_lanes, self._stream.window_rows)
        decisive = (source.manifest.content_hash, source.split, *lanes, self._collate.filters())
        return hashlib.sha256(repr(decisive).encode()).hexdigest()


def _is_of_shards(state: object) -> bool:
    return isinstance(state, Mapping) and type(state.get("version")) is int and state["version"] == OF_SHARDS.version
