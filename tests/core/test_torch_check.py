"""Which combinations of PyTorch, fbgemm-gpu and TorchRec are refused."""

import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from evenrank.core.errors import ConfigError
from evenrank.core.optional_imports import TorchReleaseWarning, check_releases, check_torch
from evenrank.core.torch_releases import DEFAULT, TESTED

ROOT = Path(__file__).resolve().parents[2]


def _installed(torch: str, fbgemm: str, torchrec: str) -> dict[str, str | None]:
    return {"torch": torch, "fbgemm-gpu": fbgemm, "torchrec": torchrec}


@pytest.mark.parametrize("build", ["fbgemm-gpu", "fbgemm-gpu-cpu"])
@pytest.mark.parametrize("tested", TESTED, ids=lambda tested: tested.torch)
def test_tested_releases_are_accepted(tested: tuple[str, str, str], build: str) -> None:
    torch, fbgemm, torchrec = tested
    check_releases({"torch": torch, build: fbgemm, "torchrec": torchrec})


@pytest.mark.parametrize(
    "installed",
    [
        _installed("2.13.7", "1.8.3", "1.8.9"),  # patch releases
        _installed("2.13.0+cpu", "1.8.0+cpu", "1.8.0"),
        _installed("2.13.0+cu130", "1.8.0+cu130", "1.8.0"),
        _installed("2.13.0a0+nv25.10", "1.8.0", "1.8.0"),  # a vendor's
        {"torch": "2.9.0"},  # without TorchRec, where only planning is used
        {"torch": "2.9.0", "torchrec": "1.2.0"},  # fbgemm-gpu without metadata, as built from source
        {"torch": None, "fbgemm-gpu": None, "torchrec": "1.8.0"},
        {"torch": "unknown", "fbgemm-gpu": "1.8.0", "torchrec": "1.8.0"},
        {},
    ],
)
def test_what_may_work_is_accepted_in_silence(installed: dict[str, str | None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_releases(installed)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (
            _installed("2.13.0", "1.9.0", "1.8.0"),
            "torch 2.13.0 needs fbgemm-gpu 1.8 and torchrec 1.8, found 1.9.0 and 1.8.0; run pip install --no-deps "
            "fbgemm-gpu==1.8.0 torchrec==1.8.0",
        ),
        (
            {"torch": "2.14.1+cpu", "fbgemm-gpu-cpu": "1.9.0", "torchrec": "1.8.0"},
            "torch 2.14.1+cpu needs fbgemm-gpu-cpu 1.9 and torchrec 1.9, found 1.9.0 and 1.8.0; run pip install "
            "--no-deps fbgemm-gpu-cpu==1.9.0 torchrec==1.9.2",
        ),
        (
            _installed("2.15.0", "1.9.0", "1.9.2"),
            "torch 2.15.0 is installed, and evenrank works with torch 2.11 to 2.14; run pip install torch==2.14.1, "
            "then pip install --no-deps fbgemm-gpu==1.9.0 torchrec==1.9.2",
        ),
        (
            {"torch": "2.10.0+cpu", "fbgemm-gpu-cpu": "1.5.0", "torchrec": "1.5.1"},
            "torch 2.10.0+cpu is installed, and evenrank works with torch 2.11 to 2.14; run pip install torch==2.14.1 "
            "(CPU build: docs/how-to/install.md), then pip install --no-deps fbgemm-gpu-cpu==1.9.0 torchrec==1.9.2",
        ),
        (
            _installed("2.13.0+cpu", "1.8.0", "1.8.0"),
            "torch 2.13.0+cpu was built for the CPU, and fbgemm-gpu 1.8.0 for CUDA; run pip uninstall -y fbgemm-gpu, "
            "then pip install --no-deps fbgemm-gpu-cpu==1.8.0",
        ),
        (
            {"torch": "2.13.0", "fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0"},
            "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0 are both installed, and overwrite each other's files; run pip "
            "uninstall -y fbgemm-gpu fbgemm-gpu-cpu, then pip install --no-deps fbgemm-gpu==1.8.0 (CUDA) or "
            "fbgemm-gpu-cpu==1.8.0 (CPU)",
        ),
    ],
)
def test_what_cannot_work_is_one_line_with_the_remedy(installed: dict[str, str | None], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_releases(installed)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "installed",
    [
        _installed("2.16.0a0+nv26.12", "1.9.0", "1.9.2"),
        _installed("2.15.0.dev20261101+cu130", "1.10.0", "1.10.0"),
        _installed("2.15.0rc1", "1.9.0", "1.9.2"),
        _installed("2.13.0+acme1", "1.9.0", "1.9.2"),
        _installed("2.13.0", "1.9.0+acme.torch213", "1.8.0"),
        _installed("2.13.0", "2026.11.22", "1.8.0"),  # built from source
    ],
)
def test_builds_of_others_are_a_warning(installed: dict[str, str | None]) -> None:
    with pytest.warns(TorchReleaseWarning, match=r"^torch 2\.1.* run pip install "):
        check_releases(installed)


def test_the_environment_of_the_tests_is_accepted() -> None:
    check_torch()


def test_the_ranges_of_the_metadata_are_those_of_the_table() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, fbgemm in (("cuda", "fbgemm-gpu"), ("cpu", "fbgemm-gpu-cpu")):
        found = {requirement.name: requirement.specifier for requirement in map(Requirement, extras[extra])}
        assert found["torch"] == _range([tested.torch for tested in TESTED])
        assert found[fbgemm] == _range([tested.fbgemm for tested in TESTED])
        if extra == "cuda":
            assert found["torchrec"] == _range([tested.torchrec for tested in TESTED])
    assert DEFAULT in TESTED


def _range(versions: list[str]) -> SpecifierSet:
    first, last = ([int(part) for part in version.split(".")] for version in (versions[0], versions[-1]))
    return SpecifierSet(f">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}")
