"""Make a release: check, build, set version and date, commit and tag; nothing is pushed.

    .venv/bin/python scripts/release.py 0.1.0     # the same as `make release VERSION=0.1.0`

CHANGELOG.md needs a section `## 0.1.0 - unreleased` with what has changed. Pushing the tag publishes the release, by
.github/workflows/release.yml.
"""

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
BRANCH = "main"


class ReleaseError(Exception):
    """Why no release was made: one line."""


def release(root: Path, version: str, *, day: date, check_package: Callable[[], None]) -> str:
    """Make the release of a checkout and return the name of its tag.

    Args:
        root: of the checkout.
        version: without "v".
        day: of the release.
        check_package: builds and checks the package; raises if something is wrong with it. It runs after version and
            date are set, which are set back if it raises.

    Raises:
        ReleaseError: the version is invalid or not newer, the checkout is not a clean main branch, or the changelog has
            no section for the version.
    """
    check_version(root, version)
    check_checkout(root)
    code, changelog = root / "__init__.py", root / "CHANGELOG.md"
    before = {code: code.read_text(), changelog: changelog.read_text()}
    released = {
        code: re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', before[code], flags=re.M),
        changelog: set_date(before[changelog], version, day),
    }
    tag, is_committed = f"v{version}", False
    try:
        for path, text in released.items():
            path.write_text(text)
        check_package()
        for path, text in released.items():
            if path.read_text() != text:
                raise ReleaseError(f"{path.name} was changed during the checks; commit that, and run it again")
        _git(root, "commit", "--quiet", "--message", f"Release {version}", "--", code.name, changelog.name)
        is_committed = True
        _git(root, "tag", "--annotate", "--message", f"evenrank {version}", tag)
    except BaseException:
        for path, text in before.items():
            if not is_committed and path.read_text() == released[path]:  # or somebody's changes would be lost
                path.write_text(text)
        raise
    return tag


def check_version(root: Path, version: str) -> None:
    """Raise a ReleaseError unless the version is newer than all tags, and not older than that of the code."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        parsed = None
    if parsed is None or str(parsed) != version or len(parsed.release) != 3 or parsed.local:
        raise ReleaseError(f"{version!r} is not a version; expected MAJOR.MINOR.PATCH, such as 0.1.0 or 0.2.0rc1")
    tags = []
    for tag in _git(root, "tag", "--list", "v[0-9]*").split():
        with contextlib.suppress(InvalidVersion):  # such as v2-experiment
            tags.append(Version(tag.removeprefix("v")))
    if tags and parsed <= max(tags):
        raise ReleaseError(f"{version} is not newer than {max(tags)}, the newest tag; choose a newer version")
    in_code = current_version(root)
    if parsed < Version(in_code):
        raise ReleaseError(f"{version} is older than {in_code} in __init__.py; choose a newer version")


def check_checkout(root: Path) -> None:
    """Raise a ReleaseError unless the checkout is on the main branch and has no changes."""
    branch = _git(root, "rev-parse", "--abbrev-ref", "HEAD")
    if branch != BRANCH:
        raise ReleaseError(f"the branch is {branch!r}, releases are made from {BRANCH!r}; run git switch {BRANCH}")
    if changed := _git(root, "status", "--porcelain").splitlines():
        raise ReleaseError(f"the checkout has changes, such as {changed[0].strip()!r}; commit or remove them")


def current_version(root: Path) -> str:
    """Return the version in the code."""
    (version,) = re.findall(r'^__version__ = "(.*)"$', (root / "__init__.py").read_text(), re.M)
    return str(version)


def set_date(changelog: str, version: str, day: date) -> str:
    """Return the changelog with the day in the heading of a version.

    Raises:
        ReleaseError: it has no section `## VERSION - unreleased`, or an empty one.
    """
    heading = f"## {version} - unreleased"
    section = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if section is None or not re.search(r"^- ", section[1], re.M):
        state = "has no section" if section is None else "lists nothing in its section"
        raise ReleaseError(f"CHANGELOG.md {state} '{heading}'; add what has changed, as - lines")
    end = section.start() + len(heading)
    return f"{changelog[: section.start()]}## {version} - {day.isoformat()}{changelog[end:]}"


def _git(root: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if run.returncode != 0:
        raise ReleaseError(f"git {' '.join(arguments)} failed: {' '.join(run.stderr.split())}")
    return run.stdout.strip()


def _check_package() -> None:
    if subprocess.run([sys.executable, ROOT / "scripts" / "check_package.py"]).returncode != 0:
        raise ReleaseError("the package is not in order, see above; nothing was committed")


def main() -> None:
    """Make the release and say what to push."""
    if len(sys.argv) != 2 or not sys.argv[1]:
        sys.exit("release: no version; run make release VERSION=0.1.0")
    try:
        tag = release(ROOT, sys.argv[1], day=datetime.now(UTC).date(), check_package=_check_package)
    except ReleaseError as error:
        sys.exit(f"release: {error}")
    print(f"release: committed and tagged {tag}; to publish it: git push --atomic origin {BRANCH} {tag}")


if __name__ == "__main__":
    main()
