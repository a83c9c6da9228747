"""One compilation per machine: several processes with an empty cache, locks, and what is said when it takes long."""

import io
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenrank.core import numba_cache
from evenrank.core import numba_cache as compiled_module
from evenrank.core.numba_cache import compiled
from tests.core.package_copies import copy_package, finish, start

# Waits for a line, so that all processes begin at the same time; prints how often it compiled and loaded each function.
COUNT = """
import numpy as np
from evenrank.core.nested import inner, outer
print("ready", flush=True)
input()
outer(np.arange(3))
print(*(sum(counts.values()) for f in (inner, outer) for counts in (f.stats.cache_misses, f.stats.cache_hits)))
"""
NESTED = """
from evenrank.core.compiled import compiled

@compiled
def inner(values):
    return values[0] + values[-1]

@compiled
def outer(values):
    return inner(values) + inner(values * 2)
"""

# Stops while it compiles, with a child process that has inherited its open files.
HOLD = """
import os, signal
from evenrank.core.nested import inner
def stop(*arguments):
    child = os.fork()
    if child:
        print(child, flush=True)
    signal.pause()
inner._compiler.compile = stop
import numpy as np
inner(np.arange(3))
"""
# Prints a word when it waits, and then how often it has compiled.
WAIT = """
import time
import numpy as np
from evenrank.core import shared_compilation
from evenrank.core.nested import inner
numba_cache._MAX_WAIT_SECONDS = {seconds}
sleep, said = time.sleep, []
def say_once(seconds):
    if not said:
        said.append(print("waits", flush=True))
    sleep(seconds)
time.sleep = say_once
print(inner(np.arange(3)), sum(inner.stats.cache_misses.values()))
"""


def _copy_with_nested(folder: Path) -> Path:
    package = copy_package(folder)
    (package / "core" / "nested.py").write_text(NESTED)
    return package


def _read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_processes_with_an_empty_cache_compile_each_function_once(tmp_path: Path) -> None:
    package = _copy_with_nested(tmp_path)
    processes = [start(package, tmp_path, COUNT) for _ in range(3)]
    assert [_read_line(process) for process in processes] == ["ready"] * 3
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    counts = [tuple(map(int, finish(process))) for process in processes]
    # A process that loads `outer` has no use for `inner`, which is part of it.
    assert sorted(counts) == [(0, 0, 0, 1), (0, 0, 0, 1), (1, 0, 1, 0)]


def test_nobody_waits_for_ever_for_a_process_that_is_killed_or_suspended(tmp_path: Path) -> None:
    package = _copy_with_nested(tmp_path)
    holder = start(package, tmp_path, HOLD)
    child = int(_read_line(holder))
    try:
        waiting = start(package, tmp_path, WAIT.format(seconds=1000))
        assert _read_line(waiting) == "waits"
        impatient = start(package, tmp_path, WAIT.format(seconds=0.1))
        assert finish(impatient) == ["waits", "2", "1"]
        assert finish(waiting) == ["2", "0"]  # it loads what the other has compiled
        for path in package.glob("__pycache__/compiled-*/*/*.nb?"):
            path.unlink()
        waiting = start(package, tmp_path, WAIT.format(seconds=1000))
        assert _read_line(waiting) == "waits"
        holder.kill()
        assert finish(waiting) == ["2", "1"]
    finally:
        os.kill(child, signal.SIGKILL)  # first, as it has the pipes of the holder open
        holder.kill()
        holder.communicate()


@pytest.fixture
def compile_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable[..., Any]], Any]:
    """Return `compiled`, with an empty cache in `tmp_path`."""
    monkeypatch.setattr(compiled_module, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(numba_cache, "_spent", numba_cache._SpentTime())
    return compiled


def test_without_a_lock_file_or_a_folder_a_process_compiles_for_itself(
    tmp_path: Path, compile_in: Callable[[Callable[..., Any]], Any]
) -> None:
    (tmp_path / numba_cache._LOCK_NAME).mkdir()
    assert compile_in(lambda number: number + 1)(4) == 5
    assert len(list(tmp_path.glob("*/*.nbc"))) == 1
    function = compile_in(lambda number: number + 2)
    shutil.rmtree(tmp_path)
    tmp_path.write_text("no folder can be created here, even by root")
    assert function(4) == 6


def test_what_cannot_be_compiled_is_not_locked_afterwards(
    compile_in: Callable[[Callable[..., Any]], Any],
) -> None:
    function = compile_in(lambda number: number.no_such_attribute)
    with pytest.raises(Exception, match="no_such_attribute"):
        function(1)
    assert not function._cache._is_locked


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_slow_compilation_is_explained_once(
    compile_in: Callable[[Callable[..., Any]], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_terminal: bool,
) -> None:
    caplog.set_level(logging.INFO, "evenrank")
    monkeypatch.setattr(numba_cache, "_SECONDS_BEFORE_NOTICE", 0.0)
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("sys.stderr", stderr)
    for _ in range(2):
        assert compile_in(lambda number: number + 1)(4) == 5
    notice = "compiling loops for this machine (once)"
    assert stderr.getvalue() == (f"\revenrank: {notice}\n" if is_terminal else "")
    assert caplog.messages == ([] if is_terminal else [notice])


def test_a_quick_compilation_is_not_worth_a_word(
    compile_in: Callable[[Callable[..., Any]], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "evenrank")
    monkeypatch.setattr(numba_cache, "_SECONDS_BEFORE_NOTICE", 600.0)
    assert compile_in(lambda number: number + 1)(4) == 5
    assert caplog.messages == []
