"""Fetch a public dataset's archive, verify it, and take the needed files out of it."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

import pooch
import requests
from tqdm import tqdm  # type: ignore[import-untyped]

from evenrank.core.errors import DataError
from evenrank.datasets.schema import SourceFile, sha256_of
from evenrank.preprocess.sources.catalog import PublicArchive

_CHUNK_BYTES = 1 << 16


def ensure_raw_files(dataset: PublicArchive, raw_dir: Path, *, show_progress: bool = False) -> Path:
    """Return the folder `raw_dir/FOLDER` with all the files that are read of a dataset.

    Files that are there are used as they are. Where one is missing, all are unpacked from the archive in `raw_dir`,
    which is downloaded first if it is not there either. Whatever the archive holds besides stays in it.

    A download that breaks off leaves `raw_dir/ARCHIVE.partial`, and the next call goes on from there if the server can.

    Raises:
        DataError: the download fails, the archive's MD5 is wrong, it lacks a file, or has members that an archive of
            data has no use for (links, paths out of its folder); nothing half-unpacked stays.

    """
    folder = raw_dir / dataset.folder
    if _is_complete(dataset, folder):
        return folder
    with _alone_in(raw_dir):
        # Another run may have come first.
        if not _is_complete(dataset, folder):
            archive = raw_dir / dataset.archive
            if not archive.is_file():
                _download(dataset, archive, show_progress=show_progress)
            elif (found := md5_of(archive)) != dataset.md5:
                raise DataError(
                    f"{archive} has MD5 {found} where {dataset.md5} is expected; delete it to download it again"
                )
            _unpack(dataset, archive, folder)
    return folder


def source_files(raw_dir: Path, paths: Sequence[Path]) -> tuple[SourceFile, ...]:
    """Describe raw files for the manifest, by their paths below the raw folder."""
    return tuple(
        SourceFile(path=path.relative_to(raw_dir).as_posix(), bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in paths
    )


def md5_of(path: Path) -> str:
    """Return the MD5 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _is_complete(dataset: PublicArchive, folder: Path) -> bool:
    return all((folder / name).is_file() for name in dataset.files)


@contextlib.contextmanager
def _alone_in(raw_dir: Path) -> Iterator[None]:
    """Make the folder, and let other runs that would download into it wait; remove it if it stays empty."""
    made = not raw_dir.exists()
    try:
        raw_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(raw_dir, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"{raw_dir} cannot hold raw files: {error.strerror}; choose another folder") from error
    try:
        with contextlib.suppress(OSError):  # some network file systems lock no folders: then two runs must not meet
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if made:
            with contextlib.suppress(OSError):
                raw_dir.rmdir()
        os.close(descriptor)


