import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenrank.core.errors import ConfigError, DataError
from trainer.lock import FolderLock
from trainer.logs import JobLog


def test_an_incomplete_line_of_a_killed_job_is_removed_and_numbers_are_json(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind": "train", "step": 1, "loss": 0.5}\n{"kind": "tra')
    with JobLog(tmp_path, is_first=True, tensorboard=False) as log:
        log.record("eval", 2, {"auc": math.nan, "loss": 0.25})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"kind": "train", "step": 1, "loss": 0.5},
        {"kind": "eval", "step": 2, "auc": None, "loss": 0.25},
    ]


def test_a_missing_tensorboard_is_an_error_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tensorboard is missing .*; pip install 'evenrank\[tensorboard\]'"):
        JobLog(tmp_path, is_first=True, tensorboard=True)


ROOT = Path(__file__).resolve().parents[3]
# Locks a folder, prints a line, and waits there.
HOLD = f"""
import pathlib, signal, sys
sys.path.insert(0, {str(ROOT / "examples")!r})
from trainer.lock import FolderLock
lock = FolderLock(pathlib.Path(sys.argv[1]))
print("locked", flush=True)
signal.pause()
"""


def test_the_error_names_the_process_that_holds_the_lock_and_a_killed_one_holds_none(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        try:
            with pytest.raises(DataError, match=re.escape(f"{out} is in use by process {holder.pid} on host ")):
                FolderLock(out)
        finally:
            holder.kill()
    with FolderLock(out), pytest.raises(DataError, match=f"is in use by process {os.getpid()} on host "):
        FolderLock(out)
    with FolderLock(out):  # closed above
        pass


def test_a_lock_of_an_unknown_process_is_held_and_another_file_in_its_place_stays(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        (tmp_path / ".lock-holder").unlink()
        with pytest.raises(DataError, match="is in use by another process; wait for it, or choose another folder"):
            FolderLock(tmp_path)
    (tmp_path / ".lock").write_text("precious")
    with pytest.raises(DataError, match=f"{tmp_path} cannot be locked: {tmp_path}/.lock is not a lock file; choose an"):
        FolderLock(tmp_path)
    assert (tmp_path / ".lock").read_text() == "precious"
