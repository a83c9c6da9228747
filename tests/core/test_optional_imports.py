import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from evenrank.core.errors import ConfigError, MissingPackageError
from evenrank.core.optional_imports import (
    TorchReleaseWarning,
    check_releases,
    check_torch,
    extras,
    naming_extras,
    torch_releases,
)
from tests.dataloader.balance.metrics.example_steps import STEPS
from tests.dataloader.balance.metrics.example_steps import write as write_log

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTED = [*torch_releases().values()]


def _run(code: str, *arguments: str, hidden: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code where some packages are missing, or the command `evenrank` for no code."""
    code = code or "from evenrank.cli.main import main; main()"
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden.split()}));"
    command = [sys.executable, "-c", hide + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=280)


def _names(extra: str) -> set[str]:
    """Return the packages of an extra and of the extras that it names, as they are imported."""
    names: set[str] = set()
    for requirement in map(Requirement, PYPROJECT["optional-dependencies"][extra]):
        if requirement.name == "evenrank":
            names = names.union(*(_names(other) for other in requirement.extras))
        else:
            names.add(requirement.name.replace("-", "_").removesuffix("_skinny"))
    return names


def test_messages_name_the_extras_of_the_metadata_and_ranges_end_with_the_torch_releases() -> None:
    base = {Requirement(requirement).name for requirement in PYPROJECT["dependencies"]}
    assert extras().items() >= {("polars", "preprocess"), ("fbgemm_gpu", "train"), ("jinja2", "reports")}
    for package, extra in extras().items():
        assert package in _names(extra) & _names("all")
        assert package not in base
    assert not _names("train") & {"polars", "matplotlib"}  # it needs neither preprocessing nor plots
    found = _specifiers("train")
    for name, first, last in zip(("torch", "fbgemm-gpu", "torchrec"), TESTED[0], TESTED[-1], strict=True):
        oldest, newest = Version(first), Version(last)
        expected = f">={oldest.major}.{oldest.minor},<{newest.major}.{newest.minor + 1}"
        assert found[name] == SpecifierSet(expected)


def test_each_release_of_pytorch_has_an_extra_with_exactly_what_belongs_to_it() -> None:
    assert [*torch_releases()] == [
        name for name in PYPROJECT["optional-dependencies"] if re.fullmatch(r"torch\d+", name)
    ]
    assert sorted(TESTED, key=lambda tested: Version(tested.torch)) == TESTED
    for name, tested in torch_releases().items():
        assert name == "torch" + "".join(tested.torch.split(".")[:2])
        pins = {"torch": tested.torch, "fbgemm-gpu": tested.fbgemm, "torchrec": tested.torchrec}
        exact = {package: SpecifierSet(f"=={version}") for package, version in pins.items()}
        assert _specifiers(name) == {"evenrank": SpecifierSet(), **exact}
        assert _names(name) == _names("train")


def _specifiers(extra: str) -> dict[str, SpecifierSet]:
    requirements = map(Requirement, PYPROJECT["optional-dependencies"][extra])
    return {requirement.name: requirement.specifier for requirement in requirements}


def test_a_command_names_the_extra_that_is_missing(tmp_path: Path) -> None:
    run = _run("", "preprocess", "--dataset", "ml-20m", hidden="requests", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "error: the package requests is not installed; run pip install 'evenrank[preprocess]'\n"
    assert list(tmp_path.iterdir()) == []


def test_tables_need_less_than_pages(tmp_path: Path, small_dataset: Path) -> None:
    run = _run("", "inspect", str(small_dataset), "--html", "a.html", hidden="jinja2", cwd=tmp_path)
    assert (run.returncode, "p50" in run.stdout) == (2, True), run.stdout
    assert run.stderr == "error: the package jinja2 is not installed; run pip install 'evenrank[reports]'\n"
    assert list(tmp_path.iterdir()) == []


def test_metrics_need_no_packages_of_pages(tmp_path: Path) -> None:
    write_log(tmp_path / "log.jsonl", *STEPS)
    run = _run("", "metrics", "log.jsonl", hidden="matplotlib jinja2", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "idle before balancing, by the cost" in run.stdout


LIGHT = """
from evenrank.cli.main import main
from evenrank.core.errors import MissingPackageError
from evenrank.dataloader.balance import HSTUCost, partition
from evenrank.datasets import open_store
for package, name in [
    ("evenrank.preprocess", "preprocess"),
    ("evenrank.dataloader", "build_loader"),
    ("evenrank.dataloader.balance", "Balancer"),
    ("evenrank.dataloader.routing", "remap"),
    ("evenrank.training", "scale_loss"),
]:
    try:
        getattr(__import__(package, fromlist=[""]), name)
    except MissingPackageError as error:
        print(error)
"""


def test_the_base_package_imports_without_extras_and_says_what_needs_them(tmp_path: Path) -> None:
    run = _run(LIGHT, hidden=" ".join(sorted(extras())) + " tqdm", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    of_polars, *of_torch = run.stdout.splitlines()
    assert of_polars == "the package polars is not installed; run pip install 'evenrank[preprocess]'"
    assert (
        of_torch
        == [
            "the package torch is not installed; run pip install 'evenrank[train]' "
            "(without CUDA: docs/how-to/install.md)"
        ]
        * 4
    )


@pytest.mark.parametrize(
    ("package", "module"), [("lightning", "lightning_callback"), ("transformers", "transformers_trainer")]
)
def test_what_is_for_a_trainer_names_its_extra(tmp_path: Path, package: str, module: str) -> None:
    run = _run(f"import evenrank.training.trainers.{module}", hidden=package, cwd=tmp_path)
    assert run.returncode == 1
    expected = f"the package {package} is not installed; run pip install 'evenrank[{package}]'"
    assert run.stderr.splitlines()[-1] == f"evenrank.core.errors.MissingPackageError: {expected}"


def test_other_missing_packages_are_reported_as_they_are() -> None:
    with pytest.raises(ModuleNotFoundError, match="my_package") as raised, naming_extras():
        raise ModuleNotFoundError("No module named 'my_package'", name="my_package")
    assert not isinstance(raised.value, MissingPackageError)


def test_packages_that_need_torch_check_its_release(tmp_path: Path) -> None:
    code = """
from importlib import metadata
from evenrank.core.errors import ConfigError
found = {"torch": "2.13.0", "fbgemm-gpu": "1.9.0", "torchrec": "1.8.0"}
metadata.version = lambda name: found.get(name) or metadata.distribution("missing")
for package in ("evenrank.dataloader", "evenrank.training"):
    try:
        __import__(package)
    except ConfigError as error:
        print(error)
"""
    run = _run(code, hidden="", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.count("torch 2.13.0 needs fbgemm-gpu 1.8 and torchrec 1.8, found 1.9.0 and 1.8.0; ") == 2


Installed = dict[str, str | None]


def _installed(torch: str, fbgemm: str, torchrec: str, build: str = "fbgemm-gpu") -> Installed:
    return {"torch": torch, build: fbgemm, "torchrec": torchrec}


@pytest.mark.parametrize(
    "installed",
    [
        *(_installed(*tested, build) for tested in TESTED for build in ("fbgemm-gpu", "fbgemm-gpu-cpu")),
        _installed("2.13.7", "1.8.3", "1.8.9"),  # patch releases
        _installed("2.13.0+cpu", "1.8.0+cpu", "1.8.0"),
        _installed("2.13.0", "1.8.0+cpu", "1.8.0") | {"fbgemm-gpu-cpu": "1.8.0"},  # constraints/torch213-cpu
        _installed("2.13.0+cu130", "1.8.0+cu130", "1.8.0"),
        _installed("2.13.0a0+nv25.10", "1.8.0", "1.8.0"),  # a vendor's
        {"torch": "2.9.0"},  # without TorchRec, where only planning is used
        {"torch": "2.9.0", "torchrec": "1.2.0"},  # fbgemm-gpu without metadata, as built from source
        {"torch": None, "fbgemm-gpu": None, "torchrec": "1.8.0"},
        {"torch": "unknown", "fbgemm-gpu": "1.8.0", "torchrec": "1.8.0"},
        {},
    ],
)
def test_matching_releases_are_accepted_in_silence(installed: Installed) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_releases(installed)
        check_torch()  # the environment of the tests


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (
            _installed("2.13.0", "1.9.0", "1.8.0"),
            "torch 2.13.0 needs fbgemm-gpu 1.8 and torchrec 1.8, found 1.9.0 and 1.8.0; run pip install --no-deps "
            "fbgemm-gpu==1.8.0 torchrec==1.8.0",
        ),
        (
            _installed("2.14.1+cpu", "1.9.0", "1.8.0", "fbgemm-gpu-cpu"),
            "torch 2.14.1+cpu needs fbgemm-gpu-cpu 1.9 and torchrec 1.9, found 1.9.0 and 1.8.0; run pip install "
            "--no-deps fbgemm-gpu-cpu==1.9.0 torchrec==1.9.2",
        ),
        (
            _installed("2.10.0+cpu", "1.5.0", "1.5.1", "fbgemm-gpu-cpu"),
            "torch 2.10.0+cpu is installed, and evenrank works with torch 2.11 to 2.14; run pip install torch==2.14.1 "
            "(CPU build: docs/how-to/install.md), then pip install --no-deps fbgemm-gpu-cpu==1.9.0 torchrec==1.9.2",
        ),
        (
            _installed("2.13.0+cpu", "1.8.0", "1.8.0"),
            "torch 2.13.0+cpu was built for the CPU, and fbgemm-gpu 1.8.0 for CUDA; run pip uninstall -y fbgemm-gpu, "
            "then pip install --no-deps fbgemm-gpu-cpu==1.8.0",
        ),
        (
            _installed("2.13.0", "1.8.0", "1.8.0") | {"fbgemm-gpu-cpu": "1.8.0"},
            "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0 are both installed, and overwrite each other's files; run pip "
            "uninstall -y fbgemm-gpu fbgemm-gpu-cpu, then pip install --no-deps fbgemm-gpu==1.8.0 (CUDA) or "
            "fbgemm-gpu-cpu==1.8.0 (CPU)",
        ),
    ],
)
def test_a_wrong_combination_is_one_line_with_the_remedy(installed: Installed, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_releases(installed)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "installed",
    [
        _installed("2.15.0", "1.10.0", "1.10.0"),  # newer
        _installed("2.16.0a0+nv26.12", "1.9.0", "1.9.2"),
        _installed("2.13.0rc1", "1.9.0", "1.9.2"),
        _installed("2.13.0+acme1", "1.9.0", "1.9.2"),
        _installed("2.13.0", "1.9.0+acme.torch213", "1.8.0"),
        _installed("2.13.0", "2026.11.22", "1.8.0"),  # built from source
    ],
)
def test_untested_newer_releases_and_custom_builds_are_a_warning(installed: Installed) -> None:
    with pytest.warns(TorchReleaseWarning, match=r"^torch 2\.1.* run pip install .*; it was not tested and may fail$"):
        check_releases(installed)
