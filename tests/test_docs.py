"""The documentation is true: links lead somewhere, and the map lists the files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MAPPED_FOLDERS = ("core", "preprocess", "datasets", "dataloader", "training")


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=_id)
def test_a_page_has_at_most_1500_words(page: Path) -> None:
    assert len(page.read_text().split()) <= 1500


def test_the_map_lists_every_source_file_in_its_folder() -> None:
    listed: set[str] = set()
    folder = ""
    for row in re.findall(r"^\|(.*?)\|(.*?)\|.*\|$", (ROOT / "docs" / "architecture.md").read_text(), re.M):
        names = [re.findall(r"`([^`]+)`", cell) for cell in row]
        if names[0]:
            folder = names[0][0].replace(".../", "dataloader/balance/")
        listed |= {folder + name for name in names[1] if name.endswith(".py")}
    listed = {name for name in listed if name.startswith(MAPPED_FOLDERS)}
    existing = {
        str(path.relative_to(ROOT))
        for name in MAPPED_FOLDERS
        for path in (ROOT / name).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert listed == existing
