import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from evenrank.core import compiled as loops
from evenrank.core.compiled import PACKAGE_FOLDER

NOTICE = "compiling, once per machine, about 25 s\n"
NESTED = """
from evenrank.core.compiled import compiled
from evenrank.core.hashing import mix_word

@compiled
def twice(word):
    return mix_word(mix_word(word))
"""
# Waits for a line, so that all processes begin at the same time. Python runs without the `site` module, so that it
# imports the copy rather than the installed package.
PROGRAM = f"""
import sys
sys.path.append({sysconfig.get_paths()["purelib"]!r})
import numpy as np
from evenrank.core.nested import twice
from evenrank.core.compiled import cache_folder
print("ready", flush=True)
input()
print(twice(np.uint64(7)), cache_folder(), sum(twice.stats.cache_misses.values()))
"""


Ran = tuple[str, Path, str, str]  # the hash, the folder, how often it was compiled, and what was said


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


def _run(package: Path, count: int = 1) -> list[Ran]:
    """Run the program in processes that begin together."""
    folder, pipes = package.parent, dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {"PYTHONPATH": str(folder), "HOME": str(folder / "home"), "TMPDIR": str(folder / "temporary")}
    # Without .pyc files, which Python takes for current if a source was changed twice within a second.
    command: Any = [sys.executable, "-B", "-S", "-c", PROGRAM]
    options: Any = {"env": environment | {"PATH": os.defpath}, "cwd": folder, "text": True, **pipes}
    processes: list[Any] = [subprocess.Popen(command, **options) for _ in range(count)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=250) for process in processes]
    found = [(*output.split(), errors) for output, errors in printed]
    return [(hashed, Path(place), misses, errors) for hashed, place, misses, errors in found]


def test_machine_code_is_compiled_once_per_source_and_kept_where_nobody_else_can_write(
    package: Path, tmp_path: Path
) -> None:
    in_package, private = package / "__pycache__", tmp_path / "home" / ".cache" / "evenrank"
    # Processes that start together compile it once, and one says so.
    *others, (value, folder, *said) = sorted(_run(package, 3), key=lambda ran: ran[2:])
    assert (folder.parent, said) == (in_package, ["1", NOTICE])
    assert others == [(value, folder, "0", "")] * 2
    hashing = package / "core" / "hashing.py"
    source = hashing.read_text()
    hashing.write_text(source.replace("0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB"))
    assert _run(package)[0][0] != value  # of a function in another file, which uses it
    assert len(list(in_package.glob("compiled-*"))) == 1  # that of the earlier code is removed
    hashing.write_text(source)
    assert _run(package)[0][:2] == (value, folder)
    # A user who cannot write the package begins with what is compiled there, also in the image of a container.
    (folder / "lock").write_text("no process can lock this, even of root")
    for path in (package / "core").glob("*.py"):
        os.utime(path, (1_500_000_000, 1_500_000_000))
    assert _run(package) == [(value, private / folder.name, "0", "")]
    (folder / "lock").unlink()
    if os.geteuid() == 0:  # what another user has written there is not run
        os.chown(folder, 12_345, -1)
        assert _run(package)[0][1] == private / folder.name
    shutil.rmtree(in_package)
    in_package.write_text("no folder can be created here, even by root")
    shutil.rmtree(private)
    assert _run(package)[0][1].parent == private
    assert private.stat().st_mode & 0o077 == 0
    assert list(private.rglob("*.nbc"))
    private.chmod(0o777)
    assert _run(package)[0][1].parent == tmp_path / "temporary" / f"evenrank-{os.geteuid()}"


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
