import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.version import Version

from evenrank.core.optional_imports import torch_releases
from scripts.install import DEFAULT, EXTRAS, choose_releases, releases
from scripts.lock import EXTRAS as LOCKED_EXTRAS
from scripts.lock import LEFT_OUT, constraints
from tests.pages import ROOT, code_of

GITHUB = ROOT / ".github"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PYTHONS = ("3.11", "3.12")
TESTED = torch_releases()
OLDEST, NEWEST = min(TESTED), max(TESTED)


def _locked(python: str) -> dict[str, Version]:
    """Return the versions that the lockfile has for a version of Python on Linux."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    locked: dict[str, Version] = {}
    lines = (ROOT / "requirements-dev.lock").read_text().splitlines()
    for line in (line for line in lines if not line.startswith("#")):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            assert requirement.name not in locked, line
            locked[requirement.name] = Version(pin.version)
    return locked


def _required(extras: set[str]) -> list[Requirement]:
    """Return the dependencies of the package and of some extras, and of the extras that these name."""
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    found = [Requirement(requirement) for requirements in lists for requirement in requirements]
    named = set().union(*(requirement.extras for requirement in found if requirement.name == "evenrank"))
    if named - extras:
        return _required(extras | named)
    return [requirement for requirement in found if requirement.name != "evenrank"]


def test_the_lockfile_satisfies_every_requirement_of_development() -> None:
    for locked in map(_locked, PYTHONS):
        for requirement in _required(set(LOCKED_EXTRAS)):
            if requirement.name not in LEFT_OUT:
                assert requirement.specifier.contains(locked[requirement.name]), requirement
        assert not locked.keys() & {*LEFT_OUT, "fbgemm-gpu-cpu", "evenrank"}
    assert not re.search(r"https?://|--(extra-)?index|--find|@ ", (ROOT / "requirements-dev.lock").read_text())


def _names(extras: str) -> set[str]:
    """Return the names of what some extras require."""
    return {requirement.name for requirement in _required(set(extras.split(",")))}


def test_a_target_installs_what_it_needs_and_the_first_ones_are_demo_and_test() -> None:
    installs = dict(re.findall(r"^([\w-]+): \$\(INSTALLED\)-(\w+)$", (ROOT / "Makefile").read_text(), re.M))
    assert set(installs.values()) == EXTRAS.keys()
    assert installs.items() >= {(target, target) for target in EXTRAS}
    assert _names(EXTRAS["demo"]) < _names(EXTRAS["test"]) < _names(EXTRAS["check"])
    assert _names(",".join(EXTRAS.values())) == _names(",".join(LOCKED_EXTRAS))
    assert not {"torch", "polars", "pytest"} & _names("docs,package")
    for page in ("README.md", "docs/index.md"):
        first = next(code for code in code_of((ROOT / page).read_text(), "bash") if code.startswith("git clone "))
        assert re.findall(r"^make (\w+)", first, re.M) == ["demo", "test"], page


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        *((None, (DEFAULT, False)), ("2.1.0", (DEFAULT, False))),  # not 2.11
        *((f"{TESTED[OLDEST].torch}+cpu", (OLDEST, True)), ("2.14.0", (NEWEST, True))),
        ("2.13.0a0+nv25.10", (DEFAULT, True)),
    ],
)
def test_a_pytorch_is_kept_if_its_release_is_known(installed: str | None, chosen: tuple[Any, bool]) -> None:
    assert choose_releases(installed) == chosen
    assert {name: tuple(pins.values()) for name, pins in releases().items()} == TESTED


def test_pages_images_and_constraints_fit_the_table_of_releases() -> None:
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    rows = re.findall(r"^\| (\d\.\d+) \| (\S+) \| (\S+) \|$", page, re.M)
    assert rows == [(tested.torch.rpartition(".")[0], tested.fbgemm, tested.torchrec) for tested in TESTED.values()]
    for name in ("cpu", "cuda"):
        arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", (ROOT / "docker" / f"{name}.Dockerfile").read_text(), re.M))
        assert arguments["RELEASE"] == DEFAULT
    folder = ROOT / "constraints"
    expected = {name: text for tested in TESTED for name, text in constraints(tested, TESTED[tested]).items()}
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == expected, "run make lock"
    assert "torch==2.13.0\nfbgemm-gpu==1.8.0\nfbgemm-gpu-cpu==1.8.0\ntorchrec==1.8.0\n" in expected["torch213.txt"]
    package = tomllib.loads(expected["torch214-cpu/pyproject.toml"])["project"]
    assert package == {"name": "fbgemm-gpu", "version": "1.9.0+cpu", "dependencies": ["fbgemm-gpu-cpu==1.9.0"]}
    # Images contain what the wheel is built from.
    kept = set(re.findall(r"^!/(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    packages = PYPROJECT["tool"]["setuptools"]["packages"]
    folders = {package.split(".")[1] for package in packages if "." in package}
    files = "pyproject.toml requirements-dev.lock constraints __init__.py py.typed MANIFEST.in README.md LICENSE"
    assert kept == {*folders, *files.split()}
    assert all((ROOT / name).exists() for name in kept)


def test_ci_runs_the_oldest_newest_and_default_pytorch_and_only_one_job_publishes() -> None:
    ci, workflow = (yaml.safe_load((GITHUB / "workflows" / name).read_text()) for name in ("ci.yml", "release.yml"))
    entries = ci["jobs"]["check-and-test"]["strategy"]["matrix"]["include"]
    assert {entry["torch"] for entry in entries} == {TESTED[extra].torch for extra in (OLDEST, DEFAULT, NEWEST)}
    assert {entry["python"] for entry in entries} == set(PYTHONS)
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    build, publish = (workflow["jobs"][name] for name in ("build", "publish"))
    assert (workflow["permissions"], "permissions" in build) == ({"contents": "read"}, False)
    assert (publish["permissions"], publish["needs"]) == ({"id-token": "write"}, "build")
    for path in (GITHUB / "workflows").glob("*.yml"):
        for action in re.findall(r"uses: (\S+)", path.read_text()):
            assert re.search(r"@(v\d+|release/v\d+)$", action), f"{path.name}: {action}"


def test_github_understands_its_files() -> None:
    for schema, files in (
        ("github-workflows", "workflows/*.yml"),
        ("dependabot", "dependabot.yml"),
        ("github-issue-forms", "ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", "ISSUE_TEMPLATE/config.yml"),
    ):
        paths = [str(path) for path in GITHUB.glob(files)]
        assert paths
        run = CliRunner().invoke(check_jsonschema, ["--builtin-schema", f"vendor.{schema}", *paths])
        assert run.exit_code == 0, run.output


@pytest.mark.parametrize("name", ["evenrank", "a clone-2"])
def test_checks_run_in_a_folder_called_evenrank_whatever_the_clone_is_called(tmp_path: Path, name: str) -> None:
    clone, programs, log = tmp_path / name, tmp_path / "bin", tmp_path / "log"
    script = clone / ".ci" / "run"
    script.parent.mkdir(parents=True)
    script.write_bytes((ROOT / ".ci" / "run").read_bytes())
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "message"]):
        subprocess.run([*git, *command], cwd=clone, check=True)
    programs.mkdir()
    for program, line in (("chromium", "true"), ("make", f"""echo "$*:$PWD:$(git status -s)" >> '{log}'""")):
        (programs / program).write_text(f"#!/bin/sh\n{line}\n")
        (programs / program).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    subprocess.run(["bash", str(script)], cwd="/", env=environment, check=True)
    checks, folders, changes = zip(*(line.split(":") for line in log.read_text().splitlines()), strict=True)
    made = [word for words in checks for word in words.split() if not word.startswith("--")]
    assert made[-5:] == ["check", "check-imports", "docs", "package", "test"]
    assert set(made[:-5]) == {f".venv/installed-{tools}" for tools in ("check", "docs", "package", "test")}
    (folder,) = {Path(folder) for folder in folders}
    assert folder.name == "evenrank"
    assert (folder == clone) == (name == "evenrank")
    assert set(changes) == {""}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "bin", "log"])  # the copy is deleted


def test_no_file_has_both_sides_of_a_merge() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a checkout")
    texts = [path for name in tracked.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    assert len(texts) > 500
    sides = (b"\n" + b"<" * 7 + b" ", b"\n" + b">" * 7 + b" ")
    assert [path for path in texts if any(side in path.read_bytes() for side in sides)] == []
