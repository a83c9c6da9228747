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
    monkeypatch.setattr(sys, "argv", ["user_program.py", str(small_dataset)])
    with restored(COSTS, STRATEGIES):
        runpy.run_path(str(Path(__file__).with_name("user_program.py")))
    error = "the cost 'squares' is a function, without settings; leave out power"
    assert capsys.readouterr().out.endswith(f"; an error reads: {error}\n")
