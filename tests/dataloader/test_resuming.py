"""A loader that is stopped after any step, and resumed in any shape, yields exactly the samples not yet trained."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.dataloader import (
    Loader,
    LoaderConfig,
    Mixture,
    SemanticIdConfig,
    StreamConfig,
    StreamLoader,
    build_loader,
    build_stream_loader,
    merge_stream_states,
)
from evenrank.dataloader.balance import BalanceConfig, HSTUCost
from evenrank.datasets import open_store
from evenrank.datasets.distributions import Lognormal, Zipf
from tests.dataloader.resuming import (
    Batch,
    ResumableLoader,
    SaveState,
    Shape,
    state_of_any_rank,
    stop_and_resume_everywhere,
)

KINDS = (
    "shuffle",
    "rows",
    "time",
    "candidates",
    "semantic ids",
    "mixture",
    "windows",
    "stream",
    "stream of semantic ids",
)
STREAM = StreamConfig(num_shards=5, buffer_rows=5, open_shards=2)
COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)

_open_store_once = functools.cache(open_store)


@pytest.fixture(scope="module")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 60 users in train: the number of batches grows with the square of the number of users."""
    pytest.importorskip("polars", reason="hosts that only train have no Polars to make data with")
    from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

    out = tmp_path_factory.mktemp("tiny") / "data"
    synthetic = SyntheticConfig(
        num_users=90, lengths=Lognormal(mean=12, std=14, low=0, high=60), items=Zipf(exponent=1.05, high=500)
    )
    preprocess(PreprocessConfig(dataset="synthetic", out=out, seed=7, synthetic=synthetic))
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


@pytest.fixture(autouse=True)
def _share_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open each dataset once: thousands of loaders are made, and mapping files would take most of the time."""
    monkeypatch.setattr("evenrank.dataloader.loader.open_store", _open_store_once)


def _merged_state(loaders: Sequence[ResumableLoader], batches: Sequence[Batch | None]) -> Mapping[str, Any]:
    """Merge the states of all ranks after a step, also of ranks that ran out of data before."""
    latest = max((batch for batch in batches if batch is not None), key=lambda batch: batch.position)
    return merge_stream_states([loader.state_dict(after=latest) for loader in loaders])


def _make_loader(kind: str, path: Path, codes: Path, seed: int, shape: Shape) -> Loader[Any] | StreamLoader[Any]:
    options: dict[str, Any] = {
        "batch_size": shape.batch_size,
        "num_workers": shape.num_workers,
        "prefetch": shape.prefetch,
        "seed": seed,
    }
    rank: dict[str, Any] = {"rank": shape.rank, "world_size": shape.world_size}
    match kind:
        case "semantic ids":
            return build_loader(path, SemanticIdConfig(codes=codes, **options), **rank)
        case "mixture":
            mixture = Mixture(weights={path: 1.0, str(path): 2.5})
            return build_loader(mixture, LoaderConfig(**options), **rank)
        case "stream":
            return build_stream_loader(path, LoaderConfig(max_num_candidates=2, **options), STREAM, **rank)
        case "stream of semantic ids":
            return build_stream_loader(path, SemanticIdConfig(codes=codes, **options), STREAM, **rank)
        case "windows":
            balance = BalanceConfig(cost=COST, window=2 + seed % 4)
            return build_loader(path, LoaderConfig(**options), **rank, balance=balance)
        case "candidates":
            return build_loader(path, LoaderConfig(max_num_candidates=3, **options), **rank)
        case order:
            return build_loader(path, LoaderConfig(**options, order=order), **rank)  # type: ignore[arg-type]


def _save_state_of(kind: str) -> SaveState:
    return _merged_state if kind.startswith("stream") else state_of_any_rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_after_a_stop_at_any_step_exactly_the_rest_comes(tiny_dataset: Path, codes: Path, kind: str, seed: int) -> None:
    make_loader = functools.partial(_make_loader, kind, tiny_dataset, codes, seed)
    stop_and_resume_everywhere(make_loader, seed, max_batch_size=8, save_state=_save_state_of(kind))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_stop_at_any_step_exactly_the_rest_comes_in_many_rounds(
    small_dataset: Path, codes: Path, kind: str
) -> None:
    for seed in range(100, 400):
        make_loader = functools.partial(_make_loader, kind, small_dataset, codes, seed)
        stop_and_resume_everywhere(make_loader, seed, max_batch_size=24, save_state=_save_state_of(kind))
