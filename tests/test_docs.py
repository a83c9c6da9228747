"""The pages without running them: links, lengths, complete lists, names and arguments in code, options of commands."""

import ast
import builtins
import functools
import importlib
import inspect
import pkgutil
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from markdown.extensions.toc import slugify, unique

from evenrank.cli import main
from evenrank.core import errors
from tests.pages import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)
MAPPED_FOLDERS = ("core", "preprocess", "datasets", "dataloader", "training")
GITHUB, SITE = "https://github.com/evenrank/evenrank", "https://evenrank.github.io/evenrank/"
RAW = "https://raw.githubusercontent.com/evenrank/evenrank"
# What users import from. Names of other modules are internal.
PUBLIC_PACKAGES = ("preprocess", "datasets", "dataloader", "dataloader.balance", "dataloader.routing", "training")
OURS = ("evenrank", "hstu", "semantic_ids", "trainer")
# What a reader has: a model and its parts, the settings of a job, places, and functions of a loop.
READERS = """
Model balance balancer batch config cost data device embedding encode eval_batches evaluate folder head_dim heads key
loader log_step max_length mesh model nearest_rows num_tasks optimizer path positions projections query rank saved
scores seconds source table target train value world_size writers
"""


@functools.cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and GitHub make them."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.M):
        if match := re.search(r"\{ #(\S+) \}$", heading):
            anchors.add(match[1])
        else:
            unique(slugify(re.sub(r"\]\([^)]*\)", "", heading), "-"), anchors)  # adds it
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page: Path) -> None:
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", FENCED.sub("", page.read_text())):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in _anchors(target.resolve()), f"{path}#{anchor}"


def test_links_of_the_readme_are_absolute_because_pypi_shows_it_too_and_lead_to_files_and_pages() -> None:
    links = re.findall(
        r"(?:\]\(|<(?=http)|^\[.*\]: )([^)>\s]+)", FENCED.sub("", (ROOT / "README.md").read_text()), re.M
    )
    assert len(links) > 20
    for link in links:
        url, _, anchor = link.partition("#")
        assert url.startswith("https://"), link
        target = DOCS / url.removeprefix(SITE)
        target = target / "index.md" if target.is_dir() else target.with_suffix(".md")
        if found := re.match(rf"(?:{GITHUB}/(?:blob|tree)|{RAW})/main/", url):
            target = ROOT / url[found.end() :]
        elif not url.startswith(SITE):
            continue
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_pages_are_short_and_the_first_ones_fit_on_a_screen() -> None:
    for page in DOCS.rglob("*.md"):
        assert page.parent.name == "results" or len(page.read_text().split()) <= 1500, page
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    prose = [line for line in (DOCS / "index.md").read_text().splitlines() if not line.startswith(("|", "!"))]
    assert max(map(len, prose)) <= 80
    assert f"({GITHUB})" in "\n".join(prose)


def test_every_tutorial_includes_the_program_that_it_explains() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "tutorials").glob("*.md"))
    included = set(re.findall(r'^--8<-- "(examples/\S+\.py)"$', pages, re.M))
    assert included == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}


def test_the_reference_has_every_public_name_once_and_every_command() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    with warnings.catch_warnings(action="ignore"):  # of other packages
        documented = [id(pkgutil.resolve_name(name)) for name in re.findall(r"^::: (\S+)$", pages, re.M)]
    assert len(documented) == len(set(documented))
    ours = [value for value in vars(errors).values() if getattr(value, "__module__", "") == errors.__name__]
    public = [*_public().values(), *(value for value in ours if isinstance(value, type))]
    assert [value for value in public if id(value) not in documented] == []
    assert {*re.findall(r"^evenrank ([a-z-]+) --help$", pages, re.M)} == _options().keys()


@functools.cache
def _public() -> dict[str, Any]:
    modules = (importlib.import_module(f"evenrank.{package}") for package in PUBLIC_PACKAGES)
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def test_the_map_lists_every_source_file_in_its_folder() -> None:
    listed: set[str] = set()
    folder = ""
    page = DOCS / "explanation" / "architecture.md"
    for heading, name in re.findall(r"^(?:\*\*`(\S+/)`\*\*|- `(\w+\.py)`: .+)$", page.read_text(), re.M):
        folder = heading or folder
        if name:
            listed.add(folder + name)
    paths = (path for name in MAPPED_FOLDERS for path in (ROOT / name).rglob("*.py"))
    assert listed == {str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"}


def _code(page: Path) -> list[ast.Module]:
    """Return the pieces of Python on a page, but for included programs; of differences, what is new."""
    found = re.findall(r"^ *```(?: ?\{ \.)?(python|diff)[^\n]*\n(.*?)^ *```$", page.read_text(), re.M | re.S)
    pieces = [
        "\n".join(line[1:] for line in code.splitlines() if line[:1] != "-") if language == "diff" else code
        for language, code in found
    ]
    return [ast.parse(inspect.cleandoc(piece)) for piece in pieces if "--8<--" not in piece]


def _expressions(page: Path) -> Iterator[ast.expr]:
    """Return the expressions in the text."""
    for span in re.findall(r"`([^`]+)`", FENCED.sub("", page.read_text())):
        try:
            yield ast.parse(" ".join(span.split()), mode="eval").body
        except SyntaxError:
            continue


def _imported(tree: ast.AST) -> dict[str, Any]:
    """Return what a piece of code imports from us, by the name that it gets; it must exist."""
    imported: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            with warnings.catch_warnings(action="ignore"):  # of other packages
                module = importlib.import_module(node.module)
            imported |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    return imported


def _names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that a piece of code uses, and those that it defines."""
    used, defined = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                defined.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                defined |= {alias.asname or alias.name.split(".")[0] for alias in aliases}
    return used, defined


def _misfits(tree: ast.AST, known: dict[str, Any]) -> list[str]:
    """Return the calls of known names with arguments that these do not take. `...` stands for any."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known):
            continue
        positional = [value for value in node.args if not (isinstance(value, ast.Constant) and value.value is ...)]
        named = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
        if any(isinstance(value, ast.Starred) for value in positional):
            positional = []
        try:  # whether all that are needed are given is left to those who run the page
            inspect.signature(known[node.func.id]).bind_partial(*positional, **named)
        except TypeError as error:
            found.append(f"{ast.unparse(node)}: {error}")
    return found


def test_names_in_code_are_imported_before_or_are_the_readers_and_calls_fit_their_signature() -> None:
    for page in PAGES:
        defined, known = {*dir(builtins), *READERS.split()}, dict[str, Any]()
        for tree in _code(page):
            used, new = _names(tree)
            defined |= new
            known |= _imported(tree)
            assert used <= defined, f"{page}: {used - defined}"
            assert not _misfits(tree, known), page
        assert not [misfit for expression in _expressions(page) for misfit in _misfits(expression, _public())], page


@functools.cache
def _options() -> dict[str, set[str]]:
    """Return the options of each command."""
    apps: list[typer.Typer] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "_run", lambda app, _: apps.append(app))
        main.main()
    group: Any = typer.main.get_command(apps[0])
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in group.commands.items()
    }


def test_commands_have_the_options_that_pages_give_them() -> None:
    seen = 0
    for page in PAGES:
        for code in re.findall(r"^ *```(?:bash|console)\n(.*?)^ *```$", page.read_text(), re.M | re.S):
            for line in code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["evenrank"] and not words[1].startswith("-"):
                    seen += 1
                    given = {word.split("=")[0] for word in words[2:] if re.match("--?[a-z]", word)}
                    assert given <= _options()[words[1]] | {"--help"}, f"{page}: {line}"
    assert seen > 20
