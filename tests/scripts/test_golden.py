import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _golden(command: str, file: Path) -> subprocess.CompletedProcess[str]:
    """Run a part of the golden run that takes a second."""
    script = [sys.executable, "-P", f"{ROOT}/scripts/golden.py", command, str(file), "--only", "partitions"]
    return subprocess.run(script, capture_output=True, text=True)


def test_results_that_differ_are_named(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    assert _golden("record", file).returncode == 0
    recorded = json.loads(file.read_text())
    changed = "partitions/lpt-swap/tokens/world 8/rows 4/seed 1"
    file.write_text(json.dumps(recorded | {changed: "other", "batches/that were not made": "any"}))
    compared = _golden("compare", file)
    assert (compared.stdout, compared.returncode) == (f"{changed}\n1 of {len(recorded)} results differ\n", 1)
