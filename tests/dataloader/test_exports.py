"""The packages export their names lazily: importing a package imports nothing heavy, and every name can be imported."""

import importlib
import subprocess
import sys

import pytest


def test_importing_the_packages_imports_no_heavy_package() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(("numba", "numpy", "polars", "pyarrow", "torch", "torchrec")))
import evenrank.datasets, evenrank.dataloader, evenrank.training, evenrank.core.errors
assert "open_store" in dir(evenrank.datasets)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


@pytest.mark.parametrize("name", ["datasets", "dataloader", "dataloader.routing", "training"])
def test_all_exported_names_are_there(name: str) -> None:
    package = f"evenrank.{name}"
    module = importlib.import_module(package)
    names: dict[str, object] = {}
    exec(f"from {package} import *", names)
    assert module.__all__
    assert all(names[exported] is getattr(module, exported) for exported in module.__all__)
    assert dir(module) == sorted(module.__all__)
