import json
import logging
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "golden.py"


def test_results_that_differ_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "disable", lambda: None)  # for the rest of the process
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")  # which the script sets

    def golden(command: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["golden.py", command, str(file), "--only", "partitions"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ended.value.code, capsys.readouterr().out

    file = tmp_path / "before.json"
    assert golden("record") == (0, "")
    recorded = json.loads(file.read_text())
    changed = "partitions/lpt-swap/tokens/world 8/rows 4/seed 1"
    file.write_text(json.dumps(recorded | {changed: "other", "batches/that were not made": "any"}))
    assert golden("compare") == (1, f"{changed}\n1 of {len(recorded)} results differ\n")
