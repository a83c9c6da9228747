"""Folders of this user, for what can be made again."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
