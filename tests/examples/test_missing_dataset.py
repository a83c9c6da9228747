import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.torchrun import EXAMPLES

pytestmark = pytest.mark.examples

# Of all in one process, because each would import torch.
PROGRAM = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--data", "missing"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as exit:
        print(exit.code)
"""


def test_without_a_dataset_the_examples_say_how_to_make_one_and_exit_with_2(tmp_path: Path) -> None:
    paths = sorted(map(str, EXAMPLES.glob("*.py")))
    command = [sys.executable, "-c", PROGRAM, *paths]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert run.stdout.split() == ["2"] * len(paths), run.stderr
    line = "error: missing is not a dataset: no such folder; make one with `evenrank preprocess --out missing`"
    assert [found for found in run.stderr.splitlines() if found.startswith("error")] == [line] * len(paths)
    assert "Traceback" not in run.stderr
