from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture
def gpu_ranks() -> Iterator[RankPool]:
    """Return processes that have not used a GPU before."""
    pool = RankPool()
    yield pool
    pool.stop()
