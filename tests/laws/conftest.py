from pathlib import Path

import pytest

from tests.laws.data import make_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the dataset of all kinds of loader."""
    pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
    return make_data(tmp_path_factory.mktemp("laws") / "data")
