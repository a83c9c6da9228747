"""`build_stream_loader`: a dataset read in sequence -> this rank's batches, resumed on any number of ranks.

Shards are dealt to ranks; a rank reads `open_shards` of its own at a time, and takes the samples of a batch from all
that are open. Nothing but the place in each shard decides what comes next.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from evenrank.core.errors import ConfigError, StateError
from evenrank.dataloader.batch import JaggedBatch
from evenrank.dataloader.config import ReadConfig
from evenrank.dataloader.loader import Transform
from evenrank.dataloader.windows import Place, Reader, Window, reading_ahead, take_groups
from evenrank.datasets.order import permute
from evenrank.datasets.stream import Shard, StreamConfig, StreamSource, cut_shards, open_stream

_STATE_VERSION = 1
_WORD = 0xFFFFFFFFFFFFFFFF
# Steps whose places are remembered: more than any pipeline and balancer together pull ahead.
_REMEMBERED_STEPS = 256

Batch = TypeVar("Batch", bound=JaggedBatch)


def build_stream_loader(
    url: Path | str,
    config: ReadConfig[Batch],
    stream: StreamConfig | None = None,
    *,
    rank: int,
    world_size: int,
    transform: Transform[Batch] | None = None,
) -> "StreamLoader[Batch]":
    """Open a dataset for reading in sequence and return the loader of one rank.

    Args:
        url: of the dataset: a folder, or what `open_stream` knows.
        config: the same on all ranks. Its order must be "shuffle"; `drop_last` leaves out a rank's last batch if it is
            not full; with workers, windows are read ahead by that many threads.
        stream: shards and buffers; the same on all ranks.
        rank: of this process among those that train on different data, 0..world_size-1.
        world_size: how many there are.
        transform: as in `build_loader`.

    Raises:
        ConfigError, DataError: with one line that says what is wrong and what to do.

    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must lie in 0..world_size-1, got rank {rank} of {world_size}")
    if config.order != "shuffle":
        raise ConfigError(f"streams are always shuffled; order must be 'shuffle', got {config.order!r}")
    source = open_stream(url, config.split)
    stream = StreamConfig() if stream is None else stream
    return StreamLoader(source, config, stream, rank=rank, world_size=world_size, transform=transform)


