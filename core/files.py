"""Opens files safely (refuses symlinks, pipes and devices), writes them atomically; per-user cache folders."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from io import BufferedReader
from pathlib import Path

from evenrank.core.errors import DataError

_NO_SPACE, _FULL_BYTES = os.strerror(errno.ENOSPC), 1 << 16
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path | str) -> None:
    """Raise a DataError unless a path leads to a regular file, for libraries that open paths themselves."""
    open_regular(path).close()


def open_regular(path: Path | str) -> BufferedReader:
    """Open a regular file for reading, else raise a DataError; a named pipe would wait, a device may never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: the path contains a null character
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {reason}; check the path and its permissions") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = _KINDS.get(stat.S_IFMT(mode), "special")
        raise DataError(f"{path} is {kind}, not a regular file; put the data itself there")
    return os.fdopen(descriptor, "rb")


def opener_of_own_files(path: str, flags: int) -> int:
    """Open a file that evenrank names itself, never through a symbolic link: `opener` of the built-in `open`."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


@contextlib.contextmanager
def locked(path: Path, *, seconds: float = -1) -> Iterator[None]:
    """Hold the lock of a file that is there meanwhile; the kernel releases it if this process dies.

    Raises a TimeoutError if another process or thread holds it for so many seconds (-1: any number), another OSError if
    the path is a link or has content.
    """
    from filelock import UnixFileLock  # 20 ms, and most commands need no lock

    with contextlib.suppress(FileNotFoundError):  # there is none, or whoever held it removes it just now
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode) and (found.st_size or not stat.S_ISREG(found.st_mode)):
            raise FileExistsError(errno.EEXIST, f"{path} is not a lock file")
    with UnixFileLock(path, timeout=seconds, poll_interval=0.01, fallback_to_soft=False):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # whoever has opened it finds that it is gone, and opens a new one
                path.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file that replaces another at the end, so that this one is complete whenever it exists.

    Several processes may write the same file at a time. A killed one leaves its own, `.NAME.RANDOM.partial`. If the
    disk is full, an OSError says so, whatever the library that writes makes of it.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
        partial.replace(path)
    except Exception as error:
        is_full = _NO_SPACE in str(error) or shutil.disk_usage(path.parent).free < _FULL_BYTES
        if is_full and not getattr(error, "errno", None):
            raise OSError(errno.ENOSPC, _NO_SPACE, str(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically: after an OSError, an existing file is unchanged and no partial file is left."""
    with replacing(path) as partial, partial.open("x", encoding="utf-8") as file:  # "x" never follows a symbolic link
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or a crash could leave the renamed file without its contents


def check_space(folder: Path, num_bytes: float, what: str) -> None:
    """Raise a DataError if a disk has no room for so many bytes, some of which may be in the folder already."""
    free = shutil.disk_usage(folder).free + sum(path.lstat().st_size for path in folder.rglob("*"))
    if num_bytes > free:
        raise DataError(
            f"{what} take about {num_bytes / 1e9:,.1f} GB in {folder}, and {free / 1e9:,.1f} GB are free there; free "
            "some space, or choose another folder"
        )


def user_folders() -> Iterator[Path]:
    """Yield the per-user cache folders, best first; they may not exist, or not be writable."""
    with contextlib.suppress(RuntimeError):  # there is no home folder: HOME is not set, and the user is unknown
        home = Path.home()
        if home.is_absolute():
            yield home / ".cache" / "evenrank"
    with contextlib.suppress(OSError):  # there is no temporary folder
        yield Path(tempfile.gettempdir()) / f"evenrank-{os.geteuid()}"


def is_trusted(folder: Path, owners: Collection[int], *, may_be_written: int = 0) -> bool:
    """Return whether a folder, or a link to one, exists and only users with the ids `owners` can write to it.

    `may_be_written` has the bits of `WRITABLE_BY_OTHERS` that its mode may have nevertheless.
    """
    try:
        link, target = folder.lstat(), folder.stat()
    except OSError:
        return False
    is_open = target.st_mode & WRITABLE_BY_OTHERS & ~may_be_written
    return stat.S_ISDIR(target.st_mode) and not is_open and {link.st_uid, target.st_uid} <= set(owners)
