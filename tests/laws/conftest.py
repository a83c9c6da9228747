import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenrank.datasets import open_store
from tests.laws.data import make_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the dataset of all kinds of loader."""
    pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
    return make_data(tmp_path_factory.mktemp("laws") / "data")


@pytest.fixture(scope="module", autouse=True)
def one_store_of_each_path() -> Iterator[None]:
    """Open each dataset once in a file of laws, which make thousands of loaders: mapping files would take longest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenrank.dataloader.loader.open_store", functools.cache(open_store))
        yield
