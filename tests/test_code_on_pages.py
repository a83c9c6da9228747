"""Python code and commands on all pages: names are imported there, exist, and take the arguments that they get."""

import ast
import builtins
import importlib
import inspect
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from evenrank.cli import main
from tests.pages import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
OURS = ("evenrank", "hstu", "semantic_ids", "trainer")
PACKAGES = ("preprocess", "datasets", "dataloader", "dataloader.balance", "dataloader.routing", "training")
# What a reader has: a model and its parts, the settings of a job, places, and functions of a loop.
READERS = """
Model augment balance balancer batch checkpoint config cost data device embedding encode eval_balancer eval_batches
evaluate folder head_dim heads key loader log_step loss max_length mesh mlp model nearest_rows norm num_tasks optimizer
path positions projections query rank resume scores source table target train value world_size writers
"""


def _code(page: Path) -> list[str]:
    """Return the pieces of Python on a page, but for whole programs; of differences, what is new."""
    text = page.read_text()
    found = re.findall(r"^ *```(?: ?\{ \.)?(python|diff)[^\n]*\n(.*?)^ *```$", text, re.M | re.S)
    pieces = [
        "\n".join(line[1:] for line in code.splitlines() if line[:1] != "-") if language == "diff" else code
        for language, code in found
    ]
    return [inspect.cleandoc(piece) for piece in pieces if "--8<--" not in piece]


def _expressions(page: Path) -> Iterator[ast.expr]:
    """Return the expressions in the text."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    for span in re.findall(r"`([^`]+)`", text):
        try:
            yield ast.parse(" ".join(span.split()), mode="eval").body
        except SyntaxError:
            continue


def _imports(tree: ast.AST) -> dict[str, Any]:
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


@pytest.mark.parametrize("page", [page for page in PAGES if _code(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_code_are_imported_on_the_page_before_or_are_the_readers(page: Path) -> None:
    defined = {*dir(builtins), *READERS.split()}
    for code in _code(page):
        used, new = _names(ast.parse(code))
        defined |= new
        assert used <= defined, code


def test_what_code_imports_from_us_exists_and_calls_fit_its_signature() -> None:
    public = {
        name: getattr(module, name)
        for module in (importlib.import_module(f"evenrank.{package}") for package in PACKAGES)
        for name in module.__all__
    }
    for page in PAGES:
        known: dict[str, Any] = {}
        for code in _code(page):
            tree = ast.parse(code)
            known |= _imports(tree)
            assert not _misfits(tree, known), page
        misfits = [misfit for expression in _expressions(page) for misfit in _misfits(expression, public)]
        assert not misfits, page


def _commands(page: Path) -> Iterator[list[str]]:
    """Return the commands of ours in the shell's code on a page, each as its words."""
    for code in re.findall(r"^ *```(?:bash|console)\n(.*?)^ *```$", page.read_text(), re.M | re.S):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["evenrank"]:
                yield words[1:]


def test_commands_have_the_options_that_pages_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    apps: list[typer.Typer] = []
    monkeypatch.setattr(main, "_run", lambda app, _: apps.append(app))
    main.main()
    group: Any = typer.main.get_command(apps[0])
    options = {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in group.commands.items()
    }
    seen = 0
    for page in PAGES:
        for command, *words in _commands(page):
            if command.startswith("-"):
                continue
            seen += 1
            given = {word.split("=")[0] for word in words if re.match("--?[a-z]", word)}
            assert given <= options[command] | {"--help"}, f"{page}: evenrank {command} {shlex.join(words)}"
    assert seen > 30
