import ast
import pkgutil
import subprocess
import sys
import sysconfig
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("core", "preprocess", "datasets", "dataloader", "training", "cli")

# What a folder may import of evenrank, besides itself.
ALLOWED = {
    "core": (),
    "datasets": ("evenrank.core",),
    "preprocess": (
        "evenrank.core",
        "evenrank.datasets.schema",
        "evenrank.datasets.event_statistics",
        "evenrank.datasets.distributions",
    ),
    "dataloader": ("evenrank.core", "evenrank.datasets"),
    "training": ("evenrank.core", "evenrank.datasets", "evenrank.dataloader"),
    "cli": ("evenrank",),
}
FORBIDDEN = {
    **dict.fromkeys(("core", "datasets"), ("torch", "torchrec", "polars")),
    "preprocess": ("torch", "torchrec"),
    **dict.fromkeys(("dataloader", "training"), ("polars",)),
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
def test_folder_imports_and_starts_collectives_only_as_the_design_allows(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        names = _imports(path)
        for name in names:
            if _is_below(name, ("evenrank",)):
                assert _is_below(name, (f"evenrank.{folder}", *ALLOWED[folder])), f"{path} imports {name}"
            assert not _is_below(name, FORBIDDEN.get(folder, ())), f"{path} imports {name}"
        if "torch.distributed" in names:
            assert str(path.relative_to(ROOT)).startswith(COLLECTIVES), path


def _folders_with_code(*folders: str) -> list[Path]:
    return sorted({path.parent for folder in folders for path in (ROOT / folder).rglob("*.py")})


@pytest.mark.parametrize("folder", _folders_with_code(*FOLDERS), ids=lambda path: str(path.relative_to(ROOT)))
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
        # It imports its modules at the first use of their names.
        ("evenrank.preprocess as package; package.DATASETS", "numba numpy polars pyarrow requests"),
    ],
)
def test_imports_do_without(modules: str, hidden: str) -> None:
    examples = str(ROOT / "examples")
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden!r}.split())); sys.path.append({examples!r}); "
    subprocess.run([sys.executable, "-c", f"{code} import {modules}"], check=True, cwd="/")


def test_no_module_of_ours_stands_in_for_one_of_python_or_of_a_library() -> None:
    # Python looks into a script's own folder first.
    installed = {module.name for module in pkgutil.iter_modules([sysconfig.get_path("purelib")])}
    taken = {name.casefold() for name in sys.stdlib_module_names | installed}
    assert taken >= {"inspect", "html", "code", "requests", "numpy", "torch"}
    for folder in _folders_with_code(*FOLDERS, "examples", "scripts", "tests"):
        assert not taken & {path.stem.casefold() for path in folder.glob("*.py")}, folder
