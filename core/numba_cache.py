"""The decorator of every compiled loop, and where the machine code is cached.

    PACKAGE/__pycache__/compiled-HASH            if the package's folder can be written
    ~/.cache/evenrank/compiled-HASH              otherwise
    TEMPORARY-FOLDER/evenrank-UID/compiled-HASH  if there is no home folder that can be written

Numba notices changes of the file that a function is in. But its machine code contains that of the functions it calls,
from other files, so the hash is of all files with compiled functions. Each function is compiled once per machine; see
`shared_compilation`.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock

from evenrank.core.files import is_private, open_lock_file, user_folders

# Hashes of evenrank's own source files, by which processes with different code are told apart.


PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
# Tests, scripts and virtual environments may be in the same folder.
_SUBPACKAGES = ("core", "datasets", "dataloader", "preprocess", "training")
_DECORATOR = b"\n@compiled\n"


@functools.cache
def code_hash() -> str:
    """Return a hash of all source files that decide on samples, plans and exchanges: 16 hexadecimal digits."""
    return _hash(_sources())


@functools.cache
def compiled_code_hash() -> str:
    """Return a hash of the source files with compiled functions, whose machine code contains that of others."""
    return _hash((path, source) for path, source in _sources() if _DECORATOR in source)


def _sources() -> Iterable[tuple[Path, bytes]]:
    for name in _SUBPACKAGES:
        for path in sorted((PACKAGE_FOLDER / name).rglob("*.py")):
            yield path, path.read_bytes()


def _hash(sources: Iterable[tuple[Path, bytes]]) -> str:
    digest = hashlib.sha256()
    for path, source in sources:
        digest.update(f"{path.relative_to(PACKAGE_FOLDER).as_posix()} {len(source)}\n".encode())
        digest.update(source)
    return digest.hexdigest()[:16]


# Each function is compiled once per machine: the first process that needs it compiles it, the others load it.
#
# Otherwise every rank of a job compiles every function after an installation, all of them at the same time.
#
# A process that compiles a function holds a record lock on one byte of a file in the cache's folder. The kernel
# releases
# it when the process ends, however it ends. Processes forked meanwhile, such as a DataLoader's workers, do not inherit
# it, so none of them keeps others waiting. Processes that wait look into the cache again and again.


_log = logging.getLogger("evenrank")

_LOCK_NAME = "lock"
_MAX_BYTE = 1 << 40  # of the lock file, which stays empty: locks may be beyond its end
_NOTICE_BYTE = 0

_POLL_SECONDS = 0.02
# The longest that a process waits for one function. Then it compiles for itself: the other may have been suspended.
_MAX_WAIT_SECONDS = 120.0

_NOTICE = "compiling loops for this machine (once)"
_SECONDS_BEFORE_NOTICE = 2.0


def share_compilation(dispatcher: Any, folder: Path) -> None:
    """Let the processes of this machine compile a function once, and cache its machine code.

    If the folder cannot be written, or its file system has no locks, each process compiles for itself.

    Args:
        dispatcher: what `numba.njit` has made of the function, with `numba.config.CACHE_DIR` being `folder`.
        folder: of the cache.

    """
    cache, compile_alone = _SharedCache(dispatcher.py_func, _locks_of(folder)), dispatcher.compile

    def compile_shared(signature: object) -> object:
        with global_compiler_lock, _spent:
            try:
                return compile_alone(signature)
            finally:  # not when it is saved: what cannot be compiled raises, and is not saved
                cache.unlock()

    dispatcher._cache = cache
    dispatcher.compile = compile_shared


class _Locks:
    """Locks between the processes of a machine: one for each byte of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def try_acquire(self, byte: int) -> bool:
        """Return False if another process has the lock; True also if there can be no locks."""
        if self._descriptor is None:  # and it is never closed, which would release all locks
            try:
                with open_lock_file(self._path) as file:
                    self._descriptor = os.dup(file.fileno())
            except OSError:
                return True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            return error.errno not in (errno.EACCES, errno.EAGAIN)
        return True

    def release(self, byte: int) -> None:
        """Release a lock that `try_acquire` has returned True for."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)


@functools.cache
def _locks_of(folder: Path) -> _Locks:
    return _Locks(folder / _LOCK_NAME)


class _SharedCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of one function; a lookup that finds nothing returns with the lock, so that the caller compiles."""

    def __init__(self, function: Callable[..., object], locks: _Locks) -> None:
        super().__init__(function)
        name = f"{self.cache_path}/{self._impl.filename_base}"
        self._locks = locks
        self._byte = 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % _MAX_BYTE
        self._is_locked = False

    def load_overload(self, sig: object, target_context: object) -> object:
        """Return the machine code for a signature, once another process has compiled it; None: the caller compiles."""
        found = self._load(sig, target_context)
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        while found is None and not self._lock() and time.monotonic() < deadline:
            _spent.give_notice(self._locks)
            time.sleep(_POLL_SECONDS)
            found = self._load(sig, target_context)
        if found is None:
            _spent.give_notice(self._locks)
            found = self._load(sig, target_context)  # saved between the last look and the lock
        return found

    def save_overload(self, sig: object, data: object) -> None:
        """Save machine code; if the folder cannot be written any more, it stays in memory only."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)

    def unlock(self) -> None:
        """Release the lock, if this process has it."""
        if self._is_locked:
            self._locks.release(self._byte)
            self._is_locked = False

    def _load(self, sig: object, target_context: object) -> object:
        with contextlib.suppress(OSError):
            return super().load_overload(sig, target_context)
        return None

    def _lock(self) -> bool:
        self._is_locked = self._is_locked or self._locks.try_acquire(self._byte)
        return self._is_locked


class _SpentTime:
    """How long this process has compiled, or waited for others that do; guarded by Numba's compiler lock.

    It counts inside its context, which can be entered several times: functions are compiled while their callers are.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._began = self._before = 0.0
        self._has_noticed = False

    def __enter__(self) -> None:
        if not self._depth:
            self._began = time.monotonic()
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._before += time.monotonic() - self._began

    def give_notice(self, locks: _Locks) -> None:
        """If it has taken long, say once per machine what it is, on a terminal or else to the log."""
        if self._has_noticed or self._before + time.monotonic() - self._began < _SECONDS_BEFORE_NOTICE:
            return
        self._has_noticed = True
        if not locks.try_acquire(_NOTICE_BYTE):  # and never release it: one notice of all ranks is enough
            return
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"\revenrank: {_NOTICE}\n")  # over the spinner of another rank, if there is one
        else:
            _log.info(_NOTICE)


_spent = _SpentTime()


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
