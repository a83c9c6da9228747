"""Fixtures that many tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import evenrank.datasets
from evenrank.datasets.distributions import Lognormal, Zipf
from tests.ranks import RankPool

# Examples that start collectives or compile take as long as they take; nothing is timed here.
settings.register_profile("evenrank", deadline=None, print_blob=True)
settings.load_profile("evenrank")

_COMPILED = ("core", "preprocess", "datasets", "dataloader")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_devices = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and num_devices < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, there are {num_devices}"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 synthetic users with lognormal histories of 0 to 60 events; 210 or so in train."""
    pytest.importorskip("polars", reason="hosts that only train have no Polars to make data with")
    from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

    out = tmp_path_factory.mktemp("small") / "data"
    synthetic = SyntheticConfig(
        num_users=300, lengths=Lognormal(mean=12, std=14, low=0, high=60), items=Zipf(exponent=1.05, high=500)
    )
    preprocess(PreprocessConfig(dataset="synthetic", out=out, seed=7, synthetic=synthetic))
    return out


def pytest_configure() -> None:
    """Forget compiled functions that are older than a file of compiled functions.

    Numba compiles a function anew when its own file changes, but not when that of a function which it calls does.
    """
    package = Path(evenrank.datasets.__file__).parents[1]
    files = [path for folder in _COMPILED for path in (package / folder).rglob("*.py")]
    newest = max(path.stat().st_mtime for path in files if "@compiled" in path.read_text())
    for folder in _COMPILED:
        for cached in (package / folder).rglob("*.nb[ic]"):
            if cached.stat().st_mtime < newest:
                cached.unlink()
