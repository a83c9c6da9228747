"""Makes the loaders of a rank, of all kinds."""

import functools
from collections.abc import Callable
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
    StreamConfig,
    build_loader,
    build_stream_loader,
)
from evenrank.datasets import ORDERS, FolderLog, LogEnd, read_manifest
from tests.dataloader.balance.costs import Ints, Lengths, item_tokens
from tests.laws import data as of_data
from tests.pages import ROOT, blocks
from tests.registrations import restored


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
    transform: Callable[[Any, Any], Any] | None = None
    keeps_workers: bool = False

    @property
    def is_faulty(self) -> bool:
        return self.rank == 1

    def of(self, rank: int, world_size: int) -> "Job":
        return replace(self, rank=rank, world_size=world_size)


def _columns(**options: Any) -> dict[str, Any]:
    columns = {"extra_events": ("price",), "label": ("dwell", "price"), "weight": "share", "user_id": True}
    return columns | {"max_history_length": of_data.HISTORY} | options


def _config(job: Job, **options: Any) -> LoaderConfig:
    return LoaderConfig(
        batch_size=job.batch_size,
        seed=job.seed,
        drop_last=job.drop_last,
        num_workers=job.workers,
        prefetch=job.prefetch,
        persistent_workers=job.keeps_workers,
        **options,
    )


def _read(is_faulty: bool, batch: Any, _: Any) -> Any:
    if is_faulty and batch.step >= 1:
        raise DataError("a file cannot be read")
    return batch


def _transform(job: Job) -> Any:
    return functools.partial(_read, job.is_faulty) if job.fault == "read" else job.transform


def built(data: Any, job: Job, balance: Any, **options: Any) -> Any:
    return build_loader(
        data,
        _config(job, **_columns(**options)),
        rank=job.rank,
        world_size=job.world_size,
        balance=balance,
        transform=_transform(job),
    )


def mixture(data: Path) -> Mixture:
    return Mixture(weights={data: 1, str(data): 2}, num_samples=57)


@functools.cache
def _order_of_the_page() -> Any:
    (code,) = [code for code in blocks(ROOT / "docs" / "how-to" / "extending.md") if "@register_order" in code]
    return compile(code, "extending.md", "exec")


def own_order(data: Any, job: Job, balance: Any) -> Any:
    """Return a loader with the order of the page "Extending", by its name."""
    with restored(ORDERS):
        exec(_order_of_the_page(), {"__name__": "extending"})
        return built(data, job, balance, order="similar lengths", max_num_candidates=2)


STREAM = StreamConfig(lanes=5, window_rows=1, poll_seconds=1e-4)


def streamed(data: Any, job: Job, follow: bool = False, **options: Any) -> Any:
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


def log(data: Path, job: Job, _: Any) -> Any:
    log = data.with_name("log")
    source = FolderLog(log / "train", read_manifest(log))
    if job.pace:
        source = _GrowingLog(log / "train", read_manifest(log))
        source.pace = job.pace
    return streamed(source, job, follow=True, order="rows", max_num_candidates=1)


def random(_: Path, job: Job, __: Any) -> Any:
    config = _config(job, max_num_candidates=1, max_history_length=of_data.HISTORY)
    ranks = {"rank": job.rank, "world_size": job.world_size}
    return RandomBatches(config, of_data.RANDOM, num_batches=5, transform=_transform(job), **ranks)


def _unreadable_collate(samples: Any) -> Any:
    if any(sample["sample_ids"] % 3 == 0 for sample in samples):
        raise DataError("a file cannot be read")
    return of_data.OWN_COLLATE(samples)


class _Transformed:
    """The collate function of a Dataset, which transforms."""

    def __init__(self, transform: Callable[[Any, Any], Any]) -> None:
        self._transform = transform

    def __call__(self, samples: Any) -> Any:
        return self._transform(of_data.OWN_COLLATE(samples), None)


def elastic(_: Path, job: Job, balance: Any) -> Any:
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
    if (transform := job.transform) is not None:
        collate = _Transformed(transform)
    workers: dict[str, Any] = {"num_workers": job.workers, "persistent_workers": job.keeps_workers}
    loader = DataLoader(own, batch_sampler=sampler, collate_fn=collate, **workers)
    return loader if job.way.startswith("Balancer") else ElasticLoader(loader)


class FailingCost:
    """`item_tokens`, which fails after some calls."""

    __qualname__ = item_tokens.__qualname__

    def __init__(self, calls: int) -> None:
        self._calls_left = calls

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        self._calls_left -= 1
        if self._calls_left < 0:
            raise DataError("the cost is not known")
        return np.asarray(item_tokens(lengths, num_candidates))
