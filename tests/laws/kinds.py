"""All kinds of loader and all ways to make their batches: one table, which is all that the laws know of them."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from evenrank.core.errors import DataError
from evenrank.dataloader import (
    ElasticLoader,
    ElasticSampler,
    LoaderConfig,
    Mixture,
    RandomBatches,
    Requests,
    StreamConfig,
    TimeWindows,
    build_loader,
    build_stream_loader,
    merge_stream_states,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.datasets import FolderLog, LogEnd, open_store, read_manifest
from tests.dataloader.balance.costs import Ints, Lengths, item_tokens
from tests.laws import data as of_data
from tests.laws.data import Samples


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank is asked for."""

    kind: str
    way: str = "plain"
    rank: int = 0
    world_size: int = 1
    batch_size: int = 4
    workers: int = 0
    prefetch: int = 2
    seed: int = 0
    drop_last: bool = False
    exchange: str = "all-to-all"
    pace: int = 0
    """Of a log: how many records are added each time somebody looks; 0: it is complete."""
    fault: str | None = None
    """What goes wrong on rank 1."""

    @property
    def is_faulty(self) -> bool:
        return self.rank == 1

    def of(self, rank: int, world_size: int) -> "Job":
        return replace(self, rank=rank, world_size=world_size)


@dataclass(frozen=True, kw_only=True)
class Kind:
    make: Callable[[Path, Job, Any], Any]
    """Return the batches of a rank, balanced with a BalanceConfig, if it is not None, but without an exchange."""
    samples: Callable[[Path, Job, int], Samples]
    """Return the samples that an epoch may have."""
    counts: Callable[[Path, Job, int], Counter[int]] | None = None
    """Return how often each comes in an epoch; None: once."""
    join: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]] | None = None
    """Return the state of all ranks, given those of each; None: they are equal."""


def _columns(**options: Any) -> dict[str, Any]:
    columns = {"extra_events": ("price",), "label": "dwell", "target": "price", "weight": "share", "user_id": True}
    return columns | {"max_history_length": of_data.HISTORY} | options


def _config(job: Job, **options: Any) -> LoaderConfig:
    return LoaderConfig(
        batch_size=job.batch_size,
        seed=job.seed,
        drop_last=job.drop_last,
        num_workers=job.workers,
        prefetch=job.prefetch,
        **options,
    )


_open = functools.cache(open_store)  # thousands of loaders are made


def _read(is_faulty: bool, batch: Any, _: Any) -> Any:
    if is_faulty and batch.step >= 1:
        raise DataError("a file cannot be read")
    return batch


def _transform(job: Job) -> Any:
    return functools.partial(_read, job.is_faulty) if job.fault == "read" else None


def _built(data: Any, job: Job, balance: Any, **options: Any) -> Any:
    return build_loader(
        data,
        _config(job, **_columns(**options)),
        rank=job.rank,
        world_size=job.world_size,
        balance=balance,
        transform=_transform(job),
    )


def _mixture(data: Path) -> Mixture:
    return Mixture(weights={data: 1, str(data): 2}, num_samples=57)


def _mixture_counts(data: Path, job: Job, epoch: int) -> Counter[int]:
    """A dataset's samples come one after the other, each pass over them in another order: only quotas are known."""
    loader = make(data, replace(job, way="plain", workers=0, fault=None, batch_size=19).of(0, 1))
    epochs = [Counter(i for batch in loader for i in batch.sample_ids[: batch.num_real].tolist()) for _ in range(epoch + 1)]
    num_rows = len(of_data.read_rows(data).offsets) - 1
    for dataset, quota in ((range(num_rows), 19), (range(num_rows, 2 * num_rows), 38)):
        seen = Counter[int]()
        for counts in epochs:
            seen += Counter({sample: count for sample, count in counts.items() if sample in dataset})
            assert max(seen[sample] for sample in dataset) - min(seen[sample] for sample in dataset) <= 1
        assert seen.total() == quota * (epoch + 1)
    return epochs[epoch]


STREAM = StreamConfig(num_shards=5, buffer_rows=5, open_shards=2, poll_seconds=1e-4)


def _streamed(data: Any, job: Job, follow: bool = False, **options: Any) -> Any:
    config: Any = _config(job, **_columns(**options))
    build: Any = build_stream_loader
    return build(
        data, config, STREAM, rank=job.rank, world_size=job.world_size, transform=_transform(job), follow=follow
    )


class _GrowingLog(FolderLog):
    """A log whose records are there one after the other."""

    pace, seen = 1, 0

    def end(self) -> LogEnd:
        end = super().end()
        self.seen = min(end.position, self.seen + self.pace)
        return LogEnd(self.seen, end.is_final and self.seen == end.position)


def _log(data: Path, job: Job, _: Any) -> Any:
    log = data.with_name("log")
    source = (_GrowingLog if job.pace else FolderLog)(log / "train", read_manifest(log))
    source.pace = job.pace
    return _streamed(source, job, follow=True, order="rows", max_num_candidates=1)


def _random(_: Path, job: Job, __: Any) -> Any:
    config = _config(job, max_num_candidates=1, max_history_length=of_data.HISTORY)
    return RandomBatches(config, of_data.RANDOM, num_batches=5, rank=job.rank, world_size=job.world_size)


def _unreadable_collate(samples: Any) -> Any:
    if any(sample["sample_ids"] % 3 == 0 for sample in samples):
        raise DataError("a file cannot be read")
    return of_data.OWN_COLLATE(samples)


