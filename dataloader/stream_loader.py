"""`build_stream_loader`: a dataset read sequentially -> this rank's batches, resumable on any number of ranks.

Shards are distributed over ranks. A rank reads `open_shards` of its shards at a time, and takes the samples of a batch
from all open ones. The next batches depend only on the position in each shard. So a state has these positions for the
shards of one rank, and `merge_stream_states` joins the states of all ranks.
"""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, overload

import numpy as np

from evenrank.core.errors import ConfigError, StateError
from evenrank.core.rules import Bounds, Seed
from evenrank.core.settings import check_types, show
from evenrank.dataloader.batches.batch import Batch, JaggedBatch
from evenrank.dataloader.config import ReadConfig
from evenrank.dataloader.log_loader import LogLoader
from evenrank.dataloader.rank_loader import RankLoader, Transform, shared_settings
from evenrank.dataloader.routing.remap import DIST_TYPE, check_dist_type, dist_type
from evenrank.dataloader.state import checks
from evenrank.dataloader.state.checks import Epoch, Natural, StateFormat, Text, check_intact, check_saved, checksum
from evenrank.dataloader.state.resume_point import Position, ResumePoint, Snapshots
from evenrank.dataloader.stream_shuffle import ShardPosition, ShardReader, Window, take_batches
from evenrank.dataloader.workers import Workers
from evenrank.datasets.continuous_log import LogSource, open_log
from evenrank.datasets.order import permute
from evenrank.datasets.stream import Shard, StreamConfig, StreamSource, cut_shards, open_stream

__all__ = ["StreamConfig", "StreamLoader", "build_stream_loader"]

# Steps whose positions are kept for `state_dict`: more than pipelines and a Balancer together pull ahead.
_KEPT_STEPS = 256

ShardPositions = dict[int, ShardPosition]  # by index of the shard

