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


def test_values_of_ranks_and_texts_are_lines_and_numbers_are_scalars_of_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with JobLog(tmp_path, is_first=True, tensorboard=True) as log:
        log.record("memory", 7, {"free": [3, 1, 2], "mfu": None})
        log.record("cache", 7, {"tables": "items", "hits": 5, "shares": [0.5, math.inf]}, of="items")
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [
        {"kind": "memory", "step": 7, "free": [3, 1, 2]},
        {"kind": "cache", "step": 7, "tables": "items", "hits": 5, "shares": [0.5, None]},
    ]
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert scalars == {
        "memory/free/min": [(7, 1)],
        "memory/free/max": [(7, 3)],
        "cache/items/hits": [(7, 5)],
        "cache/items/shares/min": [(7, 0.5)],
        "cache/items/shares/max": [(7, math.inf)],
    }


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
    with subprocess.Popen([sys.executable, "-P", "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True) as holder:
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
