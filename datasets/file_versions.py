"""Whether the files of a dataset are still those that were seen when it was opened, on any file system of pyarrow."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from pyarrow import fs

Version = tuple[Any, ...]
"""Changes with every write to a file. Locally: its size, and the times of its last change in nanoseconds, of which no
program can set the second. In an object store: its size, and the time of the upload in seconds.
"""
_CHUNK = 1 << 20  # bytes


def version_of(files: fs.FileSystem, path: str) -> Version | None:
    """Return the version of a file; None if there is none."""
    if isinstance(files, fs.LocalFileSystem):
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return _remote_version(files.get_file_info(path))


def versions_of(files: fs.FileSystem, paths: Iterable[str]) -> dict[str, Version | None]:
    """Return the versions of files; in an object store with a request per thousand files, not one per file."""
    paths = list(paths)
    if isinstance(files, fs.LocalFileSystem):
        return {path: version_of(files, path) for path in paths}
    try:
        listed: Mapping[str, fs.FileInfo] = {
            info.path: info
            for folder in {path.rpartition("/")[0] for path in paths}
            for info in files.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        }
    except OSError:  # those who may read a bucket may not always list it
        return {path: version_of(files, path) for path in paths}
    return {path: _remote_version(listed[path]) if path in listed else None for path in paths}


def _remote_version(info: fs.FileInfo) -> Version | None:
    # Listings have fractions of seconds that requests for a single object lack.
    return None if info.type != fs.FileType.File else (info.size, (info.mtime_ns or 0) // 1_000_000_000)


def has_sha256(files: fs.FileSystem, path: str, sha256: str) -> bool:
    """Return whether a file can be read and has this SHA-256, in hexadecimal."""
    digest = hashlib.sha256()
    try:
        with files.open_input_stream(path) as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
    except (OSError, pa.ArrowException):
        return False
    return digest.hexdigest() == sha256
