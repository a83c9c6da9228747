"""Jobs that are stopped and resumed many times, each on other ranks than the one before, train each sample once."""

import itertools
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader import LoaderConfig, StreamConfig, build_stream_loader, merge_stream_states
from evenrank.datasets import open_store
from tests.dataloader.batch_helpers import ids_of
from tests.dataloader.resuming import through_json, through_torch


def _link(
    path: Path, stream: StreamConfig, state: Any, rng: np.random.Generator, trained: defaultdict[int, Counter[int]]
) -> Any:
    """Train some steps of an epoch on a random number of ranks, count their samples, and return the merged state."""
    world_size, batch_size = int(rng.integers(1, 6)), int(rng.integers(1, 40))
    config = LoaderConfig(batch_size=batch_size, num_workers=int(rng.integers(0, 2)), seed=3)
    loaders = [
        build_stream_loader(path, config, stream, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    num_steps, num_ahead = int(rng.integers(0, 9)), int(rng.integers(0, 4))
    if num_steps == 0:
        return merge_stream_states([loader.state_dict() for loader in loaders])
    steps: list[list[Any]] = []
    while not steps:  # the rows that were left of an epoch may all be left out; then the next epoch follows
        of_ranks = itertools.zip_longest(*loaders)
        steps = [[*filter(None, batches)] for batches in itertools.islice(of_ranks, num_steps + num_ahead)]
    for batch in itertools.chain(*steps[:num_steps]):
        trained[batch.epoch].update(ids_of(batch))
    last = steps[:num_steps][-1][0]
    return merge_stream_states([loader.state_dict(after=last) for loader in loaders])


@settings(max_examples=6)
@given(st.integers(0, 1 << 32), st.integers(10, 50))
def test_each_sample_is_trained_once_however_often_a_job_is_resumed(
    small_dataset: Path, seed: int, num_links: int
) -> None:
    rng = np.random.default_rng(seed)
    stream = StreamConfig(
        num_shards=int(rng.integers(1, 9)), buffer_rows=int(rng.integers(1, 80)), open_shards=int(rng.integers(1, 4))
    )
    trained: defaultdict[int, Counter[int]] = defaultdict(Counter)
    state: Any = None
    for _ in range(num_links):
        state = _link(small_dataset, stream, state, rng, trained)
        state = through_json(state) if rng.integers(2) else through_torch(state)
    loader = build_stream_loader(small_dataset, LoaderConfig(batch_size=64), stream, rank=0, world_size=1)
    loader.load_state_dict(state)
    if trained:
        while loader.epoch <= max(trained):
            for batch in loader:
                trained[batch.epoch].update(ids_of(batch))
    once = Counter(range(len(open_store(small_dataset))))
    assert sorted(trained) == list(range(len(trained)))
    for epoch, counts in trained.items():
        assert counts == once, f"epoch {epoch}"
