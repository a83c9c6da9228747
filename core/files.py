"""Opening files that others may have put in place: no links where ours should be, no pipes where data should be."""

import errno
import os
import stat
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
