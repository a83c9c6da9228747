"""Where unpacked columns are kept: next to the dataset, or in a folder of this user.

    OUT/.cache/NAME                   if OUT can be written
    ~/.cache/evenrank/NAME            otherwise
    TEMPORARY-FOLDER/evenrank-UID     if there is no home folder that can be written

An entry is built under a lock and renamed into place, so no process maps a file that is still being written. Entries
that others could have changed are not used.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from evenrank.core.errors import DataError
from evenrank.core.files import open_lock_file
from evenrank.core.user_folders import WRITABLE_BY_OTHERS, user_folders
from evenrank.datasets.schema import CACHE_NAME

# Of a folder that this user cannot write to, rather than of a disk that is full or damaged.
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Root:
    """A folder of cache entries."""

    path: Path
    """The folder."""
    owners: frozenset[int]
    """The users whose entries are trusted."""
    mode: int
    """With which the folder is created. Entries that others could write to although this mode does not let them are not
    trusted.
    """

    def trusts(self, path: Path) -> bool:
        """Return whether only trusted users could have written the folder or entry at `path`."""
        try:
            link, target = path.lstat(), path.stat()
        except OSError:
            return False
        if not stat.S_ISDIR(target.st_mode) or target.st_mode & WRITABLE_BY_OTHERS & ~self.mode:
            return False
        return {link.st_uid, target.st_uid} <= self.owners


def find_or_build(folder: Path, name: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of a cache entry, and build it if there is none.

    Args:
        folder: of the dataset.
        name: of the entry; it must identify the contents, because datasets share the folders of users.
        build: writes the entry to an empty folder.

    Raises:
        DataError: what `build` raises, or the entry cannot be written.

    """
    for root in _roots(folder):
        if root.trusts(root.path) and root.trusts(root.path / name):
            return root.path / name
    tried = []
    for root in _roots(folder):
        tried.append(str(root.path))
        try:
            root.path.mkdir(mode=root.mode & 0o755, parents=True, exist_ok=True)
            if not root.trusts(root.path):
                continue
            with _lock(root.path / f"{name}.lock"):
                if not os.path.lexists(root.path / name):  # else another process has built it in the meantime
                    _build(root.path / name, build)
            if root.trusts(root.path / name):
                return root.path / name
        except OSError as error:
            if error.errno not in _NOT_PERMITTED:
                raise DataError(
                    f"the cache {root.path} could not be written: {error.strerror or error}; free space, or clear that "
                    "path"
                ) from error
    raise DataError(
        f"{folder} has no place for its unpacked columns: none of {', '.join(tried)} can be written and belongs to "
        "this user alone; change the permissions of one of them"
    )


def _roots(folder: Path) -> Iterator[_Root]:
    """Yield the folders in which a dataset's entries may be, best first."""
    dataset, user = folder.stat(), os.geteuid()
    # What is in the dataset's folder is as trustworthy as the dataset if its owner wrote it.
    yield _Root(
        path=folder / CACHE_NAME,
        owners=frozenset((user, dataset.st_uid, 0)),
        mode=0o755 | dataset.st_mode & WRITABLE_BY_OTHERS,
    )
    for path in user_folders():
        yield _Root(path=path, owners=frozenset((user,)), mode=0o700)


def _build(entry: Path, build: Callable[[Path], None]) -> None:
    partial = entry.with_name(f"{entry.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir(mode=0o755)
    try:
        build(partial)
        partial.rename(entry)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock among the processes of this machine; the kernel releases it if the holder dies."""
    with open_lock_file(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
