"""Folders nested deeper than functions may call themselves, which pytest could not remove."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

DEPTH = 1200


@contextlib.contextmanager
def deep_folder(folder: Path) -> Iterator[Path]:
    """Yield a path at DEPTH below a folder, each part of which is called `d`; at the end it is removed."""
    paths = [folder.joinpath(*"d" * depth) for depth in range(1, DEPTH + 1)]
    try:
        yield paths[-1]
    finally:
        shutil.rmtree(paths[-1], ignore_errors=True)
        for path in paths[-2::-1]:
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()
