"""Paths, patterns and folders -> data files; what their names say: format, compression, values of hive folders."""

import os
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.files import check_regular
from evenrank.core.listing import list_files, num_literal
from evenrank.preprocess.files.table import wrap_read_errors

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


class DataFile(NamedTuple):
    """What its place says of a file."""

    source: str  # for the manifest: the path below the one that was given, with hive folders above that
    folders: dict[str, str | None]  # columns that folders below the path add, or from the first part that is a pattern
    real: str  # path without links


def find_files(paths: Sequence[Path]) -> dict[Path, DataFile]:
    """Return the data files that paths of files and folders, and patterns such as `logs/*.csv`, stand for.

    The files of each path are sorted. Of folders at any depth and of patterns, empty files and names that begin with
    `.` or `_` are left out.
    """
    files: list[tuple[Path, DataFile]] = []
    for path in paths:
        found = _expand(path)
        if not found:
            raise DataError(f"{path} leads to no data file; check it")
        if len({file_format(file) for file in found}) > 1:
            raise DataError(f"{path} has files of several formats; use a pattern such as *.csv")
        files += found.items()
    for real, count in Counter(file.real for _, file in files).items():
        if count > 1:
            given = ", ".join(map(str, paths))
            raise ConfigError(f"{real} is in {given} twice, and its events would count twice; give each file once")
    return dict(files)


def _expand(path: Path) -> dict[Path, DataFile]:
    end = len(path.parts) if os.path.lexists(path) else num_literal(path.parts)
    base, pattern = Path(*path.parts[:end]), path.parts[end:]
    if not pattern and not os.path.isdir(base):
        check_regular(base)
        base, found = base.parent, {base.name: os.path.realpath(base)}
    else:
        with wrap_read_errors(path):
            found = {name: real for name, real in list_files(base, pattern).items() if (base / name).stat().st_size}
    hive = [*takewhile(lambda part: "=" in part, reversed(base.absolute().parts))][::-1]
    sources = {name: "/".join([*hive, name]) for name in found}
    return {base / name: DataFile(sources[name], partition_values(name), real) for name, real in found.items()}


def partition_values(name: str) -> dict[str, str | None]:
    """Return the columns that the folders of a path add to its file, such as `day` of `day=1/log.csv`, by name."""
    pairs = (folder.partition("=") for folder in name.split("/")[:-1])
    return {unquote(name): None if value == _HIVE_NULL else unquote(value) for name, is_pair, value in pairs if is_pair}
