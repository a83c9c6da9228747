"""Files at URLs -> copies on this host, for as long as a dataset is made of them."""

import contextlib
import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from evenrank.core.errors import DataError, EvenrankError, escape_controls
from evenrank.core.files import check_space, replacing
from evenrank.core.listing import num_literal
from evenrank.core.storage import CONNECTIONS, Remote, locate
from evenrank.datasets.schema import MANIFEST_NAME, latest_version

if TYPE_CHECKING:
    from pyarrow import fs


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
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            are_copied = pool.map(lambda file: self._is_copied(*file), files)
            missing = [file for file, is_copied in zip(files, are_copied, strict=True) if not is_copied]
            if not missing:
                return
            (first, _), num_bytes = missing[0], sum(info.size for _, info in missing)
            self.folder.mkdir(exist_ok=True)
            check_space(self.folder, num_bytes, f"{first} and the files beside it")
            for number, remote in enumerate(pool.map(self._download, *zip(*missing, strict=True)), 1):
                self.on_stage(f"fetching {remote}, file {number} of {len(missing)}")

    def _is_copied(self, remote: Remote, info: "fs.FileInfo") -> bool:
        """Return whether there is a copy of this version, perhaps of a run that was killed."""
        copy = self._copy(remote)
        return copy.is_file() and copy.stat().st_mtime_ns == _time_of_copy(info, remote.etag())

    def _download(self, remote: Remote, info: "fs.FileInfo") -> Remote:
        path, etag = self._copy(remote), remote.etag()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as new:
                with new.open("xb") as file:
                    for chunk in remote.chunks():
                        file.write(chunk)
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
