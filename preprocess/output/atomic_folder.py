"""Atomic output: a dataset's folder appears whole, or what was there before stays."""

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
from evenrank.datasets.schema import (
    CACHE_NAME,
    MANIFEST_NAME,
)

# Files that a dataset's folder may hold besides its manifest and its splits.
REQUESTS_NAME = "requests.parquet"
BESIDE_SPLITS = (REQUESTS_NAME, "vocabulary_user_id.parquet", "vocabulary_item_id.parquet")


@contextlib.contextmanager
def replacing_folder(out: Path) -> Iterator[Path]:
    """Give an empty folder to write to, and put it in the place of `out` if the block ends without an exception.

    The exchange is one system call on Linux, so a reader sees the old dataset or the new one. If the block fails, the
    old one stays, and the half-written one is removed; after a kill, the next run removes it.

    Raises:
        DataError: `out` holds something that is not a dataset, cannot be written, or another run is writing it.

    """
    out = out.resolve()  # a link stays, and what it points to is replaced
    _check_replaceable(out)
    partial = out.with_name(f".{out.name}.partial")
    missing = [folder for folder in out.parents if not folder.exists()]  # innermost first
    try:
        with os_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(out.with_name(f".{out.name}.lock"), out):
            with os_errors(out):
                _remove(partial)
                partial.mkdir()
            try:
                yield partial
                with os_errors(out):
                    _flush(partial)
                    _put_in_place(partial, out)
            finally:
                _remove(partial)
    finally:
        for folder in missing:  # that were made for nothing
            with contextlib.suppress(OSError):
                folder.rmdir()


def _check_replaceable(out: Path) -> None:
    """Refuse what is not a dataset of ours, or not a place for one."""
    if Path.cwd().is_relative_to(out):
        raise DataError(f"{out} is the current folder, or holds it; choose another output folder")
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out} is a file; choose another output folder")
    names = {path.name for path in out.iterdir()}
    if not names:
        return
    # A dataset of any schema version may be replaced, so its manifest is not read as one of ours.
    try:
        manifest = json.loads((out / MANIFEST_NAME).read_text(encoding="utf-8"))
        splits = set(manifest["splits"]) if {"schema_version", "content_hash"} <= manifest.keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        splits = None
    if splits is None:
        raise DataError(f"{out} holds something that is no dataset; choose another output folder")
    if others := sorted(names - {MANIFEST_NAME, CACHE_NAME, *BESIDE_SPLITS, *splits}):
        raise DataError(f"{out} holds {others[0]!r} beside a dataset; move it away, or choose another output folder")


@contextlib.contextmanager
def os_errors(out: Path) -> Iterator[None]:
    """Turn an error of the system, a full disk say, into one line."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{out} could not be written: {error.strerror or error}; nothing was changed there") from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _exclusive(lock: Path, out: Path) -> Iterator[None]:
    while True:
        with os_errors(out):
            file = lock.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(f"another run is writing {out}; wait for it, or choose another output folder") from None
        # The holder before us removes the file when it is done: what we locked may be gone from the folder.
        if lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
            break
        file.close()
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        file.close()


def _flush(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _fsync(path)


def _put_in_place(partial: Path, out: Path) -> None:
    if not out.exists():
        partial.rename(out)
    elif not _exchange(partial, out):
        # Elsewhere than on Linux: two renames, and the old folder is brought back if the second one fails.
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
    """Make what was written to a file, or renamed in a folder, last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the system cannot."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, rename_exchange = -100, 2  # from <fcntl.h> and <linux/fs.h>
    return bool(renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) == 0)
