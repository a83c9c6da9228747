"""All kinds of loader and all ways to make their batches: one table, which is all that the laws know of them."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evenrank.dataloader import Negatives, Pools, Requests, Targets, TimeWindows
from evenrank.dataloader.balance import BalanceConfig, Balancer
from tests.dataloader.balance.costs import item_tokens
from tests.laws import data as of_data
from tests.laws import making
from tests.laws.data import Samples
from tests.laws.making import Job


@dataclass(frozen=True, kw_only=True)
class Kind:
    make: Callable[[Path, Job, Any], Any]
    """Return the batches of a rank, balanced with a BalanceConfig, if it is not None, but without an exchange."""
    samples: Callable[[Path, Job, int], Samples]
    """Return the samples that an epoch may have."""
    counts: Callable[[Path, Job, int], Counter[int]] | None = None
    """Return how often each comes in an epoch; None: once."""
    max_tokens: int = 300
    """Of a rank, in a step that is packed: of some steps that is the limit, of others the batch size is."""
    further_rows: int = 0
    """Of each batch, besides its `batch_size`."""


def _mixture_counts(data: Path, job: Job, epoch: int) -> Counter[int]:
    """A dataset's samples come one after the other, each pass over them in another order: only quotas are known."""
    loader = make(data, replace(job, way="plain", workers=0, fault=None, batch_size=19).of(0, 1))
    epochs = [
        Counter(i for batch in loader for i in batch.sample_ids[: batch.num_real].tolist()) for _ in range(epoch + 1)
    ]
    num_rows = len(of_data.read_rows(data).offsets) - 1
    for dataset, quota in ((range(num_rows), 19), (range(num_rows, 2 * num_rows), 38)):
        seen = Counter[int]()
        for counts in epochs:
            seen += Counter({sample: count for sample, count in counts.items() if sample in dataset})
            assert max(seen[sample] for sample in dataset) - min(seen[sample] for sample in dataset) <= 1
        assert seen.total() == quota * (epoch + 1)
    return epochs[epoch]


def _with_negatives(data: Path, job: Job, epoch: int, samples: Samples) -> Samples:
    """Return samples with the negatives of a batch of all of them, on one rank."""
    from tests.laws.running import see_values

    loader = make(data, replace(job, way="plain", workers=0, fault=None).of(0, 1))
    drawn = dict(see_values(loader.collate(np.array([*samples], dtype=np.int64), epoch=epoch)))
    names = ("negatives.item_id", "log_q.negative", "log_q.positive")
    return {sample: {**values, **{name: drawn[sample][name] for name in names}} for sample, values in samples.items()}


