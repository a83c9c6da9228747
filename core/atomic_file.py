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
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the renamed file without its contents
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