class StreamLoader(Generic[Batch]):
    """Iterates over one rank's batches of an epoch; each iteration after the first is the next epoch.

    Ranks may yield different numbers of batches, which a Balancer evens out.

    Attributes:
        left_out: per reason, how many rows that this rank has read make no samples.

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
        self._source = source
        self._config = config
        self._stream = stream
        self._rank = rank
        self._world_size = world_size
        self._transform = transform
        self._collate = config.make_collate()
        self._collate.check(source.read(0, 0))
        self._shards = cut_shards(source.num_rows, stream)
        self.left_out: Counter[str] = Counter()
        self._seed = config.seed
        self._epoch = 0  # of the next iteration
        self._position = 0  # batches that ranks had taken of it before
        self._places: dict[int, Place] = {}  # where the next iteration begins in each shard; (0, 0) if not said
        # After each of the last steps: epoch, position, and the place in each of this rank's shards.
        self._remembered: deque[tuple[int, int, dict[int, Place]]] = deque(maxlen=_REMEMBERED_STEPS)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, from 0."""
        return self._epoch

    def __iter__(self) -> Iterator[Batch]:
        epoch, before, places, seed = self._epoch, self._position, self._places, self._seed
        self._epoch, self._position, self._places = epoch + 1, 0, {}
        own = {shard.number: places.get(shard.number, (0, 0)) for shard in self._dealt(epoch)}
        self._remembered.append((epoch, before, dict(own)))
        size = self._config.batch_size
        with reading_ahead(self._config.num_workers) as submit:
            load = partial(self._load, seed=seed, epoch=epoch)
            readers = (
                Reader(shard, own[shard.number], load, submit)
                for shard in self._dealt(epoch)
                if own[shard.number][0] < shard.num_windows
            )
            groups = take_groups(readers, self._stream.open_shards, size, own)
            for step, (picks, sample_ids) in enumerate(groups):
                if self._config.drop_last and len(sample_ids) < size:
                    return
                (batch,) = self._collate(picks, sample_ids, batch_size=size)
                batch.epoch, batch.step, batch.position = epoch, step, before + step + 1
                if self._transform is not None:
                    words = [seed & _WORD, epoch, batch.position, self._rank]
                    batch = self._transform(batch, np.random.default_rng(words))
                self._remembered.append((epoch, before + step + 1, dict(own)))
                yield batch.pin_memory() if self._config.pin_memory else batch

    def _dealt(self, epoch: int) -> list[Shard]:
        """Return this rank's shards in the order in which it opens them."""
        order = permute(np.arange(len(self._shards)), len(self._shards), seed=self._seed, epoch=epoch)
        return [self._shards[number] for number in order[self._rank :: self._world_size].tolist()]

    def _load(self, shard: Shard, turn: int, *, seed: int, epoch: int) -> "Window":
        """Read a window, and leave out what makes no sample."""
        first, order = shard.window(turn, seed=seed, epoch=epoch)
        store = self._source.read(first, first + len(order))
        usable = np.ones(len(store), dtype=bool)
        for reason, rows in self._collate.unusable(store).items():
            self.left_out[reason] += len(rows)
            usable[rows] = False
        return Window(store, first, order[usable[order]])

    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the place in this rank's shards after a given batch, or after the one yielded last.

        The states of all ranks together, see `merge_stream_states`, can be loaded with any other world size, batch size
        and number of workers.

        Raises:
            StateError: the batch was yielded too long ago.

        """
        if not self._remembered:
            own = {shard.number: self._places.get(shard.number, (0, 0)) for shard in self._dealt(self._epoch)}
            return self._state(self._epoch, self._position, own)
        epoch, position = self._remembered[-1][:2] if after is None else (after.epoch, after.position)
        # A rank whose data have run out was in its last place already.
        known = [one for one in self._remembered if one[0] == epoch and one[1] <= position]
        if not known:
            raise StateError(
                f"position {position} of epoch {epoch} is no longer known; ask within {_REMEMBERED_STEPS} steps"
            )
        return self._state(epoch, position, known[-1][2])

    def _state(self, epoch: int, position: int, places: Mapping[int, Place]) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "epoch": epoch,
            "position": position,
            "seed": self._seed,
            "num_shards": len(self._shards),
            "fingerprint": self._fingerprint(),
            "places": {str(number): list(place) for number, place in sorted(places.items())},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, with the next iteration, where the merged states of all ranks say.

        Raises:
            StateError: the state is of some shards only, or belongs to other data, filters or shards.

        """
        if state.get("version") != _STATE_VERSION:
            raise StateError(f"the stream's state has version {state.get('version')!r}, {_STATE_VERSION} is expected")
        if state.get("fingerprint") != self._fingerprint():
            raise StateError(
                "the stream's state belongs to other data, filters or shards: it has fingerprint "
                f"{str(state.get('fingerprint'))[:12]}, this stream {self._fingerprint()[:12]}; load the state with "
                "what it was saved with"
            )
        places = {int(number): (int(place[0]), int(place[1])) for number, place in state["places"].items()}
        _check_complete(places, len(self._shards))
        self._seed = state["seed"]
        self._remembered.clear()
        if all(places[shard.number][0] >= shard.num_windows for shard in self._shards):
            self._epoch, self._position, self._places = state["epoch"] + 1, 0, {}
        else:
            self._epoch, self._position, self._places = state["epoch"], state["position"], places

    def identity(self) -> dict[str, int | str]:
        """Say what must be the same on all ranks, and `rank`, which must be the rank's own."""
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            "seed": self._seed,
            "drop_last": self._config.drop_last,
            "fingerprint": self._fingerprint(),
        }

    def _fingerprint(self) -> str:
        deciding = (
            self._source.manifest.content_hash,
            self._source.split,
            len(self._shards),
            self._stream.buffer_rows,
            self._collate.filters(),
        )
        return hashlib.sha256(repr(deciding).encode()).hexdigest()


def merge_stream_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks after one step into the state of all shards, to be loaded on any number of ranks.

    Raises:
        StateError: the states are of different steps or streams, or some rank's is missing.

    """
    if not states:
        raise StateError("there are no states to merge; pass those of all ranks")
    merged = dict(states[0])
    places: dict[int, Place] = {}
    for number, state in enumerate(states):
        for name in ("version", "epoch", "position", "seed", "num_shards", "fingerprint"):
            if state.get(name) != merged.get(name):
                raise StateError(
                    f"states 0 and {number} cannot be merged: {name} is {merged.get(name)} and {state.get(name)}; save "
                    "all ranks' states after the same step"
                )
        places |= {int(shard): (int(place[0]), int(place[1])) for shard, place in state["places"].items()}
    _check_complete(places, merged["num_shards"])
    return {**merged, "places": {str(shard): list(place) for shard, place in sorted(places.items())}}


def _check_complete(places: Mapping[int, Place], num_shards: int) -> None:
    if missing := sorted(set(range(num_shards)) - set(places)):
        raise StateError(
            f"the state lacks {len(missing)} of {num_shards} shards, shard {missing[0]} among them; merge the states "
            "of all ranks with merge_stream_states"
        )
