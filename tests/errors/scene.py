"""What the calls of the tables of errors get, and what a row of a table is."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from evenrank.core.errors import EvenrankError


@dataclass(frozen=True)
class Scene:
    folder: Path
    """An empty folder."""
    data: Path
    """A dataset, see `small_dataset`."""

    def file(self, name: str, content: str | bytes) -> Path:
        """Write a file into the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path


class Row(NamedTuple):
    call: Callable[[Scene], Any]
    kind: type[EvenrankError]
    line: str
    """The whole text; `...` stands for anything, and `<folder>` and `<data>` for the paths of the scene."""
