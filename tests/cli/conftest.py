"""Fixtures of the commands' tests."""

import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from evenrank.cli.main import main
from tests.cli.programs import Finished


@pytest.fixture
def evenrank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Finished]]:
    """A function that runs `evenrank ARGUMENTS` in this process, which saves the imports of a new one."""

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr(sys, "argv", ["evenrank", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        output = capsys.readouterr()
        return Finished(returncode=int(stopped.value.code or 0), stdout=output.out, stderr=output.err)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