def _download(dataset: PublicArchive, archive: Path, *, show_progress: bool) -> None:
    pooch.get_logger().setLevel("ERROR")  # the command line says what is going on
    partial_archive = archive.with_name(f"{archive.name}.partial")
    try:
        pooch.retrieve(
            dataset.url,
            known_hash=f"md5:{dataset.md5}",
            fname=archive.name,
            path=archive.parent,
            downloader=_ResumingDownloader(partial=partial_archive, show_progress=show_progress),
        )
        partial_archive.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError):  # a wrong MD5: there is nothing to go on from
            partial_archive.unlink(missing_ok=True)
        raise DataError(
            f"{dataset.url} could not be downloaded: {_reason(error)}; check the network, or put {dataset.archive}, or "
            f"a folder {dataset.folder} with {' and '.join(dataset.files)}, into {archive.parent}"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _ResumingDownloader:
    """A downloader for pooch that goes on where an earlier download stopped."""

    partial: Path  # what has come so far; pooch deletes its own file whenever something fails
    show_progress: bool

    def __call__(self, url: str, output_file: str, _: object) -> None:
        have = self.partial.stat().st_size if self.partial.exists() else 0
        # Ranges count the bytes of what is sent, so it has to be the file as it is.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(url, headers=headers, stream=True, timeout=60) as response:
            # Nothing lies behind the last byte: all was there already. If it was not the right file, its MD5 tells.
            if not (have and response.status_code == requests.codes.requested_range_not_satisfiable):
                self._write(response, have)
        # A second name, so that all that came is still there if pooch is stopped while it computes the MD5.
        Path(output_file).unlink()
        try:
            os.link(self.partial, output_file)
        except OSError:  # the file system gives no file two names
            self.partial.replace(output_file)

    def _write(self, response: requests.Response, have: int) -> None:
        response.raise_for_status()
        if response.status_code != requests.codes.partial_content:
            have = 0  # the server sends all of it whatever it is asked for
        coming = response.headers.get("Content-Length")
        total = None if coming is None else have + int(coming)
        with (
            self.partial.open("ab" if have else "wb") as file,
            tqdm(total=total, initial=have, unit="B", unit_scale=True, disable=not self.show_progress) as bar,
        ):
            for chunk in response.iter_content(_CHUNK_BYTES):
                file.write(chunk)
                bar.update(len(chunk))


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, requests.HTTPError):
        return f"the server answers with status {error.response.status_code}"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off, and the next attempt goes on from there"
    if isinstance(error, requests.ConnectionError):
        return "the server cannot be reached"
    if isinstance(error, requests.Timeout):
        return "the server does not answer in time"
    if not isinstance(error, OSError):  # what pooch raises for that is a bare ValueError
        return "what came has another MD5 than the catalog says"
    return error.strerror or str(error)


def _unpack(dataset: PublicArchive, archive: Path, folder: Path) -> None:
    places = {f"{dataset.folder}/{name}": folder / name for name in dataset.files}
    partials = {name: path.with_name(f"{path.name}.partial") for name, path in places.items()}
    made = [each for each in dict.fromkeys((folder, *(path.parent for path in places.values()))) if not each.exists()]
    try:
        with _open_members(archive) as members:
            if missing := [name for name in places if name not in members]:
                raise DataError(f"{archive} does not hold {', '.join(missing)}; delete it to download it again")
            for each in made:
                each.mkdir()
            # Only members that are asked for by name are read, and their place is chosen here. They are read in the
            # archive's order, because going back in a .tar.gz means unpacking it from the start.
            for name in filter(places.__contains__, members):
                with members[name]() as member, partials[name].open("wb") as file:
                    shutil.copyfileobj(member, file, 1 << 20)
        for name, path in places.items():
            partials[name].replace(path)
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        raise DataError(
            f"{archive} could not be unpacked into {folder}: {error}; is there room, is it whole?"
        ) from error
    finally:
        for path in partials.values():
            with contextlib.suppress(OSError):  # what stands in for a folder may be a file
                path.unlink()
        for each in reversed(made):
            with contextlib.suppress(OSError):  # it stays unless it is empty
                each.rmdir()


@contextlib.contextmanager
def _open_members(archive: Path) -> Iterator[dict[str, Callable[[], IO[bytes]]]]:
    """Give the way to open each file of an archive, by name and in the archive's order, once all members are checked.

    Raises:
        DataError: a member is a link or a device, or its path leads out of the folder.

    """
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                _check_member(archive, info.filename, is_plain=not stat.S_ISLNK(info.external_attr >> 16))
            yield {_key(info.filename): partial(opened.open, info) for info in opened.infolist() if not info.is_dir()}
    else:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                _check_member(archive, member.name, is_plain=member.isreg() or member.isdir())
            yield {_key(member.name): partial(_extract, tar, member) for member in tar if member.isreg()}


def _check_member(archive: Path, name: str, *, is_plain: bool) -> None:
    path = PureWindowsPath(name)  # it knows both separators, and drives
    if path.anchor or ".." in path.parts:
        raise DataError(f"{archive} holds {name!r}, a path out of its folder; unpacked nothing, do not trust it")
    if not is_plain:
        raise DataError(f"{archive} holds {name!r}, which is a link or a device; unpacked nothing, do not trust it")


def _key(name: str) -> str:
    return PurePosixPath(name).as_posix()  # `./a/b` is `a/b`


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(member)
    assert file is not None  # as for every regular file
    return file
