import ast
import importlib
import os
import pkgutil
import subprocess
import sys
import sysconfig
from graphlib import TopologicalSorter
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from tests.process_marks import ROOT, check_path
from tests.ranks import RankPool

# What a folder may import of evenrank, besides itself.
ALLOWED: dict[str, str] = {
    "core": "",
    "datasets": "core",
    "preprocess": "core datasets.schema datasets.event_statistics datasets.distributions",
    "codebooks": "core datasets",
    "dataloader": "core datasets codebooks.bundle",
    "training": "core datasets dataloader",
    "cli": "core datasets codebooks preprocess dataloader training __version__",
}
FORBIDDEN = {
    **dict.fromkeys(("core", "datasets"), "torch torchrec polars"),
    "preprocess": "torch torchrec",
    **dict.fromkeys(("codebooks", "dataloader", "training"), "polars"),
}
# All that may be imported of TorchRec and fbgemm-gpu, by folder.
OF_TORCHREC = {
    "dataloader": {"torchrec.sparse.jagged_tensor.KeyedJaggedTensor", "torchrec.streamable.Pipelineable"},
    "training": {
        "torchrec.distributed.DistributedModelParallel",
        "torchrec.optim.optimizers.in_backward_optimizer_filter",
        *(f"torchrec.optim.keyed.{name}" for name in ("CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper")),
    },
}
# Only these may start collectives.
COLLECTIVES = ("dataloader/balance/ranks/", "dataloader/balance/exchange/", "training/", "cli/")


def _imports(path: Path) -> set[str]:
    """Return the modules that a file imports, and the names that it imports from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or path.suffix == ".pyi", f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _is_below(name: str, packages: str) -> bool:
    return f"{name}.".startswith(tuple(f"{package}." for package in packages.split()))


@pytest.mark.parametrize("folder", ALLOWED)
def test_folder_imports_and_starts_collectives_only_as_the_design_allows(folder: str) -> None:
    ours, of_torchrec = f"{folder} {ALLOWED[folder]}", set()
    for path in (ROOT / folder).rglob("*.py*"):
        for name in _imports(path) - {"evenrank", "evenrank.__version__"}:
            assert not name.startswith("evenrank.") or _is_below(name.removeprefix("evenrank."), ours), (path, name)
            assert not _is_below(name, FORBIDDEN.get(folder, "")), (path, name)
            if _is_below(name, "torch.distributed") and not _is_below(name, "torch.distributed.checkpoint"):
                assert str(path.relative_to(ROOT)).startswith(COLLECTIVES), path
            of_torchrec |= {name} if _is_below(name, "torchrec fbgemm_gpu") else set()
    assert of_torchrec == OF_TORCHREC.get(folder, set())


def _folders_with_code(*folders: str) -> list[Path]:
    return sorted({path.parent for folder in folders for path in (ROOT / folder).rglob("*.py")})


def test_no_import_circles_within_a_folder() -> None:
    """Files and subfolders are the nodes; what any file of a subfolder imports counts as the subfolder's import."""
    for folder in _folders_with_code(*ALLOWED):
        package = ".".join(("evenrank", *folder.relative_to(ROOT).parts, ""))
        graph: dict[str, set[str]] = {}
        for path in folder.rglob("*.py"):
            if path != folder / "__init__.py":  # a package re-exports what its modules define
                node = path.relative_to(folder).parts[0].removesuffix(".py")
                names = (name.removeprefix(package) for name in _imports(path) if name.startswith(package))
                graph[node] = graph.get(node, set()) | ({name.split(".")[0] for name in names} - {node})
        assert list(TopologicalSorter(graph).static_order())  # raises CycleError with the circle


