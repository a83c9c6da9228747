"""Files at URLs -> copies on this host, for as long as a dataset is made of them."""

import contextlib
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from evenrank.core.errors import DataError, EvenrankError, escape_controls
from evenrank.core.files import check_space, replacing
from evenrank.core.storage import CONNECTIONS, Remote, locate
from evenrank.datasets.remote import latest_version
from evenrank.datasets.schema import MANIFEST_NAME
from evenrank.preprocess.files.locate import is_hidden

if TYPE_CHECKING:
    from pyarrow import fs


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Copies of files, below a folder by their URLs: `FOLDER/s3:/bucket/log/day=1/log.csv`."""

    folder: Path
    on_stage: Callable[[str], None]
    fetched: list[Remote] = field(default_factory=list)  # files of logs and features

    def path_of(self, place: Path) -> Path:
        """Return the path of a copy of what a path, pattern or URL stands for; one of this host is returned as it is.

        The files that a folder or pattern stands for are fetched, and perhaps others, so it is to be expanded again.
        """
        remote = locate(place)
        if isinstance(remote, Path):
            return remote
        info, base = remote.info(), remote
        if info.is_file:
            files = [(remote, info)]
        else:
            keys = remote.path.split("/") if info.type.name == "NotFound" else []
            pattern = keys[next((index for index, key in enumerate(keys) if glob.has_magic(key)), len(keys)) :]
            tail = "".join(f"/{key}" for key in pattern)
            base = replace(remote, path=remote.path.removesuffix(tail), url=remote.url.removesuffix(tail))
            files = [
                (base / name, info)
                for name, info in base.files_below().items()
                if _matches(parts := name.split("/"), pattern) and not is_hidden(parts, pattern)
            ]
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

    def _fetch(self, files: Sequence[tuple[Remote, "fs.FileInfo"]]) -> None:
        missing = [(remote, info) for remote, info in files if not self._is_copied(remote, info)]
        if not missing:
            return
        (first, _), num_bytes = missing[0], sum(info.size for _, info in missing)
        self.folder.mkdir(exist_ok=True)
        check_space(self.folder, num_bytes, f"{first} and the files beside it")
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for number, remote in enumerate(pool.map(self._download, *zip(*missing, strict=True)), 1):
                self.on_stage(f"fetching {remote}, file {number} of {len(missing)}")

    def _is_copied(self, remote: Remote, info: "fs.FileInfo") -> bool:
        """Return whether there is a copy, perhaps of a run that was killed."""
        copy = self._copy(remote)
        return copy.exists() and (copy.stat().st_size, int(copy.stat().st_mtime)) == (info.size, _seconds(info))

    def _download(self, remote: Remote, info: "fs.FileInfo") -> Remote:
        path = self._copy(remote)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as new:
                with new.open("xb") as file:
                    for chunk in remote.chunks():
                        file.write(chunk)
                os.utime(new, (_seconds(info),) * 2)
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{remote} cannot be copied to {path}: {reason}; check its name, and the space") from error
        return remote

    def show_stage(self, stage: str) -> None:
        """Pass on a description of the progress."""
        self.on_stage(self.original(stage))

    def original(self, text: str) -> str:
        """Return a message about copies as one about the URLs."""
        return escape_controls(text).replace(f"{self.folder}{os.sep}", "")


@contextlib.contextmanager
def copies_in(folder: Path, on_stage: Callable[[str], None]) -> Iterator[Copies]:
    """Yield copies in a folder; errors name the URLs."""
    copies = Copies(folder=folder, on_stage=on_stage)
    try:
        yield copies
    except EvenrankError as error:
        if not copies.fetched:
            raise
        raise type(error)(copies.original(str(error))) from error.__cause__


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a pattern matches a path or a folder above it."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(parts[begin:], pattern[1:]) for begin in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _seconds(info: "fs.FileInfo") -> int:
    """Return the time of the last change; listings have fractions of seconds that requests for a file lack."""
    return (info.mtime_ns or 0) // 1_000_000_000
