"""List the error messages of the package, as Markdown, for docs/reference/troubleshooting.md, which runs this.

    python scripts/error_messages.py

The sources are read, not imported: `raise ConfigError(f"{name} must be positive")` is the message `{name} must be
positive`. Constants of a module stand as their text, other values as their names, or as `…` if they have none.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("preprocess", "datasets", "codebooks", "dataloader", "training", "cli", "core")
# In the order of the page. Errors of Python itself are what a loop over a loader, or a wrong call, may raise.
ERRORS = (
    *("ConfigError", "DataError", "StateError", "RankError", "RankLostError", "MissingPackageError"),
    *("ValueError", "TypeError", "IndexError", "RuntimeError"),
)
_MIN_WORDS = 3  # a shorter message is a part of another one, or nothing but a value


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message of an error."""

    error: str
    path: str  # of the source, from the root
    text: str


def find_messages(tree: ast.Module, path: str, constants: Mapping[str, ast.expr]) -> Iterator[Message]:
    """Yield the messages of a module: those of errors that it makes, raised at once or elsewhere.

    Args:
        tree: the module.
        path: of its source.
        constants: of other modules, by name.
    """
    constants = {**constants, **_constants(tree)}
    for scope in ast.walk(tree):
        if isinstance(scope, ast.FunctionDef):
            names = {**constants, **dict(_assigned(ast.walk(scope)))}
            for node in ast.walk(scope):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                    text = " ".join(_text(node.args[0], names).split()) if node.args else ""
                    if len(re.findall(r"[a-z]{2,}", re.sub(r"\{.*?\}", "", text))) >= _MIN_WORDS:
                        yield Message(error=node.func.id, path=path, text=text)


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    return {name: value for name, value in _assigned(tree.body) if isinstance(value, ast.Constant)}


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _text(node: ast.expr, names: Mapping[str, ast.expr]) -> str:
    """Return the text that an expression stands for, with values as `{name}` or `…`."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, names) for part in parts)
        case ast.FormattedValue(value=value) if not isinstance(value, ast.BinOp):
            return _text(value, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, names) + _text(right, names)
        case ast.Name(id=name) if isinstance(names.get(name), (ast.Constant, ast.JoinedStr)):
            return _text(names[name], {})  # not itself again
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"{{{name.lstrip('_')}}}"
        case _:
            return "…"


def all_messages(root: Path) -> list[Message]:
    """Return the messages of all modules, by error, then in the order of the sources; each text of a module once."""
    by_folder = [sorted((root / folder).rglob("*.py"), key=lambda path: (path.parent, path)) for folder in FOLDERS]
    paths = [path for of_folder in by_folder for path in of_folder]
    trees = {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in paths}
    constants = {name: value for tree in trees.values() for name, value in _constants(tree).items()}
    # A dict keeps the first of equal messages, and their order.
    found = dict.fromkeys(found for path, tree in trees.items() for found in find_messages(tree, path, constants))
    return sorted(found, key=lambda message: ERRORS.index(message.error))


def as_markdown(messages: list[Message]) -> str:
    """Return a section per error and folder, so that a search leads near the message, with its module in front."""
    lines = []
    for error, of_error in groupby(messages, key=lambda message: message.error):
        lines += [f"### {error}", ""]
        for folder, of_folder in groupby(of_error, key=lambda message: PurePosixPath(message.path).parent):
            lines += [f"#### {error} in {folder}", ""]
            for path, of_module in groupby(of_folder, key=lambda message: message.path):
                lines += [f"`{path}`", "", *(f"- {_code(message.text)}" for message in of_module), ""]
    return "\n".join(lines)


def _code(text: str) -> str:
    """Return a text as code, also one with backticks."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    print(as_markdown(all_messages(ROOT)))