# Of other packages' modules among themselves.
WARNS = ("fbgemm_gpu", "torchmetrics")
IMPORT_ALL = """
import importlib, pkgutil, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for folder in FOLDERS:
        package = importlib.import_module(f"evenrank.{folder}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
for warning in caught:
    if not any(f"/site-packages/{package}/" in warning.filename for package in WARNS):
        print(f"{warning.filename}:{warning.lineno}: {warning.message}")
"""
HIDE = "import sys; sys.modules.update(dict.fromkeys({!r}.split())); sys.path.append({!r}); import {}"
CODE = {
    "every module": f"FOLDERS, WARNS = {tuple(ALLOWED)}, {WARNS}{IMPORT_ALL}",
    "training without Polars": HIDE.format(
        "polars", str(ROOT / "examples"), "trainer.job, evenrank.dataloader.balance, evenrank.training"
    ),
    "commands without PyTorch": HIDE.format(
        "torch matplotlib", "", "evenrank.preprocess, evenrank.cli.main, evenrank.cli.inspect_balance"
    ),
    # Packages import their modules at the first use of their names.
    "names that are not used": HIDE.format(
        "numba numpy polars pyarrow torch torchrec", "", "evenrank.datasets, evenrank.dataloader, evenrank.training"
    ),
    "options without anything": HIDE.format(
        "numba numpy polars pyarrow requests", "", "evenrank.preprocess as package; package.DATASETS"
    ),
}


@pytest.mark.parametrize("code", CODE.values(), ids=CODE)
def test_imports_give_no_warning_of_ours_and_do_without_what_they_do_not_need(code: str) -> None:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=280)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


@pytest.mark.parametrize("name", ["datasets", "codebooks", "dataloader", "dataloader.routing", "training"])
def test_all_exported_names_are_there(name: str) -> None:
    module, names = importlib.import_module(f"evenrank.{name}"), dict[str, object]()
    exec(f"from evenrank.{name} import *", names)
    assert module.__all__
    assert all(names[exported] is getattr(module, exported) for exported in module.__all__)
    assert dir(module) == sorted(module.__all__)


def test_no_module_of_ours_stands_in_for_one_of_python_or_of_a_library() -> None:
    # Python looks into a script's own folder first.
    installed = {module.name for module in pkgutil.iter_modules([sysconfig.get_path("purelib")])}
    taken = {name.casefold() for name in sys.stdlib_module_names | installed}
    assert taken >= {"inspect", "html", "code", "requests", "numpy", "torch"}
    for folder in _folders_with_code(*ALLOWED, "examples", "scripts", "tests"):
        assert not taken & {path.stem.casefold() for path in folder.glob("*.py")}, folder


def _origin_of_datasets(rank: int, world_size: int, site_packages: str) -> str | None:
    """Return what `import datasets` finds if site-packages were this folder."""
    path = [site_packages if entry == sysconfig.get_path("purelib") else entry for entry in sys.path]
    found = PathFinder.find_spec("datasets", path)
    return None if found is None else found.origin


AT_EXIT = """
import atexit, sys
from importlib.machinery import PathFinder
atexit.register(lambda: print("datasets:", PathFinder.find_spec("datasets", sys.path)))
"""


def test_tests_their_ranks_and_programs_in_the_root_do_not_import_its_datasets(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    (installed := tmp_path / "datasets" / "__init__.py").touch()
    assert [_origin_of_datasets(0, 1, str(tmp_path))] * 2 == ranks.run(2, _origin_of_datasets, str(tmp_path))
    assert _origin_of_datasets(0, 1, str(tmp_path)) == str(installed)
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)  # which Python imports when it starts
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "scripts/train.py", "--help"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    (found,) = (line for line in run.stdout.splitlines() if line.startswith("datasets:"))
    assert str(ROOT / "datasets") not in found


def test_no_test_may_start_python_with_the_root_first() -> None:
    for command, cwd in (("python -m evenrank", ROOT), ("python -c import", ROOT / "docs" / "..")):
        with pytest.raises(RuntimeError, match="would import `datasets` from the checkout; add -P, or another cwd"):
            check_path(("python", command.split(), cwd, None))
    for command in ("python -P -m evenrank", "python scripts/train.py", "git -c user.name=a log"):
        check_path(("", command.split(), ROOT, None))
    check_path(("python", ["python", "-m", "evenrank"], ROOT / "docs", None))
