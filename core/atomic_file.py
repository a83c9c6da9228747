"""Write a file such that it appears with all of its contents, or not at all."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, replacing an existing one only once the new one is complete and on disk.

    Raises:
        OSError: the file could not be written; an existing one is unchanged, and nothing half-written is left.

    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)  # left by a process that was killed
        with partial.open("x", encoding="utf-8") as file:  # "x" never follows a link that another user has put there
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the renamed file without its contents
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
