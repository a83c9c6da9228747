"""A harness for everything that keeps a position: stop it after every step, and resume it in another shape."""

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evenrank.dataloader import SemanticIdBatch, SequenceBatch
from evenrank.dataloader.state.checks import StateFormat
from tests.dataloader.batch_helpers import ids_of

Batch = SequenceBatch | SemanticIdBatch


def with_changes(state_format: StateFormat, state: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a state with other entries, and the checksum of these."""
    return state_format.make(**{name: {**state, **changes}[name] for name in state_format.fields})


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What may differ between the job that is stopped and the one that resumes."""

    rank: int
    world_size: int
    batch_size: int
    num_workers: int
    prefetch: int


def state_of_any_rank(loaders: Sequence[Any], batches: Sequence[Batch | None]) -> Mapping[str, Any]:
    """Return the state of one rank, after checking that the states of all ranks are equal."""
    first: Mapping[str, Any]
    first, *others = (loader.state_dict(after=batch) for loader, batch in zip(loaders, batches, strict=True))
    assert all(state == first for state in others)
    return first


def stop_and_resume_everywhere(make_loader: Callable[[Shape], Any], seed: int, *, max_batch_size: int) -> None:
    """Iterate over an epoch in a random shape; after each step, resume in another shape and count the samples."""
    rng = np.random.default_rng(seed)
    epoch_samples = Counter(_ids(_epoch(_random_ranks(make_loader, rng, max_batch_size))))
    assert epoch_samples
    loaders = _random_ranks(make_loader, rng, max_batch_size)
    steps = _epoch(loaders)
    assert Counter(_ids(steps)) == epoch_samples
    # Pipelines pull batches ahead of training, so states are saved after all batches were yielded.
    states = [state_of_any_rank(loaders, last_batches) for last_batches in _last_batches(steps)]
    for index, state in enumerate(states):
        trained = Counter(_ids(steps[: index + 1]))
        resumed = _random_ranks(make_loader, rng, max_batch_size)
        for loader in resumed:
            loader.load_state_dict(state)
        rest = Counter(_ids(_epoch(resumed)))
        # A stream only learns by reading on that the remaining rows are not samples; batches are then all padding.
        if trained == epoch_samples and rest:
            assert resumed[0].epoch == 2  # what was iterated over is the next epoch
            assert rest.total() == epoch_samples.total()
        else:
            assert trained + rest == epoch_samples, f"after step {index} of {len(states)}"


def _random_ranks(make_loader: Callable[[Shape], Any], rng: np.random.Generator, max_batch_size: int) -> list[Any]:
    """Return the loaders of all ranks of a random shape."""
    world_size = int(rng.integers(1, 6))
    options = {
        "batch_size": int(rng.integers(1, max_batch_size + 1)),
        "num_workers": int(rng.integers(0, 3)),
        "prefetch": int(rng.integers(1, 5)),
    }
    return [make_loader(Shape(rank=rank, world_size=world_size, **options)) for rank in range(world_size)]


def _epoch(loaders: Sequence[Any]) -> list[list[Batch | None]]:
    """Return the batch of each rank in each step; None for a rank whose data have run out."""
    iterators = [iter(loader) for loader in loaders]
    steps = []
    while any(batches := [next(iterator, None) for iterator in iterators]):
        steps.append(batches)
    return steps


def _last_batches(steps: Sequence[Sequence[Batch | None]]) -> Iterator[list[Batch | None]]:
    """Yield each rank's last batch after each step."""
    last: list[Batch | None] = [None] * len(steps[0])
    for batches in steps:
        last = [batch or last_batch for batch, last_batch in zip(batches, last, strict=True)]
        yield last


def _ids(steps: Sequence[Sequence[Batch | None]]) -> list[int]:
    return [sample for step in steps for batch in step if batch is not None for sample in ids_of(batch)]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
