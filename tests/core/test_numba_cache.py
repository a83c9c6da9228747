"""Compiled functions, and the cache of their machine code; with copies of the package in processes of their own."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.core import numba_cache as compiled_module
from evenrank.core.numba_cache import compiled
from tests.core.package_copies import copy_package, finish, start


@compiled
def _spin(flag: NDArray[np.int64], turns: NDArray[np.int64], max_turns: int) -> bool:
    """Count turns until another thread sets the flag; False if that does not happen within `max_turns`."""
    while turns[0] < max_turns:
        turns[0] += 1  # a store, so that the compiler loads the flag again in each turn
        if flag[0] != 0:
            return True
    return False


def test_a_compiled_function_releases_the_gil() -> None:
    flag, turns = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    assert not _spin(flag, turns, 1)
    was_set: list[bool] = []
    # A thread that held the GIL would keep this one from setting the flag, and use up all its turns.
    spinning = threading.Thread(target=lambda: was_set.append(_spin(flag, turns, 10_000_000_000)))
    spinning.start()
    while turns[0] < 1000 and spinning.is_alive():
        pass
    flag[0] = 1
    spinning.join()
    assert was_set == [True]


def test_numba_can_be_told_not_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_module._CONFIG, "DISABLE_JIT", 1)

    def double(value: int) -> int:
        return 2 * value

    assert compiled(double) is double


def test_a_compiled_function_keeps_its_name_and_documentation() -> None:
    assert _spin.__name__ == "_spin"
    assert (_spin.__doc__ or "").startswith("Count turns")


_MIX = """
import numpy as np
from evenrank.core.compiled import cache_folder
from evenrank.core.hashing import mix_word
print(mix_word(np.uint64(12345)), cache_folder())
"""
_NESTED = """
import numpy as np
from evenrank.core.compiled import compiled
from evenrank.core.hashing import mix_word

@compiled
def twice(word: np.uint64) -> np.uint64:
    return mix_word(mix_word(word))
"""


def _run(package: Path, home: Path, program: str = _MIX) -> list[str]:
    return finish(start(package, home, program))


def test_machine_code_is_compiled_again_after_a_change_in_another_file(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    (package / "core" / "nested.py").write_text(_NESTED)
    program = "import numpy as np\nfrom evenrank.core.nested import twice\nprint(twice(np.uint64(7)))"
    before = _run(package, tmp_path, program)
    assert _run(package, tmp_path, program) == before
    hashing = package / "core" / "hashing.py"
    source = hashing.read_text()
    hashing.write_text(source.replace("0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB"))
    assert _run(package, tmp_path, program) != before
    assert len(list((package / "__pycache__").glob("compiled-*"))) == 1  # that of the earlier code is removed
    hashing.write_text(source)
    assert _run(package, tmp_path, program) == before


def test_without_a_writable_package_machine_code_is_cached_in_a_private_folder_of_the_user(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    (package / "__pycache__").write_text("no folder can be created here, even by root")
    home = tmp_path / "home"
    _, folder = _run(package, home)
    assert Path(folder).parent == home / ".cache" / "evenrank"
    assert (home / ".cache" / "evenrank").stat().st_mode & 0o077 == 0
    assert list(Path(folder).rglob("*.nbc"))


def test_machine_code_that_others_could_have_written_is_not_loaded(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    (package / "__pycache__").write_text("no folder can be created here, even by root")
    folder = tmp_path / "home" / ".cache" / "evenrank"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    _, used = _run(package, tmp_path / "home")
    assert Path(used).parent == tmp_path / "temporary" / f"evenrank-{os.geteuid()}"


def test_without_any_place_for_a_cache_functions_are_compiled_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_module, "PACKAGE_FOLDER", Path("/proc/evenrank"))
    monkeypatch.setattr(compiled_module, "user_folders", lambda: iter([Path("/proc/evenrank")]))
    compiled_module.cache_folder.cache_clear()
    try:
        assert compiled_module.cache_folder() is None
        assert compiled(lambda number: number + 1)(4) == 5
    finally:
        compiled_module.cache_folder.cache_clear()
