"""The tutorial "From logs to a model of your own": its commands in their order, and what they print."""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.examples.programs import ROOT, TUTORIALS, check_tutorial, losses_of, numbers_of, run_command
from tests.pages import blocks

pytestmark = pytest.mark.examples
PAGE = TUTORIALS / "own-model.md"


def _run(command: str, folder: Path) -> str:
    """Run a command of the page in a folder, and return what it prints."""
    program, *arguments = shlex.split(command)
    programs = {
        "python": [sys.executable],
        "evenrank": [sys.executable, "-m", "evenrank"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    }
    return run_command([*programs[program], *arguments], folder)


def _words(text: str) -> str:
    return " ".join(text.split())


def test_the_story_of_the_page_is_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_log, look = blocks(PAGE)
    (tmp_path / "make_log.py").write_text(make_log)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = "".join(blocks(PAGE, "bash")).replace("\\\n", " ").splitlines()
    _, preprocessed, _, simulated, first, second = (_run(command, tmp_path) for command in commands)

    shown = blocks(PAGE, "text")
    assert shown[0] in preprocessed
    assert _words(shown[1]) in _words(simulated)
    assert (tmp_path / "out" / "shop-report.html").exists()
    printed = io.StringIO()
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(printed):
        exec(look, {})
    assert printed.getvalue() == shown[2]

    check_tutorial("own-model", first, second)
    assert [*losses_of(first), *losses_of(second)] == [20, 40, 60, 80, 100, 120]
    shown_losses = losses_of(PAGE.read_text())
    assert shown_losses[20] < 5.3
    assert losses_of(first) | losses_of(second) == pytest.approx(shown_losses, abs=2e-3)
    evaluations = re.findall("^evaluation .*$", PAGE.read_text(), re.M)
    for output, evaluation in zip((first, second), evaluations, strict=True):
        assert numbers_of(output.splitlines()[-1]) == pytest.approx(numbers_of(evaluation), abs=5e-3)
    without_stop = _run(f"{commands[-1]} --checkpoint out/another.pt", tmp_path)
    assert losses_of(without_stop) == losses_of(first) | losses_of(second)
    assert re.sub(r".*evaluation", "", without_stop, flags=re.S) == re.sub(r".*evaluation", "", second, flags=re.S)
