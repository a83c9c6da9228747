import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenrank.cli.main import main
from tests.cli.programs import Evenrank, Finished


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new folder, which is the current one during the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def evenrank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Evenrank]:
    """A function that runs `evenrank ARGUMENTS` in this process, which saves the imports of a new one."""

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr(sys, "argv", ["evenrank", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        output = capsys.readouterr()
        return Finished(sys.argv, int(stopped.value.code or 0), output.out, output.err)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