def _elastic(_: Path, job: Job, balance: Any) -> Any:
    sampler = ElasticSampler(
        len(of_data.OWN),
        batch_size=job.batch_size,
        rank=job.rank,
        world_size=job.world_size,
        seed=job.seed,
        drop_last=job.drop_last,
        lengths=None if balance is None else of_data.OWN_LENGTHS,
        balance=balance,
    )
    collate: Any = _unreadable_collate if job.fault == "read" and job.is_faulty else of_data.OWN_COLLATE
    own: Any = of_data.OWN
    loader = DataLoader(own, batch_sampler=sampler, collate_fn=collate, num_workers=job.workers)
    return loader if job.way == "Balancer" else ElasticLoader(loader)


KINDS: dict[str, Kind] = {
    "shuffle": Kind(
        make=lambda data, job, balance: _built(_open(data), job, balance, max_num_candidates=2),
        samples=lambda data, job, epoch: of_data.read_rows(data).whole(2),
    ),
    "rows": Kind(
        make=lambda data, job, balance: _built(_open(data), job, balance, order="rows"),
        samples=lambda data, job, epoch: of_data.read_rows(data).whole(0),
    ),
    "mixture": Kind(
        make=lambda data, job, balance: _built(_mixture(data), job, balance),
        samples=lambda data, job, epoch: {
            **of_data.read_rows(data).whole(0),
            **of_data.read_rows(data).whole(0, first_id=len(of_data.read_rows(data).offsets) - 1),
        },
        counts=_mixture_counts,
    ),
    "windows of time": Kind(
        make=lambda data, job, balance: _built(
            _open(data), job, balance, order=TimeWindows(every="1w", start=of_data.START), max_num_candidates=3
        ),
        samples=lambda data, job, epoch: of_data.samples_of_window(data, epoch, 3),
    ),
    "requests": Kind(
        make=lambda data, job, balance: _built(data, job, balance, order=Requests(), max_num_candidates=2),
        samples=lambda data, job, epoch: of_data.samples_of_requests(data, 2),
    ),
    "stream": Kind(
        make=lambda data, job, _: _streamed(data, job, max_num_candidates=1),
        samples=lambda data, job, epoch: of_data.read_rows(data).whole(1),
        join=merge_stream_states,
    ),
    "log": Kind(
        make=_log,
        samples=lambda data, job, epoch: of_data.read_rows(data)._replace(left_out=("tags",)).whole(1),
    ),
    "random": Kind(
        make=_random,
        samples=lambda _, job, epoch: of_data.drawn_samples(job.world_size, job.batch_size, 5, job.seed),
    ),
    "elastic": Kind(make=_elastic, samples=lambda data, job, epoch: of_data.own_samples()),
}

WAYS: dict[str, Mapping[str, Any] | None] = {
    "plain": None,
    "alone": {},
    "packed": {"pack": True, "max_tokens_per_rank": 160},
    "window": {"window": 3},
    "Balancer": {"lookahead": 3},
}

_READ_FIRST = "lengths are known once rows are read, on the rank that reads them"
# What a kind does not have, and why. All others of KINDS x WAYS, and of what laws ask for, are there.
LEFT_OUT: dict[tuple[str, str], str] = {
    **{("stream", way): _READ_FIRST for way in ("alone", "packed", "window")},
    **{("log", way): _READ_FIRST for way in ("alone", "packed", "window")},
    **{("random", way): "samples are drawn for a rank" for way in ("alone", "packed", "window")},
    ("log", "epochs"): "a log is iterated over once",
    ("log", "begin_after"): "a log is iterated over once",
    ("random", "begin_after"): "all epochs are the same",
    ("random", "other shapes"): "samples are drawn for a number of ranks and a batch size",
    ("random", "drop_last"): "there is no step that is not full of what it draws",
    ("random", "read"): "nothing is read",
    ("stream", "equal steps"): "ranks read their own shards, of which some have more samples",
    ("stream", "length"): "which rows are samples is known once they are read",
    ("log", "length"): "the log grows",
    ("log", "seeds"): "records come in their order",
    ("rows", "seeds"): "samples come in the order of rows",
    ("requests", "seeds"): "requests come in the order of time",
    ("elastic", "padding"): "a DataLoader's batches have as many rows as samples; a Balancer pads them",
    ("elastic", "threads"): "its workers are processes; see the tests of these",
    **{(kind, f"{way} read"): "balance takes no transform, which is what fails here"
       for kind in KINDS if kind != "elastic" for way in ("alone", "packed", "window")},
}


def has(kind: str, what: str) -> bool:
    return (kind, what) not in LEFT_OUT


def cells(*ways: str) -> list[tuple[str, str]]:
    """Return the kinds, and the ways that each of them has."""
    return [(kind, way) for kind in KINDS for way in ways or WAYS if has(kind, way)]


class _FailingCost:
    """`item_tokens`, which fails some steps on."""

    __qualname__ = item_tokens.__qualname__

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        self._calls += 1
        if self._calls > 2:
            raise DataError("the cost is not known")
        return np.asarray(item_tokens(lengths, num_candidates))


def make(data: Path, job: Job) -> Any:
    """Return the batches of a rank."""
    if job.fault == "seed" and job.is_faulty:
        job = replace(job, seed=job.seed + 1)
    options = WAYS[job.way]
    cost: Any = _FailingCost() if job.fault == "cost" and job.is_faulty else item_tokens
    if job.way == "Balancer":
        assert options is not None
        loader = KINDS[job.kind].make(data, job, None)
        return Balancer(loader, BalanceConfig(cost=cost, exchange=job.exchange, **options))
    return KINDS[job.kind].make(data, job, None if options is None else BalanceConfig(cost=cost, **options))


def epoch_counts(data: Path, job: Job, epoch: int) -> Counter[int]:
    """Return how often each sample comes in an epoch."""
    kind = KINDS[job.kind]
    return Counter(iter(kind.samples(data, job, epoch))) if kind.counts is None else kind.counts(data, job, epoch)
