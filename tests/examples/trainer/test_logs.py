"""The log of a job."""

import json
import math
import sys
from pathlib import Path

import pytest

from evenrank.core.errors import ConfigError
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


def test_a_log_says_nothing_on_other_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with JobLog(tmp_path / "out", is_first=False, tensorboard=True) as log:
        log.start(0, 10)
        log.advance()
        log.say("step 1")
        log.record("train", 1, {"loss": 0.5})
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "out").exists()


def test_without_a_terminal_there_are_lines_and_no_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with JobLog(tmp_path, is_first=True, tensorboard=False) as log:
        log.start(0, 10)
        log.advance()
        log.say("step 1")
    assert capsys.readouterr() == ("step 1\n", "")


def test_a_missing_tensorboard_is_an_error_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tensorboard is missing .*; pip install 'evenrank\[tensorboard\]'"):
        JobLog(tmp_path, is_first=True, tensorboard=True)
