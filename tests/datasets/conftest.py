import tempfile
from pathlib import Path

import pytest

from tests.datasets.crafted import copy_dataset


@pytest.fixture
def dataset(small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the dataset without a cache, of a user whose home and temporary folders are in `tmp_path`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return copy_dataset(small_dataset, tmp_path / "data")
