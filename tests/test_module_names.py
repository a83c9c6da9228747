"""No module of ours stands in for one of Python or of a library: Python looks into a script's own folder first."""

import pkgutil
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("core", "preprocess", "datasets", "dataloader", "training", "cli", "examples", "scripts", "tests")
SCRIPT_FOLDERS = sorted({path.parent for name in FOLDERS for path in (ROOT / name).rglob("*.py")})


@pytest.fixture(scope="module")
def taken() -> set[str]:
    """Names of the modules of Python and of everything that is installed here."""
    installed = {module.name for module in pkgutil.iter_modules([sysconfig.get_path("purelib")])}
    return {name.casefold() for name in sys.stdlib_module_names | installed}


@pytest.mark.parametrize("folder", SCRIPT_FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_module_has_no_name_of_python_or_of_a_library(folder: Path, taken: set[str]) -> None:
    assert not taken & {path.stem.casefold() for path in folder.glob("*.py")}


def test_the_names_of_python_and_of_libraries_are_known(taken: set[str]) -> None:
    assert taken >= {"inspect", "html", "code", "requests", "numpy", "torch"}
