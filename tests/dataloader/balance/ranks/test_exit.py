import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dataloader.balance.ranks.exit_program import KINDS, WORLD_SIZE


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.parametrize("runs", [1, pytest.param(50, marks=pytest.mark.long)])
def test_programs_that_leave_their_groups_to_the_interpreter_end_cleanly(runs: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.dataloader.balance.ranks.exit_program", str(runs), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, check=True).stdout
    assert json.loads(output) == {kind: [0] * WORLD_SIZE * runs for kind in KINDS}
