"""Atomic output: the folder of a dataset is replaced completely or not at all."""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from evenrank.core.errors import DataError
from evenrank.core.files import open_lock_file
from evenrank.preprocess.output.replaceable import check_location, check_replaceable, find_foreign


@contextlib.contextmanager
def replacing_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder to write to, and replace `out` by it if the block ends without an exception.

    On Linux the two folders are exchanged in one system call, so a reader sees either the old dataset or the new one.
    If the block raises, `out` is unchanged and the incomplete folder is removed; if the process is killed, the next
    call for the same `out` removes it.

    Raises:
        DataError: `out` is a mount point, contains something besides a dataset, cannot be written, or is being written
            by another process.

    """
    out = out.resolve()  # a symbolic link is kept, and its target replaced
    check_location(out)
    partial = out.with_name(f".{out.name}.partial")
    missing_parents = [folder for folder in out.parents if not folder.exists()]  # innermost first
    try:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(out.with_name(f".{out.name}.lock"), out):
            check_replaceable(out)  # under the lock, because another run may replace what is there
            with writing(out):
                _remove(partial)
                partial.mkdir()
            try:
                yield partial
                with writing(out):
                    _flush(partial)
                check_replaceable(out)  # again, because a run can take hours
                with writing(out):
                    _put_in_place(partial, out)
            finally:
                try:
                    _remove(partial)
                except BaseException:  # a signal to stop
                    _remove(partial)
                    raise
    finally:
        for folder in missing_parents:
            with contextlib.suppress(OSError):  # not empty: the dataset was written
                folder.rmdir()


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Replace an error of the operating system, such as a full disk, by a one-line `DataError` that names `out`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"{out} could not be written: {reason}; it is unchanged, check permissions and space"
        ) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _exclusive(lock: Path, out: Path) -> Iterator[None]:
    """Hold a lock file, and raise an error if another process holds it."""
    while True:
        with writing(out):
            file = open_lock_file(lock)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(
                f"{out} is being written by another process; wait for it, or choose another output folder"
            ) from None
        # The previous holder deletes the file before it unlocks it, so the locked file may no longer be in the folder.
        if lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
            break
        file.close()
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        file.close()


def _flush(folder: Path) -> None:
    """Flush a folder and everything in it to disk."""
    for path in (*folder.rglob("*"), folder):
        _fsync(path)


def _put_in_place(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`; if that exists, exchange the two, so that the old folder is `partial` afterwards."""
    if not out.exists():
        partial.rename(out)
    else:
        _exchange(partial, out)
        # Nobody finds the old folder any more, so what it contains now is what would be lost.
        try:
            if (fault := find_foreign(partial)) is not None:
                raise DataError(f"{out} {fault}")
        except BaseException:  # also if it cannot be read
            _exchange(partial, out)
            raise
    _fsync(out.parent)


def _exchange(partial: Path, out: Path) -> None:
    if not _exchange_folders(partial, out):
        # Systems other than Linux need three renames; the first is undone if the second fails.
        old = out.with_name(f".{out.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
        try:
            partial.rename(out)
        except OSError:
            old.rename(out)
            raise
        old.rename(partial)


def _fsync(path: Path) -> None:
    """Flush the contents of a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange_folders(first: Path, second: Path) -> bool:
    """Exchange two folders atomically; return False if the system has no such call."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, rename_exchange = -100, 2  # from <fcntl.h> and <linux/fs.h>
    if renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), rename_exchange) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS):  # the file system or the kernel cannot
        return False
    raise OSError(number, os.strerror(number), str(second))
