"""Opening files that others may have put in place: no links where ours should be, no pipes where data should be."""

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from evenrank.core.errors import DataError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path | str) -> None:
    """Check that a path leads to a regular file, for libraries that open paths themselves.

    Reading a named pipe would wait for a writer, and a device may never end.

    Raises:
        DataError: it leads to something else, or to nothing.

    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # ValueError: the path contains a null character
        raise _unreadable(path, error) from error
    _check_mode(path, mode)


def open_regular(path: Path | str) -> BufferedReader:
    """Open a regular file for reading, without ever waiting for another process.

    Raises:
        DataError: the path leads to something else or to nothing, or the file cannot be opened.

    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        _check_mode(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def opener_of_own_files(path: str, flags: int) -> int:
    """Open a file that evenrank names itself: never through a symbolic link; the `opener` of the built-in `open`."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def open_lock_file(path: Path) -> BufferedReader:
    """Open a lock file for `fcntl.flock`, and create it if it does not exist; its contents are never changed.

    Raises:
        OSError: it cannot be opened, or is a symbolic link or anything else than an empty file.

    """
    # NFS locks only files that are open for writing.
    file = os.fdopen(opener_of_own_files(str(path), os.O_RDWR | os.O_CREAT), "rb")
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and not status.st_size:
        return file
    file.close()
    raise FileExistsError(errno.EEXIST, f"{path} is not a lock file")


def _check_mode(path: Path | str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'special')}, not a regular file; put the data itself there"
        )


def _unreadable(path: Path | str, error: OSError | ValueError) -> DataError:
    reason = getattr(error, "strerror", None) or error
    return DataError(f"{path} cannot be read: {reason}; check the path and its permissions")


# Write a file such that it appears with all of its contents, or not at all.


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, replacing an existing one only once the new one is complete and on disk.

    Raises:
        OSError: the file could not be written; an existing one is unchanged, and nothing half-written is left.

    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)  # left by a process that was killed
        with partial.open("x", encoding="utf-8") as file:  # "x" never follows a link that another user has put there
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the renamed file without its contents
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# Folders of this user, for what can be made again.


WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def user_folders() -> Iterator[Path]:
    """Yield `~/.cache/evenrank`, then `TEMPORARY-FOLDER/evenrank-UID`; neither may exist, or be writable."""
    with contextlib.suppress(RuntimeError):  # there is no home folder: HOME is not set, and the user is unknown
        home = Path.home()
        if home.is_absolute():
            yield home / ".cache" / "evenrank"
    with contextlib.suppress(OSError):  # there is no temporary folder
        yield Path(tempfile.gettempdir()) / f"evenrank-{os.geteuid()}"


def is_private(folder: Path) -> bool:
    """Return whether a folder belongs to this user, and nobody else can write to it; False if there is none."""
    try:
        link, target = folder.lstat(), folder.stat()
    except OSError:
        return False
    is_own = link.st_uid == target.st_uid == os.geteuid()
    return stat.S_ISDIR(target.st_mode) and is_own and not target.st_mode & WRITABLE_BY_OTHERS
