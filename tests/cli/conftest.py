import signal
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

from evenrank.cli.main import main
from tests.cli.programs import Evenrank, Finished

import_module(
    "evenrank.cli.reports.simulation"
)  # or a small simulation in this process leaves its functions plain Python


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
