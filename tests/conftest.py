import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

# So that tests, and processes that they start, import `tests`; at the end, because the root has a folder `datasets`.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from tests.process_marks import MARK, ProcessGuard, starts_processes
from tests.ranks import RankPool
from tests.s3_server import S3, run_s3

# Of the processes of the tests, and of those that they start: each core has one of them already. Threads of OpenMP that
# wait for each other there take up to 60 times as long for small tensors. PyTorch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_MEMORY = "/dev/shm"
_MEMORY_BYTES = 2 << 30  # ten times what all tests write

# No deadline: examples that start collectives or compile can take long, and nothing here is timed.
settings.register_profile("evenrank", deadline=None, print_blob=True)
settings.load_profile("evenrank")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=3600.0, help="how long the soak test draws rounds")
    parser.addoption("--soak-seed", type=int, default=0, help="which rounds it draws")


# Before pytest's own, which reads the option.
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessGuard())
    # Many tests are many small files, of which a disk takes 25 times as long as memory to create and remove one.
    if config.option.basetemp is None and os.path.isdir(_MEMORY) and shutil.disk_usage(_MEMORY).free > _MEMORY_BYTES:
        config.option.basetemp = tempfile.mkdtemp(prefix="evenrank-tests-", dir=_MEMORY)
        config.add_cleanup(partial(shutil.rmtree, config.option.basetemp, ignore_errors=True))


# Of `--numprocesses auto`; hosts with GPUs may have no xdist. More processes than cores, because tests wait for ranks
# that they have started: with one per core, the cores were idle for a fifth of the time.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return 3 * (os.cpu_count() or 1) // 2


# Before the marks are evaluated by `-m`.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Those of pages, which train for minutes, come first, so that no process is left alone with them at the end.
    items.sort(key=lambda item: len(item.path.parents))
    for item in items:
        if isinstance(item, pytest.Function) and starts_processes(item):
            item.add_marker(MARK)
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker):
                item.add_marker(MARK)  # Triton starts a compiler
                if _num_cuda_devices() < needed:
                    reason = f"needs {needed} CUDA devices, there are {_num_cuda_devices()}"
                    item.add_marker(pytest.mark.skip(reason=reason))


def _num_cuda_devices() -> int:
    # Imported here, because the controller of a parallel run, which only reads this file, does not need torch.
    import torch

    return torch.cuda.device_count()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    # Archives have the time in their bytes, and the processes of a parallel run must agree on the names of tests.
    return argname if isinstance(val, bytes) else None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new folder, which is the current one during the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """Return a server with the S3 protocol, shared by all tests, which use different keys of its bucket."""
    with run_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def gpu_ranks() -> Iterator[RankPool]:
    """Return processes that have not used a GPU before."""
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of 300 synthetic users with lognormal histories of 0 to 60 events; about 210 are in train."""
    return make_small_dataset(tmp_path_factory.mktemp("small") / "data", seed=7)


@pytest.fixture(scope="session")
def rich_dataset(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `small_dataset` with contextual features and columns of events of every kind."""
    from tests.datasets.crafted import add_columns, copy_dataset

    return add_columns(copy_dataset(small_dataset, tmp_path_factory.mktemp("rich") / "data"))


def make_small_dataset(out: Path, *, seed: int, num_users: int = 300) -> Path:
    """Make the dataset of `small_dataset`, or one with other users or histories."""
    pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
    from evenrank.datasets.distributions import Lognormal, Zipf
    from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

    lengths, items = Lognormal(mean=12, std=14, low=0, high=60), Zipf(exponent=1.05, high=500)
    synthetic = SyntheticConfig(num_users=num_users, lengths=lengths, items=items)
    preprocess(PreprocessConfig(dataset="synthetic", out=out, seed=seed, synthetic=synthetic))
    return out
