"""The packages export their names lazily: importing a package imports nothing heavy, and every name can be imported."""

import importlib
import pickle
import subprocess
import sys

import pytest

from evenrank.dataloader import LoaderConfig, StreamConfig

PACKAGES = ("evenrank.datasets", "evenrank.dataloader", "evenrank.dataloader.routing", "evenrank.training")

IMPORT_AND_LIST = """
import sys
hidden = ("numba", "numpy", "polars", "pyarrow", "torch", "torchrec")
sys.modules.update(dict.fromkeys(hidden))
import evenrank.datasets, evenrank.dataloader, evenrank.training
from evenrank.core.errors import ConfigError
assert "open_store" in dir(evenrank.datasets)
"""


def test_importing_the_packages_imports_no_heavy_package() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_AND_LIST], check=True, cwd="/")


@pytest.mark.parametrize("package", PACKAGES)
def test_all_exported_names_are_there(package: str) -> None:
    module = importlib.import_module(package)
    names: dict[str, object] = {}
    exec(f"from {package} import *", names)
    assert module.__all__
    for name in module.__all__:
        assert names[name] is getattr(module, name)
    assert dir(module) == sorted(module.__all__)


def test_exported_records_can_be_pickled() -> None:
    for record in (LoaderConfig(batch_size=2), StreamConfig(num_shards=3)):
        assert pickle.loads(pickle.dumps(record)) == record
