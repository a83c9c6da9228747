"""The import rules of docs/explanation/architecture.md."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("core", "preprocess", "datasets", "dataloader", "training", "cli")

# What a folder may import of evenrank, besides itself.
ALLOWED = {
    "core": (),
    "datasets": ("evenrank.core",),
    "preprocess": ("evenrank.core", "evenrank.datasets.schema", "evenrank.datasets.distributions"),
    "dataloader": ("evenrank.core", "evenrank.datasets"),
    "training": ("evenrank.core", "evenrank.datasets", "evenrank.dataloader"),
    "cli": ("evenrank",),
}
FORBIDDEN = {
    "core": ("torch", "torchrec", "polars"),
    "datasets": ("torch", "torchrec", "polars"),
    "preprocess": ("torch", "torchrec"),
    "dataloader": ("polars",),
    "training": ("polars",),
}
# Only these may start collectives.
COLLECTIVES = ("dataloader/balance/ranks/", "dataloader/balance/exchange/", "training/", "cli/")


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


FOLDERS_WITH_CODE = sorted({path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")})


@pytest.mark.parametrize("folder", FOLDERS_WITH_CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_circles_within_a_folder(folder: Path) -> None:
    """Files and subfolders are the nodes; what any file of a subfolder imports counts as the subfolder's import."""
    package = ".".join(("evenrank", *folder.relative_to(ROOT).parts))
    graph: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        if path.name != "__init__.py" or path.parent != folder:  # a package re-exports what its modules define
            node = path.relative_to(folder).parts[0].removesuffix(".py")
            targets = {name.removeprefix(f"{package}.").split(".")[0] for name in _imports(path) if package in name}
            graph[node] = graph.get(node, set()) | (targets - {node, package})
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError with the circle


@pytest.mark.parametrize(
    ("modules", "hidden"),
    [
        ("evenrank.dataloader, evenrank.dataloader.balance, evenrank.training", "polars"),
        ("trainer.job, trainer.tasks", "polars"),
        ("evenrank.preprocess, evenrank.cli.main", "torch"),
        ("evenrank.cli.inspect_balance", "matplotlib"),
    ],
)
def test_imports_do_without(modules: str, hidden: str) -> None:
    examples = str(ROOT / "examples")
    code = f"import sys; sys.modules[{hidden!r}] = None; sys.path.append({examples!r}); import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
