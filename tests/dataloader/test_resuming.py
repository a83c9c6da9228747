"""Everything that keeps its place goes on with exactly what was not trained, wherever it was stopped."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.dataloader import (
    JaggedBatch,
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
from tests.dataloader.resuming import Shape, State, state_of_any_rank, stop_and_resume_everywhere

KINDS = ("shuffle", "rows", "time", "candidates", "semantic ids", "mixture", "stream", "stream of semantic ids")


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = np.random.default_rng(0).integers(0, 8, (3, 501))
    table[:, [1, 2]] = -1  # popular items, so that some users are left out
    path = tmp_path_factory.mktemp("codes") / "codes.npy"
    np.save(path, table)
    return path


STREAM = StreamConfig(num_shards=7, buffer_rows=9, open_shards=2)


def _merged(loaders: Sequence[Any], batches: Sequence[JaggedBatch]) -> Mapping[str, Any]:
    """Merge the states that ranks save after a step; a rank whose data have run out is asked for the others' step."""
    latest = max((batch for batch in batches if batch is not None), key=lambda batch: batch.position)
    return merge_stream_states([loader.state_dict(after=latest) for loader in loaders])


def _make(kind: str, path: Path, codes: Path, seed: int, shape: Shape) -> Loader[Any] | StreamLoader[Any]:
    options: dict[str, Any] = {
        "batch_size": shape.batch_size,
        "num_workers": shape.num_workers,
        "prefetch": shape.prefetch,
        "seed": seed,
    }
    where = {"rank": shape.rank, "world_size": shape.world_size}
    match kind:
        case "semantic ids":
            return build_loader(path, SemanticIdConfig(codes=codes, **options), **where)
        case "mixture":
            mixture = Mixture(weights={path: 1.0, str(path): 2.5})
            return build_loader(mixture, LoaderConfig(**options), **where)
        case "stream":
            return build_stream_loader(path, LoaderConfig(max_num_candidates=2, **options), STREAM, **where)
        case "stream of semantic ids":
            return build_stream_loader(path, SemanticIdConfig(codes=codes, **options), STREAM, **where)
        case "candidates":
            return build_loader(path, LoaderConfig(max_num_candidates=3, **options), **where)
        case order:
            return build_loader(path, LoaderConfig(order=order, **options), **where)


def _state_of(kind: str) -> State:
    return _merged if kind.startswith("stream") else state_of_any_rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(30))
def test_stopped_after_any_step_exactly_the_rest_comes(small_dataset: Path, codes: Path, kind: str, seed: int) -> None:
    stop_and_resume_everywhere(
        functools.partial(_make, kind, small_dataset, codes, seed), seed, state_of=_state_of(kind)
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_after_any_step_exactly_the_rest_comes_in_many_rounds(
    small_dataset: Path, codes: Path, kind: str
) -> None:
    for seed in range(100, 400):
        stop_and_resume_everywhere(
            functools.partial(_make, kind, small_dataset, codes, seed), seed, state_of=_state_of(kind)
        )
