import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from evenrank.core import compiled as loops
from evenrank.core.compiled import PACKAGE_FOLDER

NOTICE = "compiling, once per machine, about 25 s\n"
NESTED = """
from evenrank.core.compiled import compiled
from evenrank.core.hashing import mix_word

@compiled
def inner(values):
    return values[0] + values[-1]

@compiled
def outer(values):
    return inner(values) + inner(values * 2)

@compiled
def twice(word):
    return mix_word(mix_word(word))
"""
MIX = """
import numpy as np
from evenrank.core.nested import twice
from evenrank.core.compiled import cache_folder
print(twice(np.uint64(7)), cache_folder(), sum(twice.stats.cache_misses.values()))
"""
# Waits for a line, so that all processes begin at the same time; prints how often it compiled and loaded each function.
COUNT = """
import numpy as np
from evenrank.core.nested import inner, outer
print("ready", flush=True)
input()
outer(np.arange(3))
print(*(sum(counts.values()) for f in (inner, outer) for counts in (f.stats.cache_misses, f.stats.cache_hits)))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a copy of the package's sources with nested compiled functions, without machine code."""
    package = tmp_path / "evenrank"
    for name in ("core", "datasets"):
        shutil.copytree(PACKAGE_FOLDER / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE_FOLDER / "__init__.py", package)
    (package / "core" / "nested.py").write_text(NESTED)
    (tmp_path / "temporary").mkdir()
    return package


def _start(package: Path, program: str) -> Any:
    folder = package.parent
    environment = {"PYTHONPATH": str(folder), "HOME": str(folder / "home"), "TMPDIR": str(folder / "temporary")}
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # Without the `site` module, so that the copy is imported rather than the installed package; without .pyc files,
    # which Python takes for current if a source was changed twice within a second.
    site = f"import sys; sys.path.append({sysconfig.get_paths()['purelib']!r})\n"
    command = [sys.executable, "-B", "-S", "-c", site + program]
    return subprocess.Popen(command, env=environment | {"PATH": os.defpath}, cwd=folder, text=True, **pipes)


class Mixed(NamedTuple):
    hash: str
    folder: Path
    misses: str
    notice: str


def _mix(package: Path) -> Mixed:
    process = _start(package, MIX)
    output, errors = process.communicate(timeout=250)
    assert process.returncode == 0, errors
    mixed, folder, misses = output.split()
    return Mixed(mixed, Path(folder), misses, errors)


def test_machine_code_is_compiled_once_per_source_and_kept_where_nobody_else_can_write(
    package: Path, tmp_path: Path
) -> None:
    in_package, private = package / "__pycache__", tmp_path / "home" / ".cache" / "evenrank"
    first = _mix(package)
    assert (first.folder.parent, first.misses, first.notice) == (in_package, "1", NOTICE)
    assert _mix(package) == first._replace(misses="0", notice="")
    hashing = package / "core" / "hashing.py"
    source = hashing.read_text()
    hashing.write_text(source.replace("0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB"))
    assert _mix(package).hash != first.hash  # of a function in another file, which uses it
    assert len(list(in_package.glob("compiled-*"))) == 1  # that of the earlier code is removed
    hashing.write_text(source)
    assert _mix(package)[:2] == first[:2]
    # A user who cannot write the package begins with what is compiled there, also in the image of a container.
    (first.folder / "lock").write_text("no process can lock this, even of root")
    for path in (package / "core").glob("*.py"):
        os.utime(path, (1_500_000_000, 1_500_000_000))
    assert _mix(package) == Mixed(first.hash, private / first.folder.name, "0", "")
    (first.folder / "lock").unlink()
    if os.geteuid() == 0:  # what another user has written there is not run
        os.chown(first.folder, 12_345, -1)
        assert _mix(package).folder == private / first.folder.name
    shutil.rmtree(in_package)
    in_package.write_text("no folder can be created here, even by root")
    shutil.rmtree(private)
    assert _mix(package).folder.parent == private
    assert private.stat().st_mode & 0o077 == 0
    assert list(private.rglob("*.nbc"))
    private.chmod(0o777)
    assert _mix(package).folder.parent == tmp_path / "temporary" / f"evenrank-{os.geteuid()}"


def test_processes_that_start_together_compile_each_function_once_and_one_says_so(package: Path) -> None:
    together = [_start(package, COUNT) for _ in range(3)]
    for process in together:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=250) for process in together]
    # A process that loads `outer` has no use for `inner`, which is part of it.
    assert sorted(said) == [("0 0 0 1\n", ""), ("0 0 0 1\n", ""), ("1 0 1 0\n", NOTICE)]


def test_compiled_functions_use_only_names_of_files_with_compiled_functions() -> None:
    """Numba compiles the values of globals in, so a changed constant in any other file would be missed."""
    compiled_files = set(loops._compiled_sources())
    assert len(compiled_files) > 10
    for path in compiled_files:
        name = ".".join(path.relative_to(PACKAGE_FOLDER).with_suffix("").parts)
        functions = [value for value in vars(import_module(f"evenrank.{name}")).values() if hasattr(value, "py_func")]
        used = {used for function in functions for used in function.py_func.__code__.co_names}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("evenrank."):
                folder = PACKAGE_FOLDER.joinpath(*node.module.split(".")[1:])
                for alias in node.names:  # a name of a file, or a file of a folder
                    imported = {folder.with_suffix(".py"), folder / f"{alias.name}.py"}
                    is_used = (alias.asname or alias.name) in used
                    assert not is_used or imported & compiled_files, f"{path}: {alias.name}"
