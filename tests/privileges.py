"""Permissions that are denied, also where tests run as root."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def unprivileged(folder: Path = Path("/")) -> Iterator[None]:
    """Let root be nobody for a while, to whom the folders down to this one are open."""
    user, modes = os.geteuid(), {path: path.stat().st_mode for path in (folder, *folder.parents)}
    if user == 0:
        for path, mode in modes.items():
            path.chmod(mode | 0o055)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        for path, mode in modes.items() if user == 0 else ():
            path.chmod(mode)
