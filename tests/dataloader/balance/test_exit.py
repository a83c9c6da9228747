"""Programs end cleanly whether or not they close their Balancers or destroy their default process group."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dataloader.balance.exit_program import KINDS, WORLD_SIZE

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")

ROOT = Path(__file__).parents[3]


def _exit_codes(runs: int, folder: Path) -> dict[str, list[int]]:
    """Return the exit codes of all ranks by kind of program; 3 if threads of a Balancer were left."""
    command = [sys.executable, "-m", "tests.dataloader.balance.exit_program", str(runs), str(folder)]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    codes: dict[str, list[int]] = json.loads(output)
    return codes


def test_programs_that_leave_their_groups_to_the_interpreter_end_cleanly(tmp_path: Path) -> None:
    assert _exit_codes(1, tmp_path) == {kind: [0] * WORLD_SIZE for kind in KINDS}


@pytest.mark.long
def test_hundreds_of_programs_end_cleanly(tmp_path: Path) -> None:
    assert _exit_codes(50, tmp_path) == {kind: [0] * 50 * WORLD_SIZE for kind in KINDS}