KINDS: dict[str, Kind] = {
    "shuffle": Kind(
        make=lambda data, job, balance: making.built(data, job, balance, max_num_candidates=2),
        samples=lambda data, job, epoch: of_data.read_rows(data).whole(2),
    ),
    "stochastic length": Kind(
        make=lambda data, job, balance: making.built(data, job, balance, stochastic_length=of_data.DRAWN),
        samples=lambda data, job, epoch: of_data.read_rows(data).whole(0, drawn_by=(job.seed, epoch)),
    ),
    "padded tokens": Kind(
        make=lambda data, job, balance: making.built(data, job, balance, max_num_candidates=2, pad_tokens_to=16),
        samples=lambda data, job, epoch: of_data.read_rows(data).whole(2),
        further_rows=-(-16 // of_data.HISTORY),
    ),
    "rows": Kind(
        make=lambda data, job, balance: making.built(data, job, balance, order="rows"),
        samples=lambda data, job, epoch: of_data.read_rows(data).whole(0),
    ),
    "mixture": Kind(
        make=lambda data, job, balance: making.built(making.mixture(data), job, balance),
        samples=lambda data, job, epoch: {
            **of_data.read_rows(data).whole(0),
            **of_data.read_rows(data).whole(0, first_id=len(of_data.read_rows(data).offsets) - 1),
        },
        counts=_mixture_counts,
    ),
    "windows of time": Kind(
        make=lambda data, job, balance: making.built(
            data,
            job,
            balance,
            order=TimeWindows(every="1w", start=of_data.START),
            max_num_candidates=3,
            negatives=Negatives(count=2, by="popularity", known_at=True, counted="before"),
        ),
        samples=lambda data, job, epoch: _with_negatives(
            data, job, epoch, of_data.samples_of_targets(data, max_targets=3, week=epoch)
        ),
    ),
    "targets": Kind(
        make=lambda data, job, balance: making.built(
            data,
            job,
            balance,
            order=Targets(where="dwell >= 15 and segment != 7", min_history=1, segment=0.3),
            max_num_candidates=1,
        ),
        samples=lambda data, job, epoch: of_data.samples_of_targets(
            data,
            lambda rows, row, event: rows.events["dwell"][event] >= 15 and rows.rows["segment"][row] != 7,
            min_history=1,
        ),
    ),
    "windows of targets": Kind(
        make=lambda data, job, balance: making.built(
            data,
            job,
            balance,
            order=TimeWindows(every="1w", start=of_data.START, where="action != 3", min_history=1, segment=0.5),
            max_num_candidates=1,
            pools=Pools(values=(2, 1)),
            target_features={"weekday": "timestamp_ms // 86400000 % 7"},
        ),
        samples=lambda data, job, epoch: of_data.samples_of_targets(
            data, lambda rows, row, event: rows.events["action"][event] != 3, min_history=1, week=epoch, kinds=(2, 1)
        ),
    ),
    "requests": Kind(
        make=lambda data, job, balance: making.built(data, job, balance, order=Requests(), max_num_candidates=2),
        samples=lambda data, job, epoch: of_data.samples_of_requests(data, 2),
    ),
    "own order": Kind(make=making.own_order, samples=lambda data, job, epoch: of_data.read_rows(data).whole(2)),
    "stream": Kind(
        make=lambda data, job, _: making.streamed(data, job, max_num_candidates=1),
        samples=lambda data, job, epoch: of_data.read_rows(data).whole(1),
    ),
    "log": Kind(
        make=making.log, samples=lambda data, job, epoch: of_data.read_rows(data)._replace(left_out=("tags",)).whole(1)
    ),
    "random": Kind(
        make=making.random,
        samples=lambda _, job, epoch: of_data.drawn_samples(job.world_size, job.batch_size, 5, job.seed),
    ),
    "elastic": Kind(make=making.elastic, samples=lambda data, job, epoch: of_data.own_samples(), max_tokens=25),
}

WAYS: dict[str, Mapping[str, Any] | None] = {
    "plain": None,
    "alone": {},
    "packed": {"pack": True},
    "window": {"window": 3},
    "Balancer": {"lookahead": 3},
    "Balancer, window": {"lookahead": 2, "window": 3},
    "Balancer, packed": {"lookahead": 3, "pack": True},
}
ALONE = ("plain", "alone", "packed", "window")
BALANCED = ("Balancer", "Balancer, window", "Balancer, packed")

_READ_FIRST = "lengths are known once rows are read, on the rank that reads them"
# What a kind does not have, and why. All others of KINDS x WAYS, and of what laws ask for, are there.
LEFT_OUT: dict[tuple[str, str], str] = {
    **{("stream", way): _READ_FIRST for way in ("alone", "packed", "window")},
    **{("log", way): _READ_FIRST for way in ("alone", "packed", "window")},
    **{("random", way): "samples are drawn for a rank" for way in ("alone", "packed", "window")},
    **{
        (kind, f"{way} other shapes"): "rows that are no samples are padding, so the others do not tell their positions"
        for kind in ("stream", "log", "random")
        for way in ("Balancer, window", "Balancer, packed")
    },
    ("stream", "Balancer, packed"): "its positions count steps",
    ("log", "epochs"): "a log is iterated over once",
    ("random", "other shapes"): "an epoch has a number of batches per rank, of a size",
    ("random", "drop_last"): "there is no step that is not full of what it draws",
    ("random", "other epochs"): "all epochs have the same batches",
    ("rows", "other epochs"): "samples come in the order of rows",
    ("requests", "other epochs"): "requests come in the order of time",
    ("log", "full steps"): "records that are no samples are padding of their step",
    ("stream", "full steps"): "rows that are no samples are padding of their step",
    ("log", "length"): "the log grows",
    ("log", "seeds"): "records come in their order",
    ("rows", "seeds"): "samples come in the order of rows",
    ("requests", "seeds"): "requests come in the order of time",
    ("elastic", "padding"): "a DataLoader's batches have as many rows as samples; a Balancer pads them",
    ("elastic", "threads"): "its workers are processes; see the tests of these",
    **{
        (kind, f"{way} read"): "balance takes no transform, which is what fails here"
        for kind in KINDS
        if kind != "elastic"
        for way in ("alone", "packed", "window")
    },
}


def has(kind: str, what: str) -> bool:
    return (kind, what) not in LEFT_OUT


def cells(*ways: str) -> list[tuple[str, str]]:
    """Return the kinds, and the ways that each of them has."""
    return [(kind, way) for kind in KINDS for way in ways or WAYS if has(kind, way)]


def balance_of(job: Job) -> BalanceConfig | None:
    """Return how the steps of a job are balanced; None: they are not."""
    if (options := WAYS[job.way]) is None:
        return None
    calls = 0 if job.way in BALANCED[1:] else 2  # which are of many steps
    cost: Any = making.FailingCost(calls) if job.fault == "cost" and job.is_faulty else item_tokens
    of_job: dict[str, Any] = {"exchange": job.exchange} if job.way in BALANCED else {}
    if "window" in options:
        of_job["window"] = 2 + job.batch_size % 3  # so that the jobs of a chain have other ones
    if "pack" in options:
        of_job["max_tokens_per_rank"] = KINDS[job.kind].max_tokens
    return BalanceConfig(cost=cost, **{**options, **of_job})


def make(data: Path, job: Job) -> Any:
    """Return the batches of a rank."""
    if job.fault == "seed" and job.is_faulty:
        job = replace(job, seed=job.seed + 1)
    make_kind, balance = KINDS[job.kind].make, balance_of(job)
    if job.way in BALANCED:
        assert balance is not None
        return Balancer(make_kind(data, job, None), balance)
    return make_kind(data, job, balance)


def moved_by(loader: Any) -> Any:
    """Return what has the position of a loader: of a DataLoader, its sampler."""
    return getattr(getattr(loader, "_loader", loader), "batch_sampler", None) or loader


def epoch_counts(data: Path, job: Job, epoch: int) -> Counter[int]:
    """Return how often each sample comes in an epoch."""
    kind = KINDS[job.kind]
    return Counter(iter(kind.samples(data, job, epoch))) if kind.counts is None else kind.counts(data, job, epoch)
