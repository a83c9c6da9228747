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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from markdown.extensions.toc import slugify, unique

from evenrank.cli import main
from evenrank.core import errors
from tests.pages import ROOT

DOCS, README = ROOT / "docs", ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)
MAPPED_FOLDERS = ("core", "preprocess", "datasets", "codebooks", "dataloader", "training")
SITE, GITHUB = "https://evenrank.github.io/evenrank/", "https://github.com/evenrank/evenrank"
OF_FILES = re.compile(rf"(?:{GITHUB}/(?:blob|tree)|https://raw.githubusercontent.com/evenrank/evenrank)/main/")
# What users import from. Names of other modules are internal.
PUBLIC_PACKAGES = (
    *("preprocess", "datasets", "codebooks", "dataloader", "dataloader.balance"),
    *("dataloader.routing", "training"),
)
Check = Callable[[Path], Iterator[object]]
OURS = ("evenrank", "hstu", "semantic_ids", "trainer")
# What a reader has: a model and its parts, the settings of a job, places, and functions of a loop.
READERS = """
Model balance balancer batch config cost data device embedding encode eval_batches evaluate folder head_dim heads ids
key loader log_step max_length mesh model nearest_rows num_tasks optimizer path positions projections query rank saved
scores seconds source table target train value vectors world_size writers
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


def _target(page: Path, link: str) -> Path | None:
    """Return the file that a link leads to; None if it is another site's."""
    if not link.startswith("http"):
        return page.parent / link if link else page
    if found := OF_FILES.match(link):
        return ROOT / link[found.end() :]
    target = DOCS / link.removeprefix(SITE)
    return (target / "index.md" if target.is_dir() else target.with_suffix(".md")) if link.startswith(SITE) else None


def wrong_links(page: Path) -> Iterator[object]:
    """Links that lead to no file or heading; those of the readme are absolute, because PyPI shows it too."""
    pattern = r"(?:\]\(|<(?=http)|^\[.*\]: )([^)#>\s]*)(?:#([^)>\s]*))?"
    found = re.findall(pattern, FENCED.sub("", page.read_text()), re.M)
    yield from [] if page != README or len(found) > 20 else [len(found)]
    for link, anchor in found:
        target = _target(page, link)
        is_found = target is None or (target.exists() and (not anchor or anchor in _anchors(target.resolve())))
        if not is_found or (page == README and not link.startswith("https://")):
            yield f"{link}#{anchor}"


def long_text(page: Path) -> Iterator[object]:
    """Pages are short, and the first ones fit on a screen."""
    text, limit = page.read_text(), 1500 if page.is_relative_to(DOCS) and page.parent.name != "results" else 9999
    yield from [len(text.split())] if len(text.split()) > limit else []
    yield from [len(text.splitlines())] if page == README and len(text.splitlines()) > 130 else []
    if page == DOCS / "index.md":
        yield from (line for line in text.splitlines() if not line.startswith(("|", "!")) and len(line) > 80)
        yield from [] if f"({GITHUB})" in text else [GITHUB]


def wrong_code(page: Path) -> Iterator[object]:
    """Names are imported before or the reader's, and calls of ours fit their signatures, in code and in text."""
    defined, known = {*dir(builtins), *READERS.split()}, dict[str, Any]()
    for tree in _code(page):
        used, new = _names(tree)
        defined |= new
        known |= _imported(tree)
        yield from (*(used - defined), *_misfits(tree, known))
    for span in re.findall(r"`([^`]+)`", FENCED.sub("", page.read_text())):
        try:
            yield from _misfits(ast.parse(" ".join(span.split()), mode="eval"), _public())
        except SyntaxError:
            continue


def unknown_options(page: Path) -> Iterator[object]:
    code = "".join(re.findall(r"^ *```(?:bash|console)\n(.*?)^ *```$", page.read_text(), re.M | re.S))
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["evenrank"] and not words[1].startswith("-"):
            given = {word.split("=")[0] for word in words[2:] if re.match("--?[a-z]", word)}
            yield from given - _options().get(words[1], set()) - {"--help"}


