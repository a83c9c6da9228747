"""Hashes of source files."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

from evenrank.core import numba_cache


def _hashes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setattr(numba_cache, "PACKAGE_FOLDER", folder)
    return numba_cache.code_hash.__wrapped__(), numba_cache.compiled_code_hash.__wrapped__()


def test_each_hash_follows_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, loop, test = tmp_path / "core" / "plain.py", tmp_path / "datasets" / "loop.py", tmp_path / "tests" / "t.py"
    for path in (plain, loop, test):
        path.parent.mkdir()
        path.write_text("N = 1\n")
    loop.write_text("from x import compiled\n\n@compiled\ndef f():\n    return 1\n")
    code_before, compiled_before = _hashes(tmp_path, monkeypatch)
    test.write_text("N = 2\n")
    assert _hashes(tmp_path, monkeypatch) == (code_before, compiled_before)
    plain.write_text("N = 2\n")
    code_after, compiled_after = _hashes(tmp_path, monkeypatch)
    assert code_after != code_before
    assert compiled_after == compiled_before
    loop.write_text("from x import compiled\n\n@compiled\ndef f():\n    return 2\n")
    assert _hashes(tmp_path, monkeypatch)[0] not in (code_before, code_after)
    assert _hashes(tmp_path, monkeypatch)[1] != compiled_before


def test_compiled_functions_use_only_names_of_files_with_compiled_functions() -> None:
    """Numba compiles the values of globals in, so a changed constant in any other file would be missed."""
    compiled_files = {path for path, source in numba_cache._sources() if numba_cache._DECORATOR in source}
    assert len(compiled_files) > 10
    for path in compiled_files:
        name = ".".join(path.relative_to(numba_cache.PACKAGE_FOLDER).with_suffix("").parts)
        functions = [value for value in vars(import_module(f"evenrank.{name}")).values() if hasattr(value, "py_func")]
        used = {used for function in functions for used in function.py_func.__code__.co_names}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("evenrank."):
                imported = numba_cache.PACKAGE_FOLDER.joinpath(*node.module.split(".")[1:]).with_suffix(".py")
                from_elsewhere = {alias.asname or alias.name for alias in node.names} & used
                assert not from_elsewhere or imported in compiled_files, f"{path}: {from_elsewhere}"
