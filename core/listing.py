"""The one lister of folders: their files, or those that a pattern stands for. It leaves out none in silence."""

import glob
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial, reduce
from pathlib import Path

from evenrank.core.errors import DataError
from evenrank.core.files import check_regular


def num_literal(parts: Sequence[str]) -> int:
    """Return the number of parts of a path before the first one that is a pattern, with `*`, `?` or `[`."""
    return next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))


def matches(pattern: Sequence[str], path: str) -> bool:
    """Return whether a pattern stands for a file or a folder above it.

    As for Spark, a name that begins with `.` or `_` must be in it, but for those of Hive folders, such as `_day=1`.
    """
    return bool(reduce(partial(_advance, pattern), path.split("/"), 1) >> len(pattern))


def _advance(pattern: Sequence[str], reached: int, name: str) -> int:
    """Return how many parts of a pattern a path with this last name may match, as bits, given those of its folder.

    0: it leads to no match. Once all parts match, any names may follow.
    """
    found, is_hidden = 0, name.startswith((".", "_")) and "=" not in name
    for index, part in enumerate((*pattern, "**")):
        if reached >> index & 1:
            if part == "**":  # which may stand for no folder at all
                reached |= 2 << index
                found |= (not is_hidden) << index
            elif fnmatchcase(name, part) and (not is_hidden or name == part):
                found |= 2 << index
    return found


def list_files(folder: Path, pattern: Sequence[str] = ()) -> dict[str, str]:
    """Return the files below a folder, at any depth, that a pattern stands for: real paths by relative paths, in order.

    Raises a DataError about a folder that cannot be listed, a link that leads nowhere or to a folder or file that is
    found anyway, and about what is neither a file nor a folder. Links are followed.
    """
    found, real_folder = dict[str, str](), os.path.realpath(folder).rstrip("/")
    places, folders = {real_folder: str(folder)}, [("", real_folder, 1)]
    while folders:
        above, real_above, reached = folders.pop()
        try:
            with os.scandir(folder / above) as entries:
                for entry in entries:
                    on = _advance(pattern, reached, entry.name)
                    is_folder, is_match = bool(on) and entry.is_dir(), on >> len(pattern)
                    if is_folder or (is_match and entry.is_file()):
                        name = f"{above}{entry.name}"
                        real = os.path.realpath(entry.path) if entry.is_symlink() else f"{real_above}/{entry.name}"
                        if real in places:
                            raise DataError(f"{entry.path} and {places[real]} are the same; remove the link")
                        places[real] = entry.path
                        if is_folder:
                            folders.append((f"{name}/", real, on))
                        else:
                            found[name] = real
                    elif on and entry.is_symlink() and not entry.is_file():
                        raise DataError(f"{entry.path} is a link that leads nowhere; fetch its data, or remove it")
                    elif is_match:
                        check_regular(entry.path)
        except FileNotFoundError:  # the folder was removed meanwhile
            continue
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}; check its permissions") from error
    return dict(sorted(found.items(), key=lambda file: file[0].split("/")))
