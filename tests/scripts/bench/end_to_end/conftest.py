from pathlib import Path

import pytest

from end_to_end.tasks import WorkerTask
from tests.scripts.bench.end_to_end.small_tables import make_tasks


@pytest.fixture
def tasks(tmp_path: Path) -> tuple[WorkerTask, ...]:
    """Return tasks of a small table; their files can be written."""
    return make_tasks(tmp_path)
