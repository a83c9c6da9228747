"""The import rules of docs/architecture.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("preprocess", "datasets", "dataloader", "training", "cli")

# What a folder may import of evenrank, besides itself.
ALLOWED = {
    "datasets": (),
    "preprocess": tuple(f"evenrank.datasets.{name}" for name in ("schema", "distributions", "errors", "compiled")),
    "dataloader": ("evenrank.datasets",),
    "training": ("evenrank.dataloader", "evenrank.datasets"),
    "cli": ("evenrank",),
}
FORBIDDEN = {
    "datasets": ("torch", "torchrec", "polars"),
    "preprocess": ("torch", "torchrec"),
    "dataloader": ("polars",),
    "training": ("polars",),
}
# Only these may start collectives.
COLLECTIVES = (
    *(f"dataloader/balance/{name}.py" for name in ("channel", "gather", "exchange", "balancer")),
    "training/",
    "cli/",
)


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def _is_below(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_imports_only_what_the_design_allows(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for name in _imports(path):
            if _is_below(name, ("evenrank",)):
                assert _is_below(name, (f"evenrank.{folder}", *ALLOWED[folder])), f"{path} imports {name}"
            assert not _is_below(name, FORBIDDEN.get(folder, ())), f"{path} imports {name}"


def test_collectives_appear_only_where_the_design_says() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if "torch.distributed" in _imports(path):
                assert str(path.relative_to(ROOT)).startswith(COLLECTIVES), path


@pytest.mark.parametrize(
    ("modules", "hidden"),
    [
        ("evenrank.dataloader, evenrank.dataloader.balance, evenrank.training", "polars"),
        ("evenrank.preprocess, evenrank.cli.main", "torch"),
    ],
)
def test_imports_do_without(modules: str, hidden: str) -> None:
    code = f"import sys; sys.modules[{hidden!r}] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
