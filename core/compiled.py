"""`@compiled`: Numba's compiler and its cache on disk, with one compilation per machine.

    PACKAGE/__pycache__/compiled-HASH            if the package's folder can be written
    ~/.cache/evenrank/compiled-HASH              otherwise; begins as a copy of that in the package
    TEMPORARY-FOLDER/evenrank-UID/compiled-HASH  if there is no home folder that can be written

Numba notices changes of the file that a function is in, but machine code also contains the functions that it calls,
from other files. So the hash is that of all files with compiled functions.

The ranks of a job start with an empty cache at the same time. Each function is loaded or compiled under a lock: the
first process compiles, the others load. Without it, two processes that save different signatures could also overwrite
each other's machine code. Processes take locks in the order of calls, callers first, so no two wait for each other.

Importing Numba and compiling take longer than a small simulation: `interpreted()` leaves functions plain Python.
"""

import contextlib
import functools
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from evenrank.core.files import is_trusted, locked, user_folders
from evenrank.core.optional_imports import garbage_kept

if TYPE_CHECKING:
    from numba.core.types import Type

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
# Tests, scripts and virtual environments may be in the same folder.
_SUBPACKAGES = ("core", "datasets", "dataloader", "preprocess", "training")
_DECORATOR = b"\n@compiled\n"
_PREFIX = "compiled-"
_NOTICE = "compiling, once per machine, about 25 s"  # all loops of planning, on a laptop
_log = logging.getLogger("evenrank.compile")
_is_interpreting = False
Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function with Numba at its first call, cached on disk; it runs without the GIL and keeps its type."""
    if _is_interpreting:
        return function
    import numba
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.types.misc import unliteral

    config: Any = numba.config  # sets its options at import, so type checkers do not know them
    folder = None if config.DISABLE_JIT else cache_folder()  # with it, `njit` returns the function itself
    with global_compiler_lock:
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder or "")  # read by Numba's cache
        try:
            dispatcher = numba.njit(nogil=True, cache=folder is not None, no_cfunc_wrapper=True)(function)
        finally:
            config.CACHE_DIR = before
    if folder is None:
        return cast(Function, dispatcher)
    code, compile_or_load = function.__code__, dispatcher.compile
    lock = folder / f"{function.__module__}.{code.co_qualname}.{code.co_firstlineno}.lock"

    def compile_locked(signature: "tuple[Type, ...]") -> object:
        # A call with a constant would compile a version for its value.
        signature = tuple(map(unliteral, signature))
        with global_compiler_lock, garbage_kept():  # the first call imports most of Numba
            try:
                with locked(lock):
                    entry = compile_or_load(signature)
            except OSError:  # the folder is gone, or the disk is full: keep machine code in memory
                dispatcher._cache.disable()
                entry = compile_or_load(signature)
        if dispatcher.stats.cache_misses:
            _give_notice(folder)
        return entry

    dispatcher.compile = compile_locked
    return cast(Function, dispatcher)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Leave functions of modules that are first imported while the context is open plain Python, and run them there."""
    global _is_interpreting
    _is_interpreting = True
    try:
        with np.errstate(over="ignore"):  # words of 64 bits wrap around in hashes
            yield
    finally:
        _is_interpreting = False


@functools.cache
def _give_notice(folder: Path) -> object:
    """Say that loops are being compiled, once among processes that run at the same time, such as the ranks of a job.

    The lock is held until this process ends. A warning is seen without any configuration of logging.
    """
    from filelock import UnixFileLock

    lock = UnixFileLock(folder / "notice", timeout=0, fallback_to_soft=False)
    with contextlib.suppress(OSError):  # another process has said so, or the folder is gone
        lock.acquire()
        _log.warning(_NOTICE)
    return lock


@functools.cache
def cache_folder() -> Path | None:
    """Return the folder of the machine code, and create it; None if there is no place for it."""
    name, in_package, user = f"{_PREFIX}{_source_hash()}", PACKAGE_FOLDER / "__pycache__", (os.geteuid(),)
    for parent in (in_package, *user_folders()):
        folder, is_user = parent / name, parent != in_package
        with contextlib.suppress(OSError):
            parent.mkdir(mode=0o700 if is_user else 0o755, parents=True, exist_ok=True)
            _copy(in_package / name, folder)
            folder.mkdir(mode=0o755, exist_ok=True)
            # Loading machine code runs it, so nobody else may be able to write it.
            if is_trusted(folder, user) and (is_trusted(parent, user) or not is_user):
                with locked(folder / "lock"):
                    for other in in_package.glob(f"{_PREFIX}*") if not is_user else ():
                        if other.name != name:  # of earlier versions of the code
                            shutil.rmtree(other, ignore_errors=True)
                    return folder
    return None


def _copy(compiled_before: Path, folder: Path) -> None:
    """Begin a user's folder with what another user, such as the one who installed the package, has compiled there."""
    if compiled_before.is_dir() and not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # nobody else can read it, or another process of the user was faster
            shutil.copytree(compiled_before, partial, ignore=shutil.ignore_patterns("*lock"))
            partial.rename(folder)
        shutil.rmtree(partial, ignore_errors=True)


def _source_hash() -> str:
    """Return 16 hexadecimal digits of a hash of all source files with compiled functions."""
    digest = hashlib.sha256()
    for path in _compiled_sources():
        source = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE_FOLDER).as_posix()} {len(source)}\n".encode() + source)
    return digest.hexdigest()[:16]


def _compiled_sources() -> list[Path]:
    paths = [path for name in _SUBPACKAGES for path in sorted((PACKAGE_FOLDER / name).rglob("*.py"))]
    return [path for path in paths if _DECORATOR in path.read_bytes()]
