"""One harness for everything that keeps its place: stop it after every step, and go on in another shape."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenrank.dataloader import JaggedBatch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What may differ between the run that was stopped and the one that goes on."""

    rank: int
    world_size: int
    batch_size: int
    num_workers: int
    prefetch: int


Make = Callable[[Shape], Any]  # what keeps its place, on one rank
State = Callable[[Sequence[Any], Sequence[JaggedBatch]], Mapping[str, Any]]


def state_of_any_rank(loaders: Sequence[Any], batches: Sequence[JaggedBatch]) -> Mapping[str, Any]:
    """Ask one rank; which one does not matter."""
    states = [loader.state_dict(after=batch) for loader, batch in zip(loaders, batches, strict=True)]
    assert all(state == states[0] for state in states)
    first: Mapping[str, Any] = states[0]
    return first


def stop_and_resume_everywhere(make: Make, seed: int, *, state_of: State = state_of_any_rank) -> None:
    """Walk an epoch in a random shape; after each step, go on in another and count what it trains."""
    rng = np.random.default_rng(seed)
    whole = Counter(_ids(_epoch(_everybody(make, rng))[0]))
    assert whole
    loaders = _everybody(make, rng)
    batches, states = _epoch(loaders, state_of)
    assert Counter(_ids(batches)) == whole
    for step, state in enumerate(states):
        trained = Counter(_ids(batches[: step + 1]))
        others = _everybody(make, rng)
        for loader in others:
            loader.load_state_dict(state)
        rest = Counter(_ids(_epoch(others)[0]))
        # A stream finds out only by reading on that what is left makes no samples, and then yields nothing.
        found_late = state_of is not state_of_any_rank and not rest
        if trained == whole and not found_late:  # the next epoch
            assert others[0].epoch == 2
            assert rest.total() == whole.total()
        else:
            assert trained + rest == whole, f"after step {step} of {len(states)}"


def _everybody(make: Make, rng: np.random.Generator) -> list[Any]:
    world_size = int(rng.integers(1, 6))
    shape = {
        "batch_size": int(rng.integers(1, 25)),
        "num_workers": int(rng.integers(0, 3)),
        "prefetch": int(rng.integers(1, 5)),
    }
    return [make(Shape(rank=rank, world_size=world_size, **shape)) for rank in range(world_size)]


def _epoch(loaders: Sequence[Any], state_of: State | None = None) -> tuple[list[list[Any]], list[Mapping[str, Any]]]:
    """Return each step's batches and the states after them; ranks that end early keep their last batch."""
    iterators = [iter(loader) for loader in loaders]
    last: list[Any] = [None] * len(loaders)
    steps, states = [], []
    # Pipelines pull ahead of training: states are asked for when all has been yielded.
    while any(batches := [next(iterator, None) for iterator in iterators]):
        steps.append([batch for batch in batches if batch is not None])
        last = [new or old for new, old in zip(batches, last, strict=True)]
        states.append(last)
    if state_of is None:
        return steps, []
    return steps, [state_of(loaders, batches) for batches in states]


def _ids(steps: Sequence[Sequence[Any]]) -> list[int]:
    return [sample for step in steps for batch in step for sample in batch.sample_ids[: batch.num_real].tolist()]
