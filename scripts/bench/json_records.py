"""Records as JSON files, which say of which format and version they are."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from evenrank.core import files
from evenrank.core.errors import DataError

Record = TypeVar("Record")


def save(path: Path, kind: tuple[str, int], content: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Write a record, atomically.

    Args:
        path: of the file.
        kind: name and version of the format.
        content: what JSON can have.
        indent: of its lines; None: it is one line.
    """
    name, version = kind
    files.write_text(path, json.dumps({"format": name, "version": version, **content}, indent=indent) + "\n")


def load(path: Path, kind: tuple[str, int], parse: Callable[[dict[str, Any]], Record], *, remedy: str) -> Record:
    """Read what `save` wrote.

    Args:
        path: of the file.
        kind: name and version of the format.
        parse: from the content to the record; raises ValueError, KeyError, TypeError or AttributeError if it is
            damaged.
        remedy: what to do about a file that cannot be read.

    Raises:
        DataError: the file is missing, damaged, or of another format or version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop("format"), content.pop("version")
        if found == kind:
            return parse(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} cannot be read as {kind[0]!r}: {error}; {remedy}") from error
    raise DataError(f"{path} is version {found[1]} of {found[0]!r}; {remedy}")
