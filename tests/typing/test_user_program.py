import runpy
import sys
from pathlib import Path

import pytest

from evenrank.dataloader.balance import COSTS, STRATEGIES
from tests.registrations import restored


# `scripts/check_package.py` checks its types from the wheel.
def test_the_program_balances_and_resumes(
    small_dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Path(__file__).with_name("user_program.py")
    monkeypatch.setattr(sys, "argv", [str(program), str(small_dataset)])
    with restored(COSTS, STRATEGIES):
        runpy.run_path(str(program))
    error = "the cost 'squares' is a function, without settings; leave out power"
    assert capsys.readouterr().out.endswith(f"; an error reads: {error}\n")
