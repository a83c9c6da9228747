"""Paths, patterns and folders -> data files; what their names say: format, compression, values of hive folders."""

import glob
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from urllib.parse import unquote

from evenrank.core.errors import ConfigError, DataError

TEXT, JSON, PARQUET = "delimited text", "JSON lines", "Parquet"
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}  # as PyArrow calls them
_FORMATS = {
    **dict.fromkeys((".csv", ".tsv", ".txt", ".dat"), TEXT),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), JSON),
    ".parquet": PARQUET,
}
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def file_format(path: Path) -> str:
    """Return TEXT, JSON or PARQUET by the name of a file, or raise a DataError."""
    name, is_compressed = path.name.lower(), path.suffix.lower() in CODECS
    known = _FORMATS.get(Path(Path(name).stem if is_compressed else name).suffix)
    if known is None or (known == PARQUET and is_compressed):
        *text, parquet = _FORMATS
        expected = f"{', '.join(text)}, also with {', '.join(CODECS)}, or {parquet}"
        raise DataError(f"{path} has an unknown suffix; expected one of {expected}")
    return known


def find_files(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the data files that paths of files and folders, and patterns such as `logs/*.csv`, stand for.

    Each has a name for the manifest, which depends neither on the machine nor on the other paths: where it is below its
    path, with hive folders above that, such as `day=1/log.csv`.

    The files of each path are sorted. Of folders at any depth and of patterns, empty files and names that begin with
    `.` or `_` are left out.
    """
    files: list[tuple[Path, str]] = []
    for path in paths:
        if not path.exists() and not glob.has_magic(str(path)):
            raise DataError(f"{path} cannot be read: No such file or directory; check the path")
        found = sorted(set(_expand(path)))
        if not found:
            raise DataError(f"{path} leads to no data file; check it")
        if len({file_format(file) for file in found}) > 1:
            raise DataError(f"{path} has files of several formats; use a pattern such as *.csv")
        files += [(file, _name_below(file, path)) for file in found]
    for file, count in Counter(file.resolve() for file, _ in files).items():
        if count > 1:
            given = ", ".join(map(str, paths))
            raise ConfigError(f"{file} is in {given} twice, and its events would count twice; give each file once")
    return dict(files)


def _expand(path: Path) -> Iterator[Path]:
    if path.exists() and not path.is_dir():
        yield path
        return
    for match in path.iterdir() if path.is_dir() else map(Path, glob.iglob(str(path), recursive=True)):
        if not is_hidden(match.parts, path.parts) and (match.is_dir() or (match.is_file() and match.stat().st_size)):
            yield from _expand(match)


def is_hidden(parts: Sequence[str], given: Sequence[str]) -> bool:
    """Return whether the parts of a path that were not given have a hidden file or folder, such as _temporary."""
    return any(part.startswith((".", "_")) and "=" not in part for part in parts if part not in given)


def _name_below(path: Path, given: Path) -> str:
    parts, shared = path.absolute().parts, given.absolute().parts
    begin = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(parts[:-1], shared, strict=False)))
    while "=" in parts[begin - 1]:
        begin -= 1
    return "/".join(parts[begin:])


def partition_values(path: Path) -> dict[str, str | None]:
    """Return the columns that the folders of a path add to its file, such as `day` of `day=1/log.csv`, by name."""
    pairs = (folder.partition("=") for folder in path.parent.parts)
    return {unquote(name): None if value == _HIVE_NULL else unquote(value) for name, is_pair, value in pairs if is_pair}
