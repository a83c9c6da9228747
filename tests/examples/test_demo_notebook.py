import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.examples

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "demo.ipynb"


def _outputs(path: Path) -> list[list[dict[str, Any]]]:
    """Return the outputs of each cell with code, without what is on standard error."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return [[output for output in cell["outputs"] if output.get("name") != "stderr"] for cell in cells]


def _text(outputs: list[dict[str, Any]]) -> str:
    return "".join(part for output in outputs for part in output.get("text", []))


def test_the_notebook_prints_what_is_stored_in_it(tmp_path: Path) -> None:
    executed = tmp_path / "executed.ipynb"
    command = [str(Path(sys.executable).parent / "jupyter-execute"), str(NOTEBOOK), "--output", str(executed)]
    # Kernels keep files of connections, and IPython a history.
    environment = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    assert "TqdmWarning" not in executed.read_text()  # of a progress bar that notebooks cannot show
    stored, actual = _outputs(NOTEBOOK), _outputs(executed)
    assert [_text(outputs) for outputs in actual[:-1]] == [_text(outputs) for outputs in stored[:-1]]
    expected, (first, last) = ([float(n) for n in re.findall(r"\d+\.\d+", _text(one[-1]))] for one in (stored, actual))
    assert [first, last] == pytest.approx(expected, abs=0.05)
    assert last < 6.5 < first  # log(2,000 items) is 7.6
    assert {output["output_type"] for outputs in (*stored, *actual) for output in outputs} <= {"stream", "display_data"}
    figures = [sum("image/png" in output.get("data", {}) for output in outputs) for outputs in stored]
    assert figures == [0, 1, 0, 1, 0, 0]
    # The notebook names no place of a machine.
    text = NOTEBOOK.read_text()
    assert '"stderr"' not in text
    assert not re.findall(r"[^\s\w.:)\]*<]/\w[\w.-]*/", re.sub(r'"image/png": "[^"]*"', "", text))
