"""Where a package is missing, one line says which extra of evenrank to install."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from evenrank.core.errors import EvenrankError, MissingPackageError
from evenrank.core.optional_imports import EXTRAS, naming_extras
from tests.dataloader.balance.test_writers import STEPS
from tests.dataloader.balance.test_writers import write as write_log

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HIDE = "import sys; sys.modules.update(dict.fromkeys({hidden!r}.split()));"


def _run(code: str, *arguments: str, hidden: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDE.format(hidden=hidden) + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=280)


def _names(extra: str) -> set[str]:
    """Return the packages of an extra and of the extras that it names, as they are imported."""
    names: set[str] = set()
    for requirement in map(Requirement, PYPROJECT["optional-dependencies"][extra]):
        if requirement.name == "evenrank":
            names = names.union(*(_names(other) for other in requirement.extras))
        else:
            names.add(requirement.name.replace("-", "_"))
    return names


def test_each_package_is_in_the_extra_that_the_message_names() -> None:
    base = {Requirement(requirement).name for requirement in PYPROJECT["dependencies"]}
    for package, extra in EXTRAS.items():
        assert package in _names(extra)
        assert package in _names("all")
        assert package not in base


def test_training_needs_neither_preprocessing_nor_plots() -> None:
    for extra in ("train", "cpu"):
        assert not _names(extra) & {"polars", "matplotlib"}


@pytest.mark.parametrize(
    ("arguments", "hidden", "remedy"),
    [
        (["preprocess", "--dataset", "synthetic"], "polars", "pip install 'evenrank[preprocess]'"),
        (["preprocess", "--dataset", "ml-20m"], "requests", "pip install 'evenrank[preprocess]'"),
        (
            ["which", "data", "--step", "0", "--rank", "0", "--world-size", "1", "--batch-size", "2"],
            "torch",
            "pip install 'evenrank[train]'; without CUDA: pip install 'evenrank[cpu]', then torchrec with --no-deps "
            "(docs/how-to/install.md)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_command_names_the_extra_that_is_missing(
    tmp_path: Path, arguments: list[str], hidden: str, remedy: str
) -> None:
    run = _run("from evenrank.cli.main import main; main()", *arguments, hidden=hidden, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"error: the package {hidden} is not installed; run {remedy}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hidden", ["matplotlib", "jinja2", "markupsafe"])
def test_tables_do_without_what_pages_need(tmp_path: Path, small_dataset: Path, hidden: str) -> None:
    write_log(tmp_path / "log.jsonl", *STEPS)
    for command, path, shown in (("metrics", "log.jsonl", "load before"), ("inspect", str(small_dataset), "p50")):
        run = _run(
            "from evenrank.cli.main import main; main()", command, path, "--html", "a.html", hidden=hidden, cwd=tmp_path
        )
        assert (run.returncode, shown in run.stdout) == (2, True), run.stdout
        assert run.stderr == f"error: the package {hidden} is not installed; run pip install 'evenrank[reports]'\n"
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


LIGHT = """
from evenrank.cli.main import main
from evenrank.core.errors import MissingPackageError
from evenrank.dataloader.balance import HSTUCost, partition
from evenrank.datasets import open_store
for package, name, missing in [
    ("evenrank.preprocess", "preprocess", "polars"),
    ("evenrank.dataloader", "build_loader", "torch"),
    ("evenrank.dataloader.balance", "Balancer", "torch"),
    ("evenrank.dataloader.routing", "bucketize", "torch"),
    ("evenrank.training", "scale_loss", "torch"),
]:
    try:
        getattr(__import__(package, fromlist=[""]), name)
    except MissingPackageError as error:
        assert str(error).startswith(f"the package {missing} is not installed; run pip install "), error
    else:
        raise AssertionError(package)
"""


def test_the_base_package_imports_without_extras_and_says_what_needs_them(tmp_path: Path) -> None:
    run = _run(LIGHT, hidden=" ".join(sorted(EXTRAS)) + " tqdm", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")


def test_other_missing_packages_are_reported_as_they_are() -> None:
    with pytest.raises(ModuleNotFoundError, match="my_package") as raised, naming_extras():
        raise ModuleNotFoundError("No module named 'my_package'", name="my_package")
    assert not isinstance(raised.value, MissingPackageError)


def test_the_error_is_ours_and_an_import_error() -> None:
    assert issubclass(MissingPackageError, EvenrankError)
    assert issubclass(MissingPackageError, ImportError)


@pytest.mark.parametrize("package", ["evenrank.dataloader", "evenrank.training"])
def test_packages_that_need_torch_check_its_release(tmp_path: Path, package: str) -> None:
    code = f"""
from importlib import metadata
found = {{"torch": "2.13.0", "fbgemm-gpu": "1.9.0", "torchrec": "1.8.0"}}
def version(name):
    if name not in found:
        raise metadata.PackageNotFoundError(name)
    return found[name]
metadata.version = version
import {package}
"""
    run = _run(code, hidden="", cwd=tmp_path)
    assert run.returncode == 1
    assert "ConfigError: torch 2.13.0 needs fbgemm-gpu 1.8 and torchrec 1.8, found 1.9.0 and 1.8.0; " in run.stderr
