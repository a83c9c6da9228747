import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from evenrank.core.optional_imports import check_releases, check_torch, extras, torch_releases

PYPROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
MISSING = "the package {} is not installed; run pip install 'evenrank[{}]'"


def _requirements(extra: str) -> dict[str, SpecifierSet]:
    """Return the packages of an extra and of the extras that it names, as they are imported."""
    found: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, PYPROJECT["optional-dependencies"][extra]):
        for other in requirement.extras if requirement.name == "evenrank" else ():
            found |= _requirements(other)
        found[requirement.name.replace("-", "_").removesuffix("_cpu")] = requirement.specifier
    return found


def test_messages_name_the_extras_of_the_metadata_and_ranges_end_with_the_torch_releases() -> None:
    base = {Requirement(requirement).name for requirement in PYPROJECT["dependencies"]}
    assert extras().items() >= {("polars", "preprocess"), ("fbgemm_gpu", "train"), ("jinja2", "reports")}
    for package, extra in extras().items():
        assert package in (_requirements(extra).keys() & _requirements("all").keys()) - base
    found, (first, *_, last) = _requirements("train"), torch_releases().values()
    assert not found.keys() & {"polars", "matplotlib"}  # it needs neither preprocessing nor plots
    for name, oldest, newest in zip(("torch", "fbgemm_gpu", "torchrec"), first, last, strict=True):
        begin, end = Version(oldest), Version(newest)
        assert found[name] == SpecifierSet(f">={begin.major}.{begin.minor},<{end.major}.{end.minor + 1}")


def _run(code: str, cwd: Path, hidden: str, *arguments: str) -> list[str]:
    """Run code where some packages are missing; return what it prints."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden.split()}))\n"
    command = [sys.executable, "-c", hide + code, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=280)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.splitlines()


NAMES = """
from importlib import import_module, metadata
from evenrank.cli.main import main
from evenrank.core.errors import ConfigError, MissingPackageError
from evenrank.dataloader.balance import HSTUCost, partition
from evenrank.datasets import open_store
for module, name in [words.split(":") for words in sys.argv[1:]]:
    try:
        getattr(import_module(f"evenrank.{module}"), name)
    except MissingPackageError as error:
        print(error)
"""
OF_TORCH = ("dataloader:build_loader", "dataloader.balance:Balancer", "dataloader.routing:remap", "training:scale_loss")
OF_TRAINERS = ("training.trainers.lightning_callback:ElasticResume", "training.trainers.transformers_trainer:x")


def test_the_base_package_imports_without_extras_and_says_what_needs_them(tmp_path: Path) -> None:
    hidden = " ".join(sorted(extras())) + " tqdm"
    of_polars, *of_torch = _run(NAMES, tmp_path, hidden, "preprocess:preprocess", *OF_TORCH)
    assert of_polars == MISSING.format("polars", "preprocess")
    assert of_torch == [f"{MISSING.format('torch', 'train')} (without CUDA: docs/how-to/install.md)"] * 4
    of_trainers = _run(NAMES, tmp_path, "lightning transformers", *OF_TRAINERS)
    assert of_trainers == [MISSING.format(name, name) for name in ("lightning", "transformers")]


Installed = dict[str, str | None]


def installed(torch: str, fbgemm: str, torchrec: str, build: str = "fbgemm-gpu") -> Installed:
    return {"torch": torch, build: fbgemm, "torchrec": torchrec}


TESTED: list[Installed] = [
    *(installed(*each, build) for each in torch_releases().values() for build in ("fbgemm-gpu", "fbgemm-gpu-cpu")),
    installed("2.13.7", "1.8.3", "1.8.9"),  # patch releases
    installed("2.13.0", "1.8.0+cpu", "1.8.0") | {"fbgemm-gpu-cpu": "1.8.0"},  # constraints/torch213-cpu
    installed("2.13.0+cu130", "1.8.0+cu130", "1.8.0"),
    installed("2.13.0a0+nv25.10", "1.8.0", "1.8.0"),  # a vendor's
    {"torch": "2.9.0", "torchrec": "1.2.0"},  # fbgemm-gpu without metadata, as built from source
    installed("unknown", "1.8.0", "1.8.0") | {"other": None},
]
UNTESTED: list[Installed] = [installed("2.15.0", "1.10.0", "1.10.0"), installed("2.13.0rc1", "1.9.0", "1.9.2")]
UNTESTED.append(installed("2.13.0", "2026.11.22", "1.8.0"))  # built from source


def test_matching_releases_are_accepted_and_newer_ones_are_a_warning() -> None:
    with warnings.catch_warnings(record=True, action="always") as warned:
        for found in (*TESTED, *UNTESTED):
            check_releases(found)
        check_torch()  # the environment of the tests
    assert len(warned) == len(UNTESTED)
    for warning, found in zip(warned, UNTESTED, strict=True):
        expected = rf"torch {found['torch']} .* run pip install .*; it was not tested and may fail"
        assert re.fullmatch(expected, str(warning.message))
