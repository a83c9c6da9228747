"""Atomic output: the folder of a dataset is replaced completely or not at all."""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from evenrank.core.errors import DataError
from evenrank.core.files import open_lock_file, open_regular
from evenrank.datasets.schema import CACHE_NAME, MANIFEST_NAME

# Whether the folder of a dataset may be replaced: it must contain nothing but what evenrank wrote there.


# Files that the folder of a dataset may contain besides its manifest and its splits.
REQUESTS_NAME = "requests.parquet"
_OPTIONAL_FILES = (REQUESTS_NAME, "vocabulary_user_id.parquet", "vocabulary_item_id.parquet")

# Linux lists all mount points here, bind mounts included, which have the device of their parent folder.
_MOUNTS = Path("/proc/self/mountinfo")

# What `evenrank.datasets` writes to `.cache`, in this version and in older ones.
_ENTRY = r"[0-9a-f]{64}-\w[\w.-]*-v\d+"
_CACHE_FOLDER = re.compile(rf"{_ENTRY}(\.partial)?(/(rows|events))?")
_CACHE_FILE = re.compile(rf"{_ENTRY}(\.lock|(\.partial)?(/(rows|events))?/\w[\w.-]*\.npy)")


def check_location(out: Path) -> None:
    """Check that a path can be that of a dataset, whatever is in the folder.

    Raises:
        DataError: it is or contains the current folder or a mount point, or is a file.

    """
    if Path.cwd().is_relative_to(out):
        raise DataError(f"{out} is or contains the current folder; choose another output folder")
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; choose another output folder")
    if mounted := _first_mount(out):
        where = "is a mount point" if mounted == out else f"contains the mount point {mounted.relative_to(out)}"
        raise DataError(f"{out} {where}, which cannot be replaced; choose a folder that is not mounted")


def check_replaceable(out: Path) -> None:
    """Check that a path does not exist, is an empty folder, or is a dataset without any file that is not part of it.

    Raises:
        DataError: replacing the folder would lose something, or is impossible.

    """
    check_location(out)
    if not out.exists():
        return
    try:
        fault = find_foreign(out)
    except OSError as error:
        raise DataError(f"{out} cannot be read: {error.strerror or error}; check its permissions") from error
    if fault is not None:
        raise DataError(f"{out} {fault}")


def find_foreign(folder: Path) -> str | None:
    """Return what is wrong if a folder contains anything that neither a run nor a cache of evenrank wrote, else None.

    Only regular files that the manifest lists belong to a dataset, and the folders that contain them.
    """
    if not any(folder.iterdir()):
        return None
    files = _listed_files(folder)
    if files is None:
        return "contains files but is not a dataset; choose another output folder"
    folders = {parent for file in files for parent in Path(file).parents}
    for path, mode in _walk(folder):
        in_cache = path.relative_to(CACHE_NAME).as_posix() if path.is_relative_to(CACHE_NAME) else ""
        is_ours = (
            stat.S_ISDIR(mode) and (path in folders or path == Path(CACHE_NAME) or _CACHE_FOLDER.fullmatch(in_cache))
        ) or (stat.S_ISREG(mode) and (path.as_posix() in files or _CACHE_FILE.fullmatch(in_cache)))
        if not is_ours:
            return f"contains {str(path)!r} besides a dataset; move it away, or choose another output folder"
    return None


def _listed_files(folder: Path) -> set[str] | None:
    """Return the files of a dataset, relative to its folder; None if it is none.

    Datasets of all schema versions may be replaced, so only the fields that all of them have are read.
    """
    try:
        with open_regular(folder / MANIFEST_NAME) as file:
            manifest = json.load(file)
        if not {"schema_version", "content_hash"} <= manifest.keys():
            return None
        listed = {str(file["path"]) for split in manifest["splits"].values() for file in split["files"]}
    except (DataError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return {MANIFEST_NAME, *_OPTIONAL_FILES, *listed}


def _walk(folder: Path, below: Path = Path()) -> Iterator[tuple[Path, int]]:
    """Yield the path, relative to `folder`, and the mode of everything in it; links are not followed."""
    with contextlib.suppress(FileNotFoundError):  # an entry of the cache has been renamed into place in the meantime
        for name in sorted(os.listdir(folder / below)):
            mode = (folder / below / name).lstat().st_mode
            yield below / name, mode
            if stat.S_ISDIR(mode):
                yield from _walk(folder, below / name)


def _first_mount(folder: Path) -> Path | None:
    """Return the first mount point at or below a folder; where the system does not list them, only at the folder."""
    try:
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return folder if os.path.ismount(folder) else None
    # Spaces and the like are octal escapes.
    points = (re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line.split()[4]) for line in lines)
    inside = (path for path in map(Path, map(os.fsdecode, points)) if path.is_relative_to(folder))
    return min(inside, default=None)


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
