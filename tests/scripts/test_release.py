import re
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from scripts.check_tag import problem_with
from scripts.release import ReleaseError, release

DAY = date(2026, 12, 1)
CODE = '"""A package."""\n\n__version__ = "0.1.0"\n'
CHANGELOG = "# Changelog\n\n## 0.2.0 - unreleased\n\n- Something.\n\n## 0.1.0 - 2026-11-22\n\n- Everything.\n"


def _git(repository: Path, arguments: str) -> str:
    command = ["git", *arguments.split()]
    return subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a checkout whose newest tag is v0.1.0."""
    (tmp_path / "__init__.py").write_text(CODE)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    settings = "config user.name Nobody", "config user.email nobody@example.com"
    for command in ("init -q -b main", *settings, "add .", "commit -q -m Start", "tag --annotate --message 1 v0.1.0"):
        _git(tmp_path, command)
    return tmp_path


def _texts(repository: Path) -> tuple[str, str]:
    return (repository / "__init__.py").read_text(), (repository / "CHANGELOG.md").read_text()


def _release(repository: Path, version: str = "0.2.0", check: Callable[[], Any] = lambda: None) -> str:
    return release(repository, version, day=DAY, check_package=check)


def test_a_release_is_a_commit_with_version_and_date_and_an_annotated_tag(repository: Path) -> None:
    seen = []
    assert _release(repository, check=lambda: seen.append(_texts(repository))) == "v0.2.0"
    code, changelog = _texts(repository)
    assert code == CODE.replace("0.1.0", "0.2.0")
    assert changelog == CHANGELOG.replace("0.2.0 - unreleased", "0.2.0 - 2026-12-01")
    assert seen == [(code, changelog)]  # what was checked is what was released
    found = [_git(repository, command) for command in ("status --porcelain", "cat-file -t v0.2.0")]
    assert found == ["", "tag\n"]
    assert _git(repository, "log -1 --format=%s v0.2.0") == "Release 0.2.0\n"


def test_a_release_that_cannot_be_made_changes_nothing(repository: Path) -> None:
    def refused(version: str, message: str) -> None:
        before = _texts(repository)
        with pytest.raises(ReleaseError, match=re.escape(message)):
            _release(repository, version)
        assert (_texts(repository), _git(repository, "tag")) == (before, "v0.1.0\n")

    refused("v0.2.0", "'v0.2.0' is not a version; expected MAJOR.MINOR.PATCH, such as 0.1.0 or 0.2.0rc1")
    refused("0.1.0", "0.1.0 is not newer than 0.1.0, the newest tag; choose a newer version")
    refused("0.3.0", "CHANGELOG.md has no section '## 0.3.0 - unreleased'; add what has changed")
    _git(repository, "branch --move feature")
    refused("0.2.0", "the branch is 'feature', releases are made from 'main'; run git ")
    _git(repository, "branch --move main")
    (repository / "CHANGELOG.md").write_text(CHANGELOG.replace("- Something.\n", ""))
    refused("0.2.0", "has changes, such as 'M CHANGELOG.md'; commit or remove them")
    _git(repository, "commit --quiet --all --message Forget")
    refused("0.2.0", "CHANGELOG.md lists nothing in its section '## 0.2.0 - unreleased'")
    (repository / "__init__.py").write_text('__version__ = "0.3.0"\n')
    _git(repository, "commit --quiet --all --message Bump")
    refused("0.2.0", "0.2.0 is older than 0.3.0 in __init__.py")


def test_what_is_changed_during_the_checks_is_neither_released_nor_lost(repository: Path) -> None:
    changed = CHANGELOG.replace("Something", "Else")
    with pytest.raises(ReleaseError, match=r"^CHANGELOG.md was changed during the checks; commit that, and run"):
        _release(repository, check=lambda: (repository / "CHANGELOG.md").write_text(changed))
    assert (_texts(repository), _git(repository, "log -1 --format=%s")) == ((CODE, changed), "Start\n")


def test_only_the_tag_of_a_version_with_a_date_is_published() -> None:
    assert problem_with("v0.1.0", CODE, CHANGELOG) is None
    for tag in ("v0.2.0", "0.1.0", "v0.1.0rc1"):
        problem = problem_with(tag, CODE, CHANGELOG)
        assert problem == f"the tag is {tag}, but __init__.py has version 0.1.0; tag with make release VERSION=..."
    problem = problem_with("v0.1.0", CODE, CHANGELOG.replace("2026-11-22", "unreleased"))
    assert problem == "CHANGELOG.md has no section '## 0.1.0 - DATE'; tag with make release VERSION=..."
