"""Paths, patterns, folders and URLs -> data files of this host, and what their names say: format, hive folders."""

import contextlib
import glob
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

import pyarrow as pa

from evenrank.core.errors import ConfigError, DataError, EvenrankError, escape_controls
from evenrank.core.files import check_regular, check_space, open_regular, replacing
from evenrank.core.listing import list_files, num_literal
from evenrank.core.storage import CONNECTIONS, Remote, locate
from evenrank.datasets.schema import MANIFEST_NAME, SourceFile, latest_version, sha256_of
from evenrank.preprocess.read.table import wrap_read_errors

if TYPE_CHECKING:
    from pyarrow import fs


TEXT, JSON, PARQUET = "delimited text", "JSON lines", "Parquet"
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}  # as PyArrow calls them
_FORMATS = {
    **dict.fromkeys((".csv", ".tsv", ".txt", ".dat"), TEXT),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), JSON),
    ".parquet": PARQUET,
}
# How files of each suffix begin, and no text does.
_BEGINS = re.compile(
    rb"(?P<gz>\x1f\x8b)|(?P<zst>\x28\xb5\x2f\xfd)|(?P<bz2>BZh[1-9](?:1AY&SY|\x17rE8P\x90))|(?P<parquet>PAR[1E][\0-\x1f])|"
    rb"(?P<zip>PK\x03\x04|\xd0\xcf\x11\xe0)"  # or, in old files of Excel, the latter
)
_HELD = {**CODECS, ".parquet": PARQUET}
_MAX_EMPTY = 1 << 10  # bytes of a compressed file that may hold none: its header may have a name
_HASHED = 4  # files at a time, which is as fast as 16 cores read them
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def format_of(path: Path) -> str:
    """Return TEXT, JSON or PARQUET by the name of a file, or raise a DataError."""
    name, is_compressed = path.name.lower(), path.suffix.lower() in CODECS
    known = _FORMATS.get(Path(Path(name).stem if is_compressed else name).suffix)
    if known is None or (known == PARQUET and is_compressed):
        *text, parquet = _FORMATS
        expected = f"{', '.join(text)}, also with {', '.join(CODECS)}, or {parquet}"
        remedy = "rename, unpack or convert it, or choose files by a pattern such as *.csv"
        raise DataError(f"{path} has an unknown suffix; expected one of {expected}; {remedy}")
    return known


def checked_format(path: Path) -> str:
    """Return the format of a file by its name, or raise a DataError if its first bytes are of another one."""
    with open_regular(path) as file:
        if not (first := file.read(16)):
            raise DataError(f"{path} is empty; create it again")
    known, suffix, begin = format_of(path), path.suffix.lower(), _BEGINS.match(first)
    found = "" if begin is None else f".{begin.lastgroup}"
    expected = suffix if suffix in CODECS or known == PARQUET else ""
    if found and found != expected:
        remedy = f"rename it so that it ends in {found}" if found in _HELD else "unpack it, or export it as CSV"
        raise DataError(f"{path} holds {_HELD.get(found, 'ZIP or Excel')} data, unlike its name; {remedy}")
    if not found and expected not in ("", ".zst"):  # zstd may begin with a frame to skip
        raise DataError(f"{path} holds no {_HELD[expected]} data, unlike its name; rename it, or create it again")
    return known


class DataFile(NamedTuple):
    """What its place says of a file."""

    source: str  # for the manifest: the path below the one that was given, with hive folders above that
    folders: dict[str, str | None]  # columns that folders below the path add, or from the first part that is a pattern


def find_files(paths: Sequence[Path]) -> dict[Path, DataFile]:
    """Return the data files that paths of files and folders, and patterns such as `logs/*.csv`, stand for.

    The files of each path are sorted. Of folders at any depth and of patterns, empty files and names that begin with
    `.` or `_` are left out.
    """
    files, places = dict[Path, DataFile](), Counter[str]()
    for path in paths:
        base, found = _expand(path)
        if not found:
            rule = "neither empty files nor names that begin with . or _ count"
            raise DataError(f"{path} leads to no data file ({rule}); check it")
        formats = {format_of(base / name): name for name in reversed(found)}
        if len(formats) > 1:
            shown = " and ".join(f"{name} is {known}" for known, name in formats.items())
            raise DataError(f"{path} has files of several formats: {shown}; use a pattern such as *.csv")
        hive = [*takewhile(lambda part: "=" in part, reversed(base.absolute().parts))][::-1]
        files |= {base / name: DataFile("/".join([*hive, name]), partition_values(name)) for name in found}
        places.update(found.values())
    for real, count in places.items():
        if count > 1:
            given = ", ".join(map(str, paths))
            raise ConfigError(f"{real} is in {given} twice, and its events would count twice; give each file once")
    return files


def _expand(path: Path) -> tuple[Path, dict[str, str]]:
    """Return a folder and the files in it that a path stands for: paths without links by relative paths."""
    end = len(path.parts) if os.path.lexists(path) else num_literal(path.parts)
    base, pattern = Path(*path.parts[:end]), path.parts[end:]
    if pattern or os.path.isdir(base):
        with wrap_read_errors(path):
            return base, {name: real for name, real in list_files(base, pattern).items() if not _is_empty(base / name)}
    if "," in str(path) and not os.path.lexists(path):
        raise DataError(f"there is no file {path}; give several files one by one, by --events each")
    check_regular(base)
    return base.parent, {base.name: os.path.realpath(base)}


