"""`build_stream_loader`: a dataset read sequentially -> this rank's batches, resumable on any number of ranks.

A step is the next world_size x batch_size rows of an order that all ranks compute alike (see `datasets.lanes`), of
which each rank reads its own. So (epoch, position) is the whole state, which is the same on all ranks.
"""

import hashlib
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.settings import check_types
from evenrank.dataloader.batches.batch import Batch
from evenrank.dataloader.config import LoaderConfig
from evenrank.dataloader.lane_reader import read_steps
from evenrank.dataloader.log_loader import LogLoader
from evenrank.dataloader.rank_loader import RankLoader, Transform, shared_settings
from evenrank.dataloader.sampling.epoch_positions import EpochSamples
from evenrank.dataloader.sampling.steps import Iteration, StepSampler, StepSamples, StepShape
from evenrank.dataloader.state.resume_point import Position
from evenrank.datasets.continuous_log import LogSource, open_log
from evenrank.datasets.lanes import LaneOrder, Span
from evenrank.datasets.store import SequenceStore
from evenrank.datasets.stream import Rest, StreamConfig, StreamSource, open_stream

__all__ = ["StreamConfig", "StreamLoader", "build_stream_loader"]

_log = logging.getLogger("evenrank")
_MAX_SHARED = 0.25  # of the lanes, which as many further ranks read: more are warned of


@overload
def build_stream_loader(
    url: Path | str,
    config: LoaderConfig,
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
    config: LoaderConfig,
    stream: StreamConfig | None = None,
    *,
    rank: int,
    world_size: int,
    transform: Transform[Batch] | None = None,
    follow: Literal[True],
) -> LogLoader[Batch]: ...


def build_stream_loader(
    url: Path | str | LogSource,
    config: LoaderConfig,
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
    """The batches of one rank; each iteration is one epoch. It is also a torchdata node.

    Every rank yields the same number of batches. Rows that are not samples are padding of their batches, see
    `num_real`, because which ones these are is known once they are read.
    """

    def __init__(
        self,
        source: StreamSource,
        config: LoaderConfig,
        stream: StreamConfig,
        *,
        rank: int,
        world_size: int,
        transform: Transform[Batch] | None = None,
    ) -> None:
        super().__init__(
            config, source.manifest, rank=rank, world_size=world_size, transform=transform, sources=[source]
        )
        self._source = source
        self._stream = stream
        self._check_columns(source.read(0, 0))
        self._order = LaneOrder(source.num_rows, lanes=stream.lanes, window_rows=stream.window_rows)
        shape = StepShape(rank, world_size, config.batch_size, drop_last=config.drop_last)
        decisive = source.manifest.content_hash, source.split, self._order.fingerprint(), self._collate.filters()
        fingerprint = hashlib.sha256(repr(decisive).encode()).hexdigest()
        self._samples = EpochSamples(order=self._order, sampler=StepSampler(shape), fingerprint=fingerprint)
        self._left_out: Counter[str] = Counter()
        lanes = self._order.num_lanes
        if (shared := world_size - math.gcd(lanes, world_size)) > lanes * _MAX_SHARED and rank == 0:
            remedy = "set lanes to a multiple of the ranks" if lanes == stream.lanes else "lower window_rows"
            _log.warning(
                "%d ranks share %d lanes, and read rows %.1f times; %s", world_size, lanes, 1 + shared / lanes, remedy
            )

    def _make_steps(self) -> Iterator[tuple[Batch, Position, StepSamples]]:
        seed, iteration, num_workers = self._current.seed, self._begin_epoch(), self._config.num_workers
        epoch, schedule = iteration.point.epoch, iteration.schedule
        rests: dict[int, Rest] = {}

        def read(spans: list[Span]) -> tuple[SequenceStore, Mapping[str, NDArray[np.int64]]]:
            store = self._source.read_spans(spans, rests).remapped(self._config.key_maps)
            return store, self._collate.unusable(store)

        ahead: deque[tuple[Callable[[], Batch], Position, StepSamples, Counter[str]]] = deque()
        with self._workers.open() as submit:
            reading: dict[str, Any] = {"read": read, "submit": submit, "num_parts": num_workers}
            steps = map(partial(self._positions, iteration), range(schedule.num_steps))
            of_steps = read_steps(self._order, steps, seed=seed, epoch=epoch, **reading)
            for step, rows in enumerate(of_steps):
                after = Position(epoch, schedule.position_after(step))
                make = partial(self._make_batch, rows.groups, rows.sample_ids, seed, after.position, self._rank)
                make = partial(make, step=step, **after._asdict())
                ahead.append((submit(make), after, StepSamples(rows.sample_ids, {}), rows.left_out))
                num_ahead = 0 if rows.is_last else num_workers
                del make, rows  # so that they need not be in memory with the next window
                while len(ahead) > num_ahead:
                    made, after, samples, left_out = ahead.popleft()
                    batch = made()
                    del made
                    self._left_out.update(left_out)
                    yield batch, after, samples

    def _positions(self, iteration: Iteration, step: int) -> NDArray[np.int64]:
        """Return the positions of this rank in a step, also of rows that are no samples: int64 [n]."""
        of_step = iteration.point.positions(iteration.schedule.positions_of_all(range(step, step + 1)))
        return self._order.share(of_step, self._rank, self._world_size)

    def _own_invariants(self) -> dict[str, Any]:
        return {**shared_settings(self._stream), "fingerprint": self._samples.fingerprint}
