"""Results of the training benchmark without running it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from end_to_end.results import Balance, RunResult, Segment, Work
from trainer.config import TrainConfig

Value = TypeVar("Value")


def segment(kind: str, number: int, steps: Sequence[Any], *, batch: Sequence[int] | None = None) -> Segment:
    """Return a segment of steps that each take [W] or one number of ms, the middle six tenths of it computing."""
    times = np.stack([np.broadcast_to(np.asarray(step, dtype=float), 2) for step in steps], axis=1)
    return marked(kind, number, times * 0.2, times * 0.6, times * 0.2, batch=batch)


def marked(kind: str, number: int, before: Any, compute: Any, after: Any, *, batch: Any = None) -> Segment:
    """Return a segment from what ranks do in each step, in ms [W, steps]: embeddings, computing, and the rest."""
    compute = np.asarray(compute, dtype=float)
    parts = np.stack([before, compute / 3, compute * 2 / 3, after], axis=-1).astype(float)
    ends = parts.sum(axis=-1).cumsum(axis=1)
    starts = np.concatenate([np.zeros((len(ends), 1)), ends[:, :-1]], axis=1)
    marks = np.concatenate([starts[..., None], starts[..., None] + parts.cumsum(axis=-1)], axis=-1)
    indices = np.arange(marks.shape[1]) if batch is None else np.asarray(batch)
    return Segment(kind=kind, round=number, batch=indices, marks=marks)


def result(name: str, segments: Sequence[Segment] = (), **fields: Any) -> RunResult:
    """Return a result of two ranks and two batches."""
    given_settings = {"balance": "all-to-all"} | fields.pop("settings", {"balance": "none"})
    settings = dataclasses.asdict(TrainConfig(**given_settings))
    made: dict[str, Any] = {"adds_to": None, "lengths": "lognormal", "gpus": 2, "data_ranks": 2, "settings": settings}
    made |= {"workload": {"steps": 4}, "environment": {"gpu": "H200", "torch": "2.11"}}
    if "failure" not in fields:
        made |= {
            "peak_flops": 2e9,
            "flops": {"per_token": 1000, "per_pair": 10, "per_prediction": 100},
            "cost": {"name": "HSTUCost"},
            "balanced": work(),
            "peak_allocated": np.array([2 * 2**30, 3 * 2**30]),
        }
    return RunResult(name=name, segments=tuple(segments), **(made | fields))


def work(**fields: Any) -> Work:
    """Return the work of two ranks in two batches."""
    made = {
        "tokens": [[300, 100], [100, 100]],
        "pairs": [[9000, 1000], [1000, 1000]],
        "predictions": [[10, 10], [10, 10]],
        "loads": [[30, 10], [10, 10]],
        "sample_tokens": [[[300, 0], [100, 0]], [[50, 50], [100, 0]]],
    }
    return Work(**{name: np.array(value) for name, value in (made | fields).items()})


def balance() -> Balance:
    """Return what balancing did to two batches."""
    loads = {"before": [[30, 10], [10, 10]], "after": [[20, 20], [10, 10]], "lower_bound": [20, 10]}
    moved = {"moved_samples": [2, 0], "moved_tokens": [150, 0], "moved_bytes": [1200, 0]}
    seconds = {"plan_seconds": [0.001, 0.001], "gather_seconds": [0.002, 0.002]}
    made = {"samples": [4, 4], "tokens": [400, 200], **loads, **moved, **seconds}
    return Balance(**{name: np.array(value) for name, value in made.items()})


def given(value: Value | None) -> Value:
    """Return a value that is there."""
    assert value is not None
    return value