def _is_empty(path: Path) -> bool:
    """Return whether a file holds nothing, perhaps compressed, as Spark writes for a partition without rows."""
    size, codec = path.stat().st_size, CODECS.get(path.suffix.lower())
    if codec is None or not 0 < size < _MAX_EMPTY:
        return size == 0
    try:
        with pa.input_stream(str(path), compression=codec) as stream:
            return not stream.read(1)
    except OSError:  # it is damaged, which is for its reader to say
        return False


def partition_values(name: str) -> dict[str, str | None]:
    """Return the columns that the folders of a path add to its file, such as `day` of `day=1/log.csv`, by name."""
    pairs = (folder.partition("=") for folder in name.split("/")[:-1])
    return {unquote(name): None if value == _HIVE_NULL else unquote(value) for name, is_pair, value in pairs if is_pair}


def source_files(names: Iterable[tuple[Path, str]]) -> tuple[SourceFile, ...]:
    """Describe raw files for the manifest, with these names."""
    with ThreadPoolExecutor(_HASHED) as pool:
        return tuple(pool.map(_source_file, names))


def _source_file(named: tuple[Path, str]) -> SourceFile:
    path, name = named
    return SourceFile(path=name, bytes=path.stat().st_size, sha256=sha256_of(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Copies of files, below a folder by their URLs: `FOLDER/s3:/bucket/log/day=1/log.csv`."""

    folder: Path
    on_stage: Callable[[str], None]
    fetched: list[Remote] = field(default_factory=list)  # files of logs and features
    listed: set[Path] = field(default_factory=set)  # copies of all files that were found

    def path_of(self, place: Path) -> Path:
        """Return the path of a copy of what a path, pattern or URL stands for; one of this host is returned as it is.

        A folder or pattern is to be expanded again, after `remove_others`, into the files that it stands for now.
        """
        remote = locate(place)
        if isinstance(remote, Path):
            return remote
        info, base = remote.info(), remote
        if info.is_file:
            files = [(remote, info)]
        else:
            keys = remote.path.split("/") if info.type.name == "NotFound" else []
            pattern = keys[num_literal(keys) :]
            tail = "".join(f"/{key}" for key in pattern)
            base = replace(remote, path=remote.path.removesuffix(tail), url=remote.url.removesuffix(tail))
            files = [(base / name, info) for name, info in base.files_below(pattern).items()]
        self._fetch(files)
        self.fetched.extend(file for file, _ in files)
        return self._copy(remote, escape=base != remote)

    def dataset_of(self, dataset: Path | str, *, needs_rows: bool = True) -> Path:
        """Return a folder with the manifest and the vocabularies of a dataset, and its rows if they are needed."""
        _, folder = latest_version(locate(dataset))
        if isinstance(folder, Path):
            return folder
        files = folder.files_below()
        names = [name for name in files if needs_rows or name.startswith("vocabulary_") or name == MANIFEST_NAME]
        self._fetch([(folder / name, files[name]) for name in names])
        return self._copy(folder)

    def _copy(self, remote: Remote, *, escape: bool = False) -> Path:
        folder, name = str(self.folder), remote.url.replace("://", ":/")
        if {"..", "."} & set(name.split("/")):
            raise DataError(f"{remote} has a part that is no name of a file; rename it")
        return Path(glob.escape(folder) if escape else folder, name)

    def remove_others(self) -> None:
        """Remove what a killed run has fetched and this one did not find."""
        for path in self.folder.rglob("*"):
            if path not in self.listed and path.is_file():
                path.unlink()

    def _fetch(self, files: Sequence[tuple[Remote, "fs.FileInfo"]]) -> None:
        self.listed.update(self._copy(remote) for remote, _ in files)
        if files:
            self.folder.mkdir(exist_ok=True)
            num_bytes = sum(info.size for _, info in files)
            check_space(self.folder, num_bytes, f"{files[0][0]} and the files beside it")
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for number, remote in enumerate(pool.map(self._download, *zip(*files, strict=True)), 1):
                self.on_stage(f"fetching {remote}, file {number} of {len(files)}")

    def _download(self, remote: Remote, info: "fs.FileInfo") -> Remote:
        path, etag = self._copy(remote), remote.etag()
        if path.is_file() and path.stat().st_mtime_ns == _time_of_copy(info, etag):  # of a run that was killed, perhaps
            return remote
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as new:
                with new.open("xb") as file:
                    file.writelines(remote.chunks())
                if new.stat().st_size != info.size or remote.etag() != etag:
                    raise DataError(f"{remote} was replaced while it was fetched; run it again")
                os.utime(new, ns=(_time_of_copy(info, etag),) * 2)
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{remote} cannot be copied to {self.folder}: {reason}; check name and space") from error
        return remote

    def original(self, text: str) -> str:
        """Return a message about copies as one about the URLs."""
        return escape_controls(text).replace(f"{self.folder}{os.sep}", "")


@contextlib.contextmanager
def copies_in(folder: Path, on_stage: Callable[[str], None]) -> Iterator[Copies]:
    """Yield copies in a folder; errors and descriptions of the progress name the URLs."""
    copies = Copies(folder=folder, on_stage=lambda stage: on_stage(copies.original(stage)))
    try:
        yield copies
    except EvenrankError as error:
        raise type(error)(copies.original(str(error))) from error.__cause__


def _time_of_copy(info: "fs.FileInfo", etag: str) -> int:
    """Return the time of change of a copy in nanoseconds, by which it is told from copies of other versions."""
    version = f"{info.size} {etag or (info.mtime_ns or 0) // 1_000_000_000}"  # requests for a file have whole seconds
    return int.from_bytes(hashlib.sha256(version.encode()).digest()[:6]) * 1000  # in file systems' range and precision
