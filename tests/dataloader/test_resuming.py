"""Everything that keeps its place goes on with exactly what was not trained, wherever it was stopped."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.dataloader import LoaderConfig, Mixture, SemanticIdConfig, build_loader
from evenrank.dataloader.loader import Loader
from tests.dataloader.resuming import Shape, stop_and_resume_everywhere

KINDS = ("shuffle", "rows", "time", "candidates", "semantic ids", "mixture")


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = np.random.default_rng(0).integers(0, 8, (3, 501))
    table[:, [1, 2]] = -1  # popular items, so that some users are left out
    path = tmp_path_factory.mktemp("codes") / "codes.npy"
    np.save(path, table)
    return path


def _make(kind: str, path: Path, codes: Path, seed: int, shape: Shape) -> Loader[Any]:
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
        case "candidates":
            return build_loader(path, LoaderConfig(max_num_candidates=3, **options), **where)
        case order:
            return build_loader(path, LoaderConfig(order=order, **options), **where)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(30))
def test_stopped_after_any_step_exactly_the_rest_comes(small_dataset: Path, codes: Path, kind: str, seed: int) -> None:
    stop_and_resume_everywhere(functools.partial(_make, kind, small_dataset, codes, seed), seed)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_after_any_step_exactly_the_rest_comes_in_many_rounds(
    small_dataset: Path, codes: Path, kind: str
) -> None:
    for seed in range(100, 400):
        stop_and_resume_everywhere(functools.partial(_make, kind, small_dataset, codes, seed), seed)
