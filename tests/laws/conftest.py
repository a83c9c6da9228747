import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenrank.datasets import open_store
from tests.laws.data import make_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the dataset of all kinds of loader."""
    pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
    out = make_data(tmp_path_factory.mktemp("laws") / "data")
    with pytest.MonkeyPatch.context() as patch:
        # Thousands of loaders are made, and mapping files would take most of the time.
        patch.setattr("evenrank.dataloader.loader.open_store", functools.cache(open_store))
        yield out
