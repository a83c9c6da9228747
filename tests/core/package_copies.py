"""Copies of the package's sources, without machine code, and programs that run in processes of their own."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from evenrank.core.numba_cache import PACKAGE_FOLDER

# Without the `site` module, so that the copy is imported and not what the environment has installed.
_SITE = f"import sys; sys.path.append({sysconfig.get_paths()['purelib']!r})\n"


def copy_package(folder: Path) -> Path:
    """Copy the sources of the package, without what is compiled, and return the copy's folder."""
    package = folder / "evenrank"
    for name in ("core", "datasets"):
        shutil.copytree(PACKAGE_FOLDER / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE_FOLDER / "__init__.py", package)
    return package


def start(package: Path, home: Path, program: str) -> subprocess.Popen[str]:
    """Start a program that imports a copy of the package."""
    temporary = package.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    environment = {"PYTHONPATH": str(package.parent), "HOME": str(home), "TMPDIR": str(temporary), "PATH": os.defpath}
    return subprocess.Popen(
        # Without .pyc files, which Python takes for current if a source was changed twice within a second.
        [sys.executable, "-B", "-S", "-c", _SITE + program],
        env=environment,
        cwd=package.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> list[str]:
    """Wait for a program that has to succeed, and return the words that it prints."""
    output, errors = process.communicate(timeout=250)
    assert process.returncode == 0, errors
    return output.split()