@pytest.mark.parametrize("check", [wrong_links, long_text, wrong_code, unknown_options])
def test_pages(check: Check, tmp_path: Path) -> None:
    assert {page: found for page in PAGES if (found := [*check(page)])} == {}
    # What is wrong is found.
    (page := tmp_path / "page.md").write_text(
        "[a](b.md) `LoaderConfig(batch=1)`\n\n```python\nfrom evenrank.dataloader import LoaderConfig\nfoo\n"
        "LoaderConfig(batch_size=1, a=2)\n```\n\n```bash\nevenrank fit log.jsonl --foo 1\n```\n"
    )
    wrong: dict[Check, list[str]] = {wrong_links: ["b.md#"], unknown_options: ["--foo"], long_text: []}
    call = "LoaderConfig({}): got an unexpected keyword argument '{}'"
    wrong[wrong_code] = ["foo", call.format("batch_size=1, a=2", "a"), call.format("batch=1", "batch")]
    assert [*check(page)] == wrong[check]


def test_lists_are_complete() -> None:
    """Of tutorials with their program, of public names and commands in the reference, of source files in the map."""
    tutorials, reference = (
        "\n".join(page.read_text() for page in (DOCS / folder).glob("*.md")) for folder in ("tutorials", "reference")
    )
    included = set(re.findall(r'^--8<-- "(examples/\S+\.py)"$', tutorials, re.M))
    assert included == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    with warnings.catch_warnings(action="ignore"):  # of other packages
        documented = [id(pkgutil.resolve_name(name)) for name in re.findall(r"^::: (\S+)$", reference, re.M)]
    assert len(documented) == len(set(documented))
    ours = [value for value in vars(errors).values() if getattr(value, "__module__", "") == errors.__name__]
    public = [*_public().values(), *(value for value in ours if isinstance(value, type))]
    assert [value for value in public if id(value) not in documented] == []
    assert {*re.findall(r"^evenrank ([a-z-]+) --help$", reference, re.M)} == _options().keys()
    listed, folder = set[str](), ""
    text = (DOCS / "explanation" / "architecture.md").read_text()
    for heading, name in re.findall(r"^(?:\*\*`(\S+/)`\*\*|- `(\w+\.py)`: .+)$", text, re.M):
        folder = heading or folder
        listed |= {folder + name} if name else set()
    paths = (path for name in MAPPED_FOLDERS for path in (ROOT / name).rglob("*.py"))
    assert listed == {str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"}


@functools.cache
def _public() -> dict[str, Any]:
    modules = (importlib.import_module(f"evenrank.{package}") for package in PUBLIC_PACKAGES)
    return {name: getattr(module, name) for module in modules for name in module.__all__}


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


def _code(page: Path) -> Iterator[ast.Module]:
    """Yield the pieces of Python on a page, but for included programs; of differences, what is new."""
    for language, code in re.findall(
        r"^ *```(?: ?\{ \.)?(python|diff)[^\n]*\n(.*?)^ *```$", page.read_text(), re.M | re.S
    ):
        new = "\n".join(line[1:] for line in code.splitlines() if line[:1] != "-") if language == "diff" else code
        if "--8<--" not in new:
            yield ast.parse(inspect.cleandoc(new))


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


def _misfits(tree: ast.AST, known: dict[str, Any]) -> Iterator[str]:
    """Yield the calls of known names with arguments that these do not take. `...` stands for any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            given = [value for value in node.args if not (isinstance(value, ast.Constant) and value.value is ...)]
            positional = [] if any(isinstance(value, ast.Starred) for value in given) else given
            named = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
            try:  # whether all that are needed are given is left to those who run the page
                inspect.signature(known[node.func.id]).bind_partial(*positional, **named)
            except TypeError as error:
                yield f"{ast.unparse(node)}: {error}"
