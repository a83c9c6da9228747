"""`build_stream_loader`: a dataset read sequentially -> this rank's batches, resumable on any number of ranks.

Shards are distributed over ranks. A rank reads `open_shards` of its shards at a time, and takes the samples of a batch
from all open ones. The next batches depend only on the position in each shard.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from evenrank.core.errors import ConfigError, StateError
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.torch_compat import outside_inference_mode
from evenrank.dataloader.config import ReadConfig
from evenrank.dataloader.rank_loader import RankLoader, Transform, shared_settings
from evenrank.dataloader.routing.dist_type import DIST_TYPE, check_dist_type, dist_type
from evenrank.dataloader.sampling.samples import remapped_stores
from evenrank.dataloader.state.snapshots import Position, Snapshots
from evenrank.dataloader.stream.shuffle import (
    PendingWindow,
    ShardPosition,
    ShardReader,
    Window,
    read_ahead,
    take_batches,
)
from evenrank.dataloader.stream.state import FORMAT, check_complete, check_position, decode_positions, encode_positions
from evenrank.datasets.order import permute
from evenrank.datasets.stream import Shard, StreamConfig, StreamSource, cut_shards, open_stream

__all__ = ["StreamConfig", "StreamLoader", "build_stream_loader"]

# Steps whose positions are kept for `state_dict`: more than pipelines and a Balancer together pull ahead.
_KEPT_STEPS = 256

Batch = TypeVar("Batch", bound=JaggedBatch)
ShardPositions = dict[int, ShardPosition]  # by index of the shard


def build_stream_loader(
    url: Path | str,
    config: ReadConfig[Batch],
    stream: StreamConfig | None = None,
    *,
    rank: int,
    world_size: int,
    transform: Transform[Batch] | None = None,
) -> "StreamLoader[Batch]":
    """Open a dataset for sequential reading and return the loader of one rank.

    Args:
        url: of the dataset: a folder, or a URL that `open_stream` supports.
        config: the same on all ranks. Its order must be `shuffle`; `drop_last` leaves out a rank's last batch if it is
            not full; `num_workers` threads read windows ahead.
        stream: shards and buffers; the same on all ranks.
        rank: data-parallel rank of this process, 0..world_size-1.
        world_size: number of data-parallel ranks.
        transform: as in `build_loader`, but called by the consumer's thread; its generator also depends on the rank.

    Raises:
        ConfigError: the rank or the order is not supported, or the settings do not fit the dataset.
        DataError: the dataset, or the file of codes, is missing or malformed.
    """
    if config.order != "shuffle":
        raise ConfigError(f"streams are always shuffled; order must be 'shuffle', got {config.order!r}")
    source = open_stream(url, config.split)
    stream = StreamConfig() if stream is None else stream
    return StreamLoader(source, config, stream, rank=rank, world_size=world_size, transform=transform)


class StreamLoader(RankLoader[Batch]):
    """The batches of one rank; each iteration is one epoch. It is a torchdata node too.

    Ranks may yield different numbers of batches; a Balancer handles that.

    Attributes:
        left_out: per reason, how many of the rows that this rank has read are not samples.
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
        super().__init__(config, rank=rank, world_size=world_size, transform=transform)
        self._source = source
        self._stream = stream
        without_rows = source.read(0, 0)
        self._collate.check(without_rows)
        remapped_stores([without_rows], self._collate, config.key_maps)
        self._shards = cut_shards(source.num_rows, stream)
        self.left_out: Counter[str] = Counter()
        self._next: Position = Position(0, 0)  # in steps
        self._shard_positions: ShardPositions = {}  # at which the next iteration begins; absent: at (0, 0)
        self._snapshots: Snapshots[ShardPositions] = Snapshots(_KEPT_STEPS)  # of this rank's shards

    def __iter__(self) -> Iterator[Batch]:
        (epoch, position), seed = self._next, self._seed
        shards = self._shards_of(self._rank, epoch, seed)
        shard_positions = self._positions_in(shards)
        self._next, self._shard_positions = Position(epoch + 1, 0), {}
        self._snapshots.add(Position(epoch, position), dict(shard_positions))
        batch_size = self._config.batch_size
        with read_ahead(self._config.num_workers) as submit:

            def read(shard: Shard, window_position: int) -> PendingWindow:
                return submit(partial(self._load, shard, window_position, seed=seed, epoch=epoch))

            left = (shard for shard in shards if shard_positions[shard.index].windows_done < shard.num_windows)
            readers = (ShardReader(shard, shard_positions[shard.index], read) for shard in left)
            samples = take_batches(readers, self._stream.open_shards, batch_size, shard_positions)
            for step, (groups, sample_ids) in enumerate(samples):
                if self._config.drop_last and len(sample_ids) < batch_size:
                    return
                after = Position(epoch, position + step + 1)
                with outside_inference_mode():
                    (batch,) = self._collate(groups, sample_ids, batch_size=batch_size)
                    batch.epoch, batch.step, batch.position = epoch, step, after.position
                    batch = self._finish(batch, seed, after.position, self._rank)
                self._snapshots.add(after, dict(shard_positions))
                yield batch

    def _shards_of(self, rank: int, epoch: int, seed: int) -> list[Shard]:
        """Return a rank's shards of an epoch, in the order in which it opens them."""
        order = permute(np.arange(len(self._shards)), len(self._shards), seed=seed, epoch=epoch)
        return [self._shards[index] for index in order[rank :: self._world_size].tolist()]

    def _positions_in(self, shards: Sequence[Shard]) -> ShardPositions:
        return {shard.index: self._shard_positions.get(shard.index, ShardPosition()) for shard in shards}

    def _load(self, shard: Shard, window_position: int, *, seed: int, epoch: int) -> Window:
        """Read a window and leave out the rows that are not samples."""
        first, order = shard.window(window_position, seed=seed, epoch=epoch)
        store = self._source.read(first, first + len(order)).remapped(self._config.key_maps)
        is_sample = np.ones(len(store), dtype=bool)
        for reason, rows in self._collate.unusable(store).items():
            self.left_out[reason] += len(rows)
            is_sample[rows] = False
        return Window(store, first, order[is_sample[order]])

    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the positions in this rank's shards after the batch yielded last, or after another one.

        Merged with the states of all other ranks (see `merge_stream_states`), it can be loaded with any world size,
        batch size and number of workers. Before the first batch it has the positions in all shards.

        Raises:
            StateError: the batch was yielded too long ago.
        """
        if not self._snapshots.entries:
            position, shard_positions = self._next, self._positions_in(self._shards)
        elif after is None:
            position, shard_positions = self._snapshots.entries[-1]
        else:
            position = Position(after.epoch, after.position)
            shard_positions = self._snapshots.at(position)
        return FORMAT.make(
            epoch=position.epoch,
            position=position.position,
            seed=self._seed,
            num_shards=len(self._shards),
            fingerprint=self._fingerprint,
            places=encode_positions(shard_positions, fingerprint=self._fingerprint, epoch=position.epoch),
            dist_type=dist_type(self._config.key_maps),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, from the next iteration on, at the positions of the merged states of all ranks.

        On the same number of ranks, each of them may also load the state that it saved itself.

        Raises:
            StateError: the state lacks shards, is of another version, or of other data, filters, shards or `key_maps`.
        """
        state = FORMAT.check(state)
        if state["fingerprint"] != self._fingerprint:
            raise StateError(
                "the stream's state is of other data, codes, filters or shards: it has fingerprint "
                f"{state['fingerprint'][:12]}, this stream {self._fingerprint[:12]}; load it with the dataset and the "
                "settings that it was saved with"
            )
        check_dist_type(state[DIST_TYPE], self._config.key_maps, source="the stream's state")
        shard_positions = decode_positions(state, len(self._shards))
        for index, shard_position in shard_positions.items():
            check_position(shard_position, self._shards[index], seed=state["seed"], epoch=state["epoch"])
        epoch = state["epoch"]
        own = {shard.index for shard in self._shards_of(self._rank, epoch, state["seed"])}
        if set(shard_positions) != own:  # else it is this rank's own state, of the same number of ranks
            check_complete(shard_positions, len(self._shards))
        self._seed = state["seed"]
        self._snapshots.entries.clear()
        if self._is_exhausted(shard_positions, epoch):
            self._next, self._shard_positions = Position(epoch + 1, 0), {}
        else:
            self._next, self._shard_positions = Position(epoch, state["position"]), shard_positions

    def _is_exhausted(self, shard_positions: Mapping[int, ShardPosition], epoch: int) -> bool:
        """Return whether no rank has a batch left, as far as is known without reading which rows are samples.

        False for the shards of one rank alone.
        """
        if len(shard_positions) < len(self._shards):
            return False
        min_samples = self._config.batch_size if self._config.drop_last else 1

        def rows_left(rank: int) -> int:
            shards = self._shards_of(rank, epoch, self._seed)
            return sum(s.rows_left(*shard_positions[s.index], seed=self._seed, epoch=epoch) for s in shards)

        return all(rows_left(rank) < min_samples for rank in range(self._world_size))

    def _own_invariants(self) -> dict[str, Any]:
        return {**shared_settings(self._stream), "fingerprint": self._fingerprint}

    @cached_property
    def _fingerprint(self) -> str:
        """A hash of everything that decides on the samples and their order, besides the seed."""
        source, num_shards, buffer_rows = self._source, len(self._shards), self._stream.buffer_rows
        decisive = (source.manifest.content_hash, source.split, num_shards, buffer_rows, self._collate.filters())
        return hashlib.sha256(repr(decisive).encode()).hexdigest()
