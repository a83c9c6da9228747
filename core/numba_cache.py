"""`@compiled`: Numba's compiler and its cache on disk, with one compilation per machine.

    PACKAGE/__pycache__/compiled-HASH            if the package's folder can be written
    ~/.cache/evenrank/compiled-HASH              otherwise; begins as a copy of that in the package
    TEMPORARY-FOLDER/evenrank-UID/compiled-HASH  if there is no home folder that can be written

Numba notices changes of the file that a function is in, but machine code also contains the functions that it calls,
from other files. So the hash is that of all files with compiled functions.

The ranks of a job start with an empty cache at the same time. Each function has a lock file, held while a process loads
or compiles it: the first process compiles, the others load. Without the lock, two processes that save different
signatures could also overwrite each other's machine code. Record locks end with their process and are not inherited by
forked workers. Processes take them in the order of calls, callers first, so no two wait for each other.

Importing Numba and compiling take longer than a small simulation: `interpreted()` leaves functions plain Python.
"""

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from evenrank.core.files import is_trusted, open_lock_file, opener_of_own_files, user_folders

if TYPE_CHECKING:
    from numba.core.types import Type

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
# Tests, scripts and virtual environments may be in the same folder.
_SUBPACKAGES = ("core", "datasets", "dataloader", "preprocess", "training")
_DECORATOR = b"\n@compiled\n"
_PREFIX = "compiled-"
_NOTICE = "compiling, once per machine, about 25 s"  # all loops of planning, on a laptop
_CONFIG_LOCK = threading.Lock()
_log = logging.getLogger("evenrank.compile")
_is_interpreting = False
Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function with Numba at its first call, cached on disk; it runs without the GIL and keeps its type."""
    if _is_interpreting:
        return function
    import numba

    folder = cache_folder()
    config: Any = numba.config  # sets its options at import, so type checkers do not know them
    with _CONFIG_LOCK:
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder or "")  # read by Numba's cache
        try:
            dispatcher = numba.njit(nogil=True, cache=folder is not None, no_cfunc_wrapper=True)(function)
        finally:
            config.CACHE_DIR = before
    if folder is not None and not config.DISABLE_JIT:  # with it, `njit` returns the function itself
        _compile_once(dispatcher, folder)
    return cast(Function, dispatcher)


def _compile_once(dispatcher: Any, folder: Path) -> None:
    """Let only one process of the machine compile a function at a time."""
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.types.misc import unliteral

    compile_or_load, compile_loops = dispatcher.compile, dispatcher._compiler.compile
    # Not the time of the file, which images of containers lose.
    dispatcher._cache._cache_file._source_stamp = folder.name
    lock_path = folder / f"{dispatcher.py_func.__module__}.{dispatcher.py_func.__qualname__}.lock"

    def compile_locked(signature: "tuple[Type, ...]") -> object:
        # A call with a constant would compile a version for its value.
        signature = tuple(map(unliteral, signature))
        with global_compiler_lock:
            try:
                with open_lock_file(lock_path) as file:
                    fcntl.lockf(file, fcntl.LOCK_EX)
                    return compile_or_load(signature)
            except OSError:  # the folder is gone, or the disk is full: keep machine code in memory
                dispatcher._cache.disable()
                return compile_or_load(signature)

    def compile_with_notice(*arguments: object) -> object:
        _give_notice(folder)
        return compile_loops(*arguments)

    dispatcher.compile, dispatcher._compiler.compile = compile_locked, compile_with_notice


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
def _give_notice(folder: Path) -> None:
    """Say that loops are being compiled, once among processes that run at the same time, such as the ranks of a job.

    The file stays open and locked until this process ends. A warning is seen without any configuration of logging.
    """
    with contextlib.suppress(OSError):  # another process has said so, or the folder is gone
        file = opener_of_own_files(str(folder / "notice"), os.O_RDWR | os.O_CREAT)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _log.warning(_NOTICE)


@functools.cache
def cache_folder() -> Path | None:
    """Return the folder of the machine code, and create it; None if there is no place for it."""
    name = f"{_PREFIX}{_source_hash()}"
    in_package = PACKAGE_FOLDER / "__pycache__"
    if _can_lock(in_package / name):
        for other in in_package.glob(f"{_PREFIX}*"):
            if other.name != name:  # of earlier versions of the code
                shutil.rmtree(other, ignore_errors=True)
        return in_package / name
    user = (os.geteuid(),)
    for folder in user_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _copy(in_package / name, folder / name)
            # Loading machine code runs it, so nobody else may be able to write it.
            if is_trusted(folder, user) and _can_lock(folder / name) and is_trusted(folder / name, user):
                return folder / name
    return None


def _copy(compiled_before: Path, folder: Path) -> None:
    """Begin a user's folder with what another user, such as the one who installed the package, has compiled there."""
    if compiled_before.is_dir() and not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # nobody else can read it, or another process of the user was faster
            shutil.copytree(compiled_before, partial, ignore=shutil.ignore_patterns("lock"))
            partial.rename(folder)
        shutil.rmtree(partial, ignore_errors=True)


def _can_lock(folder: Path) -> bool:
    """Create a folder if it does not exist, and return whether files can be created and locked in it."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with open_lock_file(folder / "lock") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
        return True
    except OSError:
        return False


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
