"""The decorator of every compiled loop, and where the machine code is cached.

    PACKAGE/__pycache__/compiled-HASH            if the package's folder can be written
    ~/.cache/evenrank/compiled-HASH              otherwise
    TEMPORARY-FOLDER/evenrank-UID/compiled-HASH  if there is no home folder that can be written

Numba notices changes of the file that a function is in. But its machine code contains that of the functions it calls,
from other files, so the hash is of all files with compiled functions. Each function is compiled once per machine; see
`shared_compilation`.
"""

import contextlib
import functools
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from evenrank.core.shared_compilation import share_compilation
from evenrank.core.source_hash import PACKAGE_FOLDER, compiled_code_hash
from evenrank.core.user_folders import is_private, user_folders

_CONFIG: Any = numba.config  # whose options are set when it is imported, so that type checkers do not know them
_PREFIX = "compiled-"
_LOCK = threading.Lock()

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function with Numba at its first call, cached on disk; it runs without the GIL and keeps its type."""
    folder = cache_folder()
    with _LOCK:
        before, _CONFIG.CACHE_DIR = _CONFIG.CACHE_DIR, str(folder or "")  # read by Numba's cache
        try:
            dispatcher = numba.njit(nogil=True)(function)
            if folder is not None and not _CONFIG.DISABLE_JIT:  # with it, `njit` returns the function itself
                share_compilation(dispatcher, folder)
            return cast(Function, dispatcher)
        finally:
            _CONFIG.CACHE_DIR = before


@functools.cache
def cache_folder() -> Path | None:
    """Return the folder of the machine code, and create it; None if there is no place for it."""
    name = f"{_PREFIX}{compiled_code_hash()}"
    in_package = PACKAGE_FOLDER / "__pycache__"
    if _can_write(in_package / name):
        for other in in_package.glob(f"{_PREFIX}*"):
            if other.name != name:  # of earlier versions of the code
                shutil.rmtree(other, ignore_errors=True)
        return in_package / name
    for folder in user_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Loading machine code runs it, so nobody else may be able to write it.
            if is_private(folder) and _can_write(folder / name) and is_private(folder / name):
                return folder / name
    return None


def _can_write(folder: Path) -> bool:
    """Create a folder if it does not exist, and return whether files can be created in it."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
