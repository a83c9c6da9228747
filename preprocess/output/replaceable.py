"""Whether the folder of a dataset may be replaced: it must contain nothing but what evenrank wrote there."""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from evenrank.core.errors import DataError
from evenrank.core.files import open_regular
from evenrank.datasets.schema import CACHE_NAME, MANIFEST_NAME

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
