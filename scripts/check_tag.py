"""Check that a tag is that of the version in the code and of a dated section of the changelog.

    python scripts/check_tag.py v0.1.0

It runs before evenrank or anything else is installed.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def problem_with(tag: str, code: str, changelog: str) -> str | None:
    """Return why a release of this tag would be wrong, or None.

    Args:
        tag: such as "v0.1.0".
        code: of the package's `__init__.py`.
        changelog: its text.
    """
    (version,) = re.findall(r'^__version__ = "(.*)"$', code, re.M)
    if tag != f"v{version}":
        return f"the tag is {tag}, but __init__.py has version {version}; tag with make release VERSION=..."
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", changelog, re.M):
        return f"CHANGELOG.md has no section '## {version} - DATE'; tag with make release VERSION=..."
    return None


def main() -> None:
    """Exit with 1 and a line if something is wrong."""
    if len(sys.argv) != 2:
        sys.exit("check_tag: pass the tag, such as v0.1.0")
    if problem := problem_with(sys.argv[1], (ROOT / "__init__.py").read_text(), (ROOT / "CHANGELOG.md").read_text()):
        sys.exit(f"check_tag: {problem}")


if __name__ == "__main__":
    main()
