"""Atomic output: the folder of a dataset is replaced completely or not at all."""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from evenrank.core.errors import DataError
from evenrank.datasets.schema import CACHE_NAME, MANIFEST_NAME

# Files that the folder of a dataset may contain besides its manifest and its splits.
REQUESTS_NAME = "requests.parquet"
_OPTIONAL_FILES = (REQUESTS_NAME, "vocabulary_user_id.parquet", "vocabulary_item_id.parquet")


@contextlib.contextmanager
def replacing_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder to write to, and replace `out` by it if the block ends without an exception.

    On Linux the two folders are exchanged in one system call, so a reader sees either the old dataset or the new one.
    If the block raises, `out` is unchanged and the incomplete folder is removed; if the process is killed, the next
    call for the same `out` removes it.

    Raises:
        DataError: `out` is not empty and not a dataset, cannot be written, or is being written by another process.

    """
    out = out.resolve()  # a symbolic link is kept, and its target replaced
    _check_replaceable(out)
    partial = out.with_name(f".{out.name}.partial")
    missing_parents = [folder for folder in out.parents if not folder.exists()]  # innermost first
    try:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(out.with_name(f".{out.name}.lock"), out):
            with writing(out):
                _remove(partial)
                partial.mkdir()
            try:
                yield partial
                with writing(out):
                    _flush(partial)
                    _put_in_place(partial, out)
            finally:
                _remove(partial)
    finally:
        for folder in missing_parents:
            with contextlib.suppress(OSError):  # not empty: the dataset was written
                folder.rmdir()


def _check_replaceable(out: Path) -> None:
    """Raise an error unless `out` does not exist, is empty, or is a dataset."""
    if Path.cwd().is_relative_to(out):
        raise DataError(f"{out} is or contains the current folder; choose another output folder")
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out} is a file; choose another output folder")
    names = {path.name for path in out.iterdir()}
    if not names:
        return
    # Datasets of all schema versions may be replaced, so only the fields that all of them have are read.
    try:
        manifest = json.loads((out / MANIFEST_NAME).read_text(encoding="utf-8"))
        splits = set(manifest["splits"]) if {"schema_version", "content_hash"} <= manifest.keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        splits = None
    if splits is None:
        raise DataError(f"{out} contains files but is not a dataset; choose another output folder")
    if others := sorted(names - {MANIFEST_NAME, CACHE_NAME, *_OPTIONAL_FILES, *splits}):
        raise DataError(
            f"{out} contains {others[0]!r} besides a dataset; move it away, or choose another output folder"
        )


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
            file = lock.open("w")
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
    if not out.exists():
        partial.rename(out)
    elif not _exchange_folders(partial, out):
        # Systems other than Linux need two renames; the first is undone if the second fails.
        old = out.with_name(f".{out.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
        try:
            partial.rename(out)
        except OSError:
            old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    _fsync(out.parent)


def _fsync(path: Path) -> None:
    """Flush the contents of a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange_folders(first: Path, second: Path) -> bool:
    """Exchange two folders atomically; return False if the system cannot."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, rename_exchange = -100, 2  # from <fcntl.h> and <linux/fs.h>
    return bool(renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), rename_exchange) == 0)
