"""Paths, patterns and folders -> data files; what their names say: format, compression, values of hive folders."""

import glob
from collections.abc import Sequence
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
    name = path.name.lower()
    if path.suffix.lower() in CODECS:
        name = Path(name).stem
    known = _FORMATS.get(Path(name).suffix)
    if known is None or (known == PARQUET and path.suffix.lower() in CODECS):
        *text, parquet = _FORMATS
        raise DataError(
            f"{path} has an unknown suffix; expected one of {', '.join(text)}, with or without {', '.join(CODECS)}, "
            f"or {parquet}"
        )
    return known


def find_files(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return the data files that paths of files and folders and patterns such as `logs/*.csv` stand for.

    The files of each path are sorted. Folders are searched at any depth; names that begin with `.` or `_` are left out.

    Raises:
        DataError: a path stands for no file, or for files of several formats.
        ConfigError: a file is found twice.
    """
    files: list[Path] = []
    for path in paths:
        found = _expand(path)
        if not found:
            raise DataError(f"{path} contains or matches no data file; check the path")
        if len(formats := sorted({file_format(file) for file in found})) > 1:
            raise DataError(f"{path} has files of several formats ({', '.join(formats)}); use a pattern such as *.csv")
        files += found
    if twice := [path for path in files if files.count(path) > 1] if len(set(files)) < len(files) else []:
        raise ConfigError(f"{twice[0]} is given twice; its events would count twice")
    return tuple(files)


def _expand(path: Path) -> list[Path]:
    """Return the files of a folder or pattern that are not empty and not hidden; any other path as it is."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if _has_data(file) and not _is_hidden(file.relative_to(path)))
    if path.exists() or not glob.has_magic(str(path)):
        return [path]  # also if it is missing: opening it says why
    found = {Path(name) for name in glob.iglob(str(path), recursive=True)}
    folders = {path for path in found if path.is_dir() and not _is_hidden(Path(path.name))}
    files = {path for path in found if _has_data(path) and not _is_hidden(Path(path.name))}
    return sorted(files.union(*map(_expand, folders)))


def _has_data(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) and "=" not in part for part in path.parts)


def partition_values(path: Path) -> dict[str, str | None]:
    """Return the columns that the folders of a path add to its file, such as `day` of `day=1/log.csv`, by name."""
    pairs = (folder.partition("=") for folder in path.parent.parts)
    return {unquote(name): None if value == _HIVE_NULL else unquote(value) for name, is_pair, value in pairs if is_pair}
