"""A loader that is stopped after any step, and resumed in any shape, yields exactly the samples not yet trained."""

import dataclasses
import functools
import itertools
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader import (
    Loader,
    LoaderConfig,
    Mixture,
    StreamConfig,
    StreamLoader,
    build_loader,
    build_stream_loader,
)
from evenrank.dataloader.balance import BalanceConfig
from evenrank.datasets import open_store
from tests.conftest import make_small_dataset
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of
from tests.dataloader.resuming import (
    Shape,
    stop_and_resume_everywhere,
    through_json,
    through_torch,
)

KINDS = [
    "shuffle",
    "rows",
    "candidates",
    "semantic ids",
    "mixture",
    "windows",
    "stream",
    "stream, semantic ids",
]
STREAM = StreamConfig(lanes=5, window_rows=1)
_open_store_once = functools.cache(open_store)


@pytest.fixture(scope="module")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 60 users in train: the number of batches grows with the square of the number of users."""
    out = make_small_dataset(tmp_path_factory.mktemp("tiny") / "data", seed=7, num_users=90)
    lengths = open_store(out).lengths
    assert len(lengths) > 50
    assert (lengths < 2).any()  # some users are left out, also with the fewest candidates
    return out


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = np.random.default_rng(0).integers(0, 8, (3, 501))
    table[:, [1, 2]] = -1  # popular items without codes, so that some users are left out
    path = tmp_path_factory.mktemp("codes") / "codes.npy"
    np.save(path, table)
    return path


def _make_loader(kind: str, path: Path, codes: Path, seed: int, shape: Shape) -> Loader[Any] | StreamLoader[Any]:
    options: dict[str, Any] = dataclasses.asdict(shape) | {"seed": seed}
    rank = {name: options.pop(name) for name in ("rank", "world_size")}
    is_stream, balance = kind.startswith("stream"), None
    data: Path | Mixture = Mixture(weights={path: 1.0, str(path): 2.5}) if kind == "mixture" else path
    match kind:
        case "shuffle" | "rows":
            options["order"] = kind
        case "windows":
            balance = BalanceConfig(cost=COST, window=2 + seed % 4)
        case "candidates" | "stream":
            options["max_num_candidates"] = 3
    config: Any = LoaderConfig(**options, codes=codes if "semantic" in kind else None)
    if is_stream:
        return build_stream_loader(path, config, STREAM, rank=shape.rank, world_size=shape.world_size)
    return build_loader(data, config, **rank, balance=balance)


# Of other kinds, chains of jobs resume elsewhere in tests/laws.
SEEDED = [(kind, seed) for kind in KINDS if "semantic" in kind for seed in range(12)]


@pytest.mark.parametrize(
    ("kind", "seed"), [*SEEDED, *(pytest.param(kind, None, marks=pytest.mark.long) for kind in KINDS)]
)
def test_after_a_stop_at_any_step_exactly_the_rest_comes(
    tiny_dataset: Path, small_dataset: Path, codes: Path, kind: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seeds, max_batch_size = (
        (tiny_dataset, [seed], 8) if seed is not None else (small_dataset, range(100, 400), 24)
    )
    # Thousands of loaders are made, and mapping files would take most of the time.
    monkeypatch.setattr("evenrank.dataloader.loader.open_store", _open_store_once)
    for each in seeds:
        make_loader = functools.partial(_make_loader, kind, path, codes, each)
        stop_and_resume_everywhere(make_loader, each, max_batch_size=max_batch_size)


def _link(path: Path, stream: StreamConfig, state: Any, rng: np.random.Generator, trained: dict[int, Any]) -> Any:
    """Train some steps of an epoch on a random number of ranks, count their samples, and return the state."""
    world_size, batch_size = int(rng.integers(1, 6)), int(rng.integers(1, 40))
    config = LoaderConfig(batch_size=batch_size, num_workers=int(rng.integers(0, 2)), seed=3)
    build = functools.partial(build_stream_loader, path, config, stream, world_size=world_size)
    loaders = [build(rank=rank) for rank in range(world_size)]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    num_steps, num_ahead = int(rng.integers(0, 9)), int(rng.integers(0, 4))
    if num_steps == 0:
        return loaders[-1].state_dict()
    steps = [*itertools.islice(zip(*loaders, strict=True), num_steps + num_ahead)]
    for batch in itertools.chain(*steps[:num_steps]):
        trained[batch.epoch].update(ids_of(batch))
    last = steps[:num_steps][-1][0]
    return loaders[-1].state_dict(after=last)


@settings(max_examples=6)
@given(st.integers(0, 1 << 32), st.integers(10, 50))
def test_any_number_of_stops_trains_each_sample_once(small_dataset: Path, seed: int, num_links: int) -> None:
    rng = np.random.default_rng(seed)
    stream = StreamConfig(lanes=int(rng.integers(1, 9)), window_rows=int(rng.integers(1, 5)))
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