FORMAT = StateFormat(
    owner="the stream",
    version=3,
    fields={
        "epoch": Epoch,
        "position": Annotated[int, Bounds(at_least=0, at_most=1 << 62)],  # to which an epoch's steps are added
        "seed": Seed,
        "num_shards": Natural,
        "fingerprint": Text,
        checks.VOCABULARY: Text,
        "places": Mapping,  # the positions, by shard
        DIST_TYPE: Text,
    },
    # Positions of all ranks are merged, so each has a checksum of its own; dist_type is compared with the job's.
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
        config: the same on all ranks. Its order must be `shuffle`, or `rows` with `follow`; `drop_last` leaves out a
            rank's last batch if it is not full; `num_workers` threads read windows ahead.
        stream: shards and buffers; the same on all ranks.
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

    Ranks may yield different numbers of batches; a Balancer handles that.

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
        self._shards = cut_shards(source.num_rows, stream)
        self._left_out: Counter[str] = Counter()
        self._snapshots: Snapshots[ShardPositions] = Snapshots(_KEPT_STEPS)  # by position in steps

    def __iter__(self) -> Iterator[Batch]:
        point, seed = self._current.begin(), self._current.seed
        epoch, position = begin = Position(point.epoch, point.position)
        shards = self._shards_of(self._rank, epoch, seed)
        of_all = self._shard_positions(begin)
        shard_positions = {shard.index: of_all[shard.index] for shard in shards}
        self._snapshots.add(begin, dict(shard_positions))
        batch_size = self._config.batch_size
        with Workers(self._config.num_workers).open() as submit:

            def read(shard: Shard, window_position: int) -> Callable[[], Window]:
                return submit(partial(self._load, shard, window_position, seed=seed, epoch=epoch))

            left = (shard for shard in shards if shard_positions[shard.index].windows_done < shard.num_windows)
            readers = (ShardReader(shard, shard_positions[shard.index], read) for shard in left)
            samples = take_batches(readers, self._stream.open_shards, batch_size, shard_positions)
            for step, (groups, sample_ids) in enumerate(samples):
                if self._config.drop_last and len(sample_ids) < batch_size:
                    return
                after = Position(epoch, position + step + 1)
                of_step: dict[str, Any] = {"step": step, **after._asdict()}
                batch = self._make_batch(groups, sample_ids, seed, after.position, self._rank, **of_step)
                self._snapshots.add(after, dict(shard_positions))
                self._current.after_last = after
                yield batch

    def _make_steps(self) -> Any: ...
    def _num_steps(self, point: ResumePoint) -> int:
        raise TypeError("which rows are samples is known once they are read")

    def _state(self, after: Any) -> dict[str, Any]:
        return self.state_dict()

    def _shards_of(self, rank: int, epoch: int, seed: int) -> list[Shard]:
        """Return a rank's shards of an epoch, in the order in which it opens them."""
        order = permute(np.arange(len(self._shards)), len(self._shards), seed=seed, epoch=epoch)
        return [self._shards[index] for index in order[rank :: self._world_size].tolist()]

    def _shard_positions(self, position: Position) -> ShardPositions:
        """Return the positions in all shards at the begin of an epoch or, later, in those that are known."""
        if not position.position:
            return dict.fromkeys(range(len(self._shards)), ShardPosition())
        return self._snapshots.at(position)

    def _load(self, shard: Shard, window_position: int, *, seed: int, epoch: int) -> Window:
        """Read a window and leave out the rows that are not samples."""
        first, order = shard.window(window_position, seed=seed, epoch=epoch)
        store = self._source.read(first, first + len(order)).remapped(self._config.key_maps)
        return Window(store, first, order[self._find_samples(store, self._left_out)[order]])

    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the positions in this rank's shards after the batch yielded last, or after another one.

        Merged with the states of all other ranks (see `merge_stream_states`), it can be loaded with any world size,
        batch size and number of workers. Before the first batch it has the positions in all shards.

        Raises:
            StateError: the batch was yielded too long ago.
        """
        position = self._current.after(after)
        places = self._shard_positions(position)
        return FORMAT.make(
            **position._asdict(),
            seed=self._current.seed,
            num_shards=len(self._shards),
            fingerprint=self._fingerprint,
            vocabulary=checks.vocabulary_entry(self._source.manifest.ids),
            places=encode_positions(places, fingerprint=self._fingerprint, epoch=position.epoch),
            dist_type=dist_type(self._config.key_maps),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, from the next iteration on, at the positions of the merged states of all ranks.

        On the same number of ranks, each of them may also load the state that it saved itself.

        Raises:
            StateError: the state lacks shards, is of another version, or of other data, filters, shards or `key_maps`.
        """
        state = FORMAT.check(state)
        checks.check_vocabulary(state[checks.VOCABULARY], self._source.manifest.ids, source="the stream's state")
        if state["fingerprint"] != self._fingerprint:
            raise StateError(
                "the stream's state is of other data, codes, filters or shards: it has fingerprint "
                f"{state['fingerprint'][:12]}, this stream {self._fingerprint[:12]}; load it with the dataset and the "
                "settings that it was saved with, or train on other data after it with begin_after"
            )
        check_dist_type(state[DIST_TYPE], self._config.key_maps, source="the stream's state")
        epoch, seed = state["epoch"], state["seed"]
        shard_positions = _decode_positions(state, len(self._shards))
        for index, (windows_done, samples_taken) in shard_positions.items():
            shard, place = self._shards[index], f"the state of the stream: in shard {index},"
            done = Annotated[int, Bounds(at_least=0, at_most=shard.num_windows)]
            check_saved(f"{place} windows_done", windows_done, done)
            is_end = windows_done == shard.num_windows
            num_rows = 1 if is_end else shard.window_rows(windows_done, seed=seed, epoch=epoch)
            check_saved(f"{place} samples_taken", samples_taken, Annotated[int, Bounds(at_least=0, below=num_rows)])
        own = {shard.index for shard in self._shards_of(self._rank, epoch, seed)}
        if set(shard_positions) != own:  # else it is this rank's own state, of the same number of ranks
            _check_complete(shard_positions, len(self._shards))
        self._current.seed = seed
        self._snapshots.entries.clear()
        self._snapshots.add(Position(epoch, state["position"]), shard_positions)
        point = ResumePoint(epoch=epoch, position=state["position"])
        self._current.move_to(point, is_over=self._is_exhausted(shard_positions, epoch))

    def begin_after(self, state: Mapping[str, Any]) -> None:
        """Begin with the epoch after that of a state, which may be of another dataset; see `Loader.begin_after`."""
        state = FORMAT.check(state)
        checks.check_vocabulary(state[checks.VOCABULARY], self._source.manifest.ids, source="the stream's state")
        check_dist_type(state[DIST_TYPE], self._config.key_maps, source="the stream's state", may_grow=True)
        self._current.start_epoch(state["epoch"] + 1)

    def _is_exhausted(self, shard_positions: Mapping[int, ShardPosition], epoch: int) -> bool:
        """Return whether no rank has a batch left, as far as is known without reading which rows are samples."""
        if len(shard_positions) < len(self._shards):  # of one rank alone
            return False
        min_samples = self._config.batch_size if self._config.drop_last else 1

        def rows_left(rank: int) -> int:
            shards = self._shards_of(rank, epoch, self._current.seed)
            return sum(s.rows_left(*shard_positions[s.index], seed=self._current.seed, epoch=epoch) for s in shards)

        return all(rows_left(rank) < min_samples for rank in range(self._world_size))

    def _own_invariants(self) -> dict[str, Any]:
        return {**shared_settings(self._stream), "fingerprint": self._fingerprint}

    @cached_property
    def _fingerprint(self) -> str:
        """A hash of everything that decides on the samples and their order, besides the seed."""
        source, stream = self._source, (len(self._shards), self._stream.buffer_rows)
        decisive = (source.manifest.content_hash, source.split, *stream, self._collate.filters())
        return hashlib.sha256(repr(decisive).encode()).hexdigest()


def merge_stream_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks after one step into the state of all shards, loadable on any number of ranks.

    Raises:
        StateError: the states are of different steps or streams, or the state of a rank is missing.
    """
    if not states:
        raise StateError("there are no states to merge; pass those of all ranks")
    states = [FORMAT.check(state) for state in states]
    merged = states[0]
    shard_positions: ShardPositions = {}
    for index, state in enumerate(states):
        for name in ("epoch", "position", "seed", "num_shards", "fingerprint", checks.VOCABULARY, DIST_TYPE):
            if state[name] != merged[name]:
                raise StateError(
                    f"states 0 and {index} cannot be merged: {name} is {merged[name]!r} and {state[name]!r}; save "
                    "the states of all ranks after the same step"
                )
        for shard, position in _decode_positions(state, merged["num_shards"]).items():
            if shard_positions.setdefault(shard, position) != position:
                raise StateError(
                    f"states cannot be merged: state {index} has position {list(position)} in shard {shard}, an "
                    f"earlier one {list(shard_positions[shard])}; pass one state of each rank, after the same step"
                )
    _check_complete(shard_positions, merged["num_shards"])
    return {**merged, "places": {name: entry for state in states for name, entry in state["places"].items()}}


def encode_positions(
    shard_positions: Mapping[int, ShardPosition], *, fingerprint: str, epoch: int
) -> dict[str, list[int | str]]:
    """Return positions by shard as they are saved: windows done, samples taken, checksum."""
    return {
        str(index): [*position, checksum(fingerprint, epoch, index, *position)]
        for index, position in sorted(shard_positions.items())
    }


def _decode_positions(state: Mapping[str, Any], num_shards: int) -> ShardPositions:
    """Return the positions of a state by index of the shard, 0..num_shards-1; a damaged one raises StateError."""
    shard_positions: ShardPositions = {}
    for name, entry in state["places"].items():
        is_index = isinstance(name, str) and re.fullmatch("0|[1-9][0-9]{0,17}", name) and int(name) < num_shards
        if not is_index or not isinstance(entry, list | tuple) or len(entry) != 3:
            raise StateError(
                f"the state of the stream has position {show(entry)} in shard {show(name)}, expected two integers and "
                f"a checksum in one of {num_shards} shards; load a state that state_dict returned"
            )
        for value in entry[:2]:
            check_saved(f"the state of the stream: the position in shard {name}", value, Natural)
        position = ShardPosition(*entry[:2])
        expected = checksum(state["fingerprint"], state["epoch"], int(name), *position)
        check_intact(entry[2] == expected, f"the position in shard {name} of the state of the stream")
        shard_positions[int(name)] = position
    return shard_positions


def _check_complete(shard_positions: Mapping[int, ShardPosition], num_shards: int) -> None:
    """Raise a StateError if the position in a shard is missing."""
    if len(shard_positions) < num_shards:
        first = next(index for index in itertools.count() if index not in shard_positions)
        raise StateError(
            f"the state lacks {num_shards - len(shard_positions)} of {num_shards} shards, among them shard {first}; "
            "merge the states of all ranks with merge_stream_states"
        )
