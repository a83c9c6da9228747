import ast
import functools
import re
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify, unique

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
MAPPED_FOLDERS = ("core", "preprocess", "datasets", "dataloader", "training")
GITHUB, SITE = "https://github.com/evenrank/evenrank", "https://evenrank.github.io/evenrank/"
RAW = "https://raw.githubusercontent.com/evenrank/evenrank"
# What users import from. Names of other modules are internal.
PUBLIC_PACKAGES = ("preprocess", "datasets", "dataloader", "dataloader.balance", "dataloader.routing", "training")


def _without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)


@functools.cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and GitHub make them."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", _without_code(page), re.M):
        if match := re.search(r"\{ #(\S+) \}$", heading):
            anchors.add(match[1])
        else:
            unique(slugify(re.sub(r"\]\([^)]*\)", "", heading), "-"), anchors)  # adds it
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page: Path) -> None:
    text = _without_code(page)
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in _anchors(target.resolve()), f"{path}#{anchor}"


def _in_checkout(url: str) -> Path | None:
    """Return the file that an address in the repository or the documentation stands for; None for other addresses."""
    if url.startswith(SITE):
        page = DOCS / url.removeprefix(SITE)
        return page / "index.md" if page.is_dir() else page.with_suffix(".md")
    found = re.match(rf"(?:{GITHUB}/(?:blob|tree)|{RAW})/main/", url)
    return ROOT / url[found.end() :] if found else None


def test_links_of_the_readme_are_absolute_because_pypi_shows_it_too_and_lead_to_files_and_pages() -> None:
    text = _without_code(ROOT / "README.md")
    links = re.findall(r"(?:\]\(|<(?=http)|^\[.*\]: )([^)>\s]+)", text, re.M)
    assert len(links) > 20
    for link in links:
        url, _, anchor = link.partition("#")
        assert url.startswith("https://"), link
        if target := _in_checkout(url):
            assert target.exists(), link
            assert not anchor or anchor in _anchors(target), link


def test_pages_are_short() -> None:
    for page in DOCS.rglob("*.md"):
        assert page.parent.name == "results" or len(page.read_text().split()) <= 1500, page
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_every_tutorial_includes_the_program_that_it_explains() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "tutorials").glob("*.md"))
    included = set(re.findall(r'^--8<-- "(examples/\S+\.py)"$', pages, re.M))
    assert included == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}


def test_the_reference_has_every_public_name_once() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    documented = [_definition(name) for name in re.findall(r"^::: (\S+)$", pages, re.M)]
    assert len(documented) == len(set(documented))
    packages = (f"evenrank.{name}" for name in PUBLIC_PACKAGES)
    public = {f"{package}.{name}" for package in packages for name in _exports(package)}
    errors = re.findall(r"^class (\w+)", _source("evenrank.core.errors"), re.M)
    public |= {f"evenrank.core.errors.{name}" for name in errors}
    assert {name for name in public if _definition(name) not in documented} == set()


def test_the_reference_has_every_command() -> None:
    found = re.findall(r"import (\w+)_command$", (ROOT / "cli" / "main.py").read_text(), re.M)
    commands = [name.replace("_", "-") for name in found]
    page = (DOCS / "reference" / "command-line.md").read_text()
    assert commands
    assert set(re.findall(r"^evenrank ([a-z-]+) --help$", page, re.M)) == set(commands)


def _source(module: str) -> str:
    """Return the source of a module or, if it has one, its stub."""
    path = ROOT.joinpath(*module.split(".")[1:])
    candidates = (path / "__init__.pyi", path / "__init__.py", path.with_suffix(".py"))
    return next(file for file in candidates if file.exists()).read_text()


def _exports(package: str) -> list[str]:
    (names,) = re.findall(r"^__all__ = (\[.*?\])", _source(package), re.M | re.S)
    return list(ast.literal_eval(names))


def _definition(name: str) -> str:
    """Return the name under which something is defined; sources are read, because imports would take seconds."""
    module, _, attribute = name.rpartition(".")
    origin = _imports(module).get(attribute)
    return name if origin is None else _definition(f"{origin}.{attribute}")


@functools.cache
def _imports(module: str) -> dict[str, str]:
    nodes = [node for node in ast.walk(ast.parse(_source(module))) if isinstance(node, ast.ImportFrom)]
    origins = {node: f"{module}.{node.module}" if node.level == 1 else f"{node.module}" for node in nodes}
    return {alias.name: origin for node, origin in origins.items() for alias in node.names}


def test_the_map_lists_every_source_file_in_its_folder() -> None:
    listed: set[str] = set()
    folder = ""
    page = DOCS / "explanation" / "architecture.md"
    for heading, name in re.findall(r"^(?:\*\*`(\S+/)`\*\*|- `(\w+\.py)`: .+)$", page.read_text(), re.M):
        folder = heading or folder
        if name:
            listed.add(folder + name)
    paths = (path for name in MAPPED_FOLDERS for path in (ROOT / name).rglob("*.py"))
    existing = {str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"}
    assert listed == existing
