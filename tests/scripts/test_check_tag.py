"""A tag is published only if it is that of the version in the code, and the changelog is dated."""

import pytest

from scripts.check_tag import problem_with

CODE = '"""Docs."""\n\n__version__ = "0.2.0"\n'
CHANGELOG = "# Changelog\n\n## 0.3.0 - unreleased\n\n## 0.2.0 - 2026-12-01\n\n- Something.\n"


def test_the_tag_of_the_version_is_published() -> None:
    assert problem_with("v0.2.0", CODE, CHANGELOG) is None


@pytest.mark.parametrize("tag", ["v0.3.0", "v0.2", "0.2.0", "v0.2.0rc1", ""])
def test_other_tags_are_not(tag: str) -> None:
    problem = problem_with(tag, CODE, CHANGELOG)
    assert problem == f"the tag is {tag}, but __init__.py has version 0.2.0; tag with make release VERSION=..."


def test_a_version_without_a_date_in_the_changelog_is_not() -> None:
    problem = problem_with("v0.2.0", CODE, CHANGELOG.replace("2026-12-01", "unreleased"))
    assert problem == "CHANGELOG.md has no section '## 0.2.0 - DATE'; tag with make release VERSION=..."
