"""Marks the tests that start processes, so that `make test-fast` can leave them out.

A test is marked if its function, a fixture that it uses, or a helper that either calls refers to something that starts
processes. A test without the mark cannot start one, nor can any start Python such that `import datasets` finds ours.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

MARK = "processes"
ROOT = Path(__file__).resolve().parent.parent
_STARTERS: tuple[object, ...] = (subprocess, multiprocessing)
_AUDITED = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")


def starts_processes(item: pytest.Function) -> bool:
    """Return whether a test refers to something that starts processes."""
    fixtures = (definition.func for found in item._fixtureinfo.name2fixturedefs.values() for definition in found)
    seen: set[object] = set()
    return any(_reaches_starter(function, seen) for function in (item.function, *fixtures))


def _reaches_starter(value: object, seen: set[object]) -> bool:
    """Return whether a module, a function or, of a class, any method does so."""
    if isinstance(value, ModuleType):
        return value in _STARTERS
    if not callable(value) or str(getattr(value, "__module__", "")).split(".")[0] not in ("tests", "evenrank"):
        return False
    if isinstance(value, type):
        return any(_reaches_starter(method, seen) for method in vars(value).values() if hasattr(method, "__code__"))
    functions = [plain for plain in _unwrapped(value) if plain not in seen]
    seen.update(functions)
    used = (each for plain in functions for each in _referenced(plain.__code__, plain.__globals__))
    return any(_reaches_starter(each, seen) for each in used)


def _unwrapped(function: Any) -> Iterator[FunctionType]:
    """Yield the plain function under the wrappers of fixtures, hypothesis and functools."""
    while function is not None:
        if isinstance(function, FunctionType):
            yield function
        hypothesis = getattr(function, "hypothesis", None)
        function = getattr(hypothesis, "inner_test", None) or getattr(function, "__wrapped__", None)


def _referenced(code: CodeType, scope: dict[str, Any]) -> Iterator[object]:
    """Yield the values of the global names that a function uses, nested functions and imports included."""
    for name in code.co_names:
        if name in scope or name in sys.modules:  # the latter if it is imported inside the function
            yield scope.get(name, sys.modules.get(name))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _referenced(constant, scope)


def check_path(popen: Sequence[Any]) -> None:
    """Raise a RuntimeError if a process, given as the arguments of its audit event, would have the root first."""
    _, command, cwd, _ = popen
    words = [os.fsdecode(word) for word in command]
    is_python = Path(words[0]).name.startswith(("python", "torchrun"))
    if is_python and {"-c", "-m"} & set(words) and "-P" not in words and Path(cwd or ".").resolve() == ROOT:
        raise RuntimeError(f"{' '.join(words)[:100]} would import `datasets` from the checkout; add -P, or another cwd")


class ProcessGuard:
    """A pytest plugin under which only marked tests can start processes."""

    def __init__(self) -> None:
        self._unmarked_test: str | None = None
        self._is_testing = False  # before, xdist starts processes with a path of its own
        sys.addaudithook(self._audit)
        start = BaseProcess.start

        def guarded_start(process: BaseProcess) -> None:
            self._check(f"multiprocessing: {process.name}")
            start(process)

        BaseProcess.start = guarded_start  # type: ignore[assignment,method-assign]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._unmarked_test = None if item.get_closest_marker(MARK) else item.nodeid
        self._is_testing = True
        try:
            return (yield)
        finally:
            self._unmarked_test, self._is_testing = None, False

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in _AUDITED:
            self._check(f"{event} {arguments[0] if arguments else ''}")
        if event == "subprocess.Popen" and self._is_testing:
            check_path(arguments)

    def _check(self, what: str) -> None:
        if self._unmarked_test is not None:
            raise RuntimeError(
                f"{self._unmarked_test} starts a process ({what}) without the mark `{MARK}`; refer to subprocess, "
                f"multiprocessing or RankPool directly, or add @pytest.mark.{MARK}"
            )
