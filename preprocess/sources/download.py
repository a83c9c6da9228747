"""Download the archive of a public dataset, verify it, and unpack the files that are needed."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, cast

from tqdm import tqdm  # type: ignore[import-untyped]

from evenrank.core.errors import DataError
from evenrank.core.files import opener_of_own_files
from evenrank.datasets.schema import SourceFile, sha256_of
from evenrank.preprocess.sources.catalog import PublicArchive

_CHUNK_BYTES = 1 << 16


def ensure_raw_files(dataset: PublicArchive, raw_dir: Path, *, show_progress: bool = False) -> Path:
    """Return the folder `raw_dir/FOLDER` with all needed files of a dataset, downloading or unpacking them if needed.

    Existing files are used as they are. If one is missing, all of them are unpacked from the archive in `raw_dir`,
    which is downloaded first if it is missing too. An interrupted download leaves `raw_dir/ARCHIVE.partial`; the next
    call resumes it if the server supports that.

    Raises:
        DataError: the download fails; or the archive has another MD5, lacks a file, or has members that do not belong
            in an archive of data (links, paths outside its folder). No partially unpacked file is left behind.
    """
    folder = raw_dir / dataset.folder

    def is_complete() -> bool:
        return all((folder / name).is_file() for name in dataset.files)

    if is_complete():
        return folder
    with _locked_folder(raw_dir):
        if not is_complete():  # another process may have fetched the files while this one waited for the lock
            archive = raw_dir / dataset.archive
            if not archive.is_file():
                _download(dataset, archive, show_progress=show_progress)
            elif (md5 := md5_of(archive)) != (dataset.md5 or md5):
                raise DataError(f"{archive} has MD5 {md5}, expected {dataset.md5}; delete it to download it again")
            _unpack(dataset, archive, folder)
    return folder


def source_files(names: Iterable[tuple[Path, str]]) -> tuple[SourceFile, ...]:
    """Describe raw files for the manifest, with these names."""
    return tuple(SourceFile(path=name, bytes=path.stat().st_size, sha256=sha256_of(path)) for path, name in names)


def md5_of(path: Path) -> str:
    """Return the MD5 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


@contextlib.contextmanager
def _locked_folder(raw_dir: Path) -> Iterator[None]:
    """Create the folder and lock it against other downloads; remove it afterwards if it was created and is empty."""
    is_new = not raw_dir.exists()
    try:
        raw_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(raw_dir, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"{raw_dir} cannot be used for raw files: {error.strerror}; choose another folder") from error
    try:
        # Some network file systems cannot lock folders; there, concurrent downloads are not protected.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                raw_dir.rmdir()
        os.close(descriptor)


def _download(dataset: PublicArchive, archive: Path, *, show_progress: bool) -> None:
    partial_archive = archive.with_name(f"{archive.name}.partial")
    try:
        _receive(dataset.url, partial_archive, show_progress=show_progress)
        if dataset.md5 in (None, md5_of(partial_archive)):
            partial_archive.replace(archive)
            return
        partial_archive.unlink()  # resuming would never succeed
        reason = "the MD5 of the received file differs from the catalog's"
    except OSError as error:
        reason = _reason(error)
    raise DataError(
        f"{dataset.url} could not be downloaded: {reason}; check the network, or put {dataset.archive}, or a folder "
        f"{dataset.folder} with {' and '.join(dataset.files)}, into {archive.parent}"
    )


def _receive(url: str, path: Path, *, show_progress: bool) -> None:
    """Append the bytes that a file lacks, or write all of them if the server does not support ranges."""
    import requests  # takes 40 ms, which a job that finds its files need not wait

    num_received = path.stat().st_size if path.exists() else 0
    # Ranges count the bytes of the encoded body, so the server must send the file unencoded.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={num_received}-"} if num_received else {})
    with requests.get(url, headers=headers, stream=True, timeout=60) as response:
        # "Range not satisfiable" means that no bytes are left to send. The MD5 decides whether they are the right ones.
        if num_received and response.status_code == requests.codes.requested_range_not_satisfiable:
            return
        response.raise_for_status()
        if response.status_code != requests.codes.partial_content:
            num_received = 0
        content_length = response.headers.get("Content-Length")
        total = None if content_length is None else num_received + int(content_length)
        with (
            open(path, "ab" if num_received else "wb", opener=opener_of_own_files) as file,
            tqdm(total=total, initial=num_received, unit="B", unit_scale=True, disable=not show_progress) as bar,
        ):
            for chunk in response.iter_content(_CHUNK_BYTES):
                file.write(chunk)
                bar.update(len(chunk))


def _reason(error: OSError) -> str:
    import requests

    if isinstance(error, requests.HTTPError):
        return f"the server returned status {error.response.status_code}"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection was interrupted, and the next attempt resumes from there"
    if isinstance(error, requests.ConnectionError):
        return "the server cannot be reached"
    if isinstance(error, requests.Timeout):
        return "the server timed out"
    return error.strerror or str(error)


def _unpack(dataset: PublicArchive, archive: Path, folder: Path) -> None:
    targets = {f"{dataset.folder}/{name}": folder / name for name in dataset.files}
    scratch = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed
        scratch.mkdir()  # which never follows a symbolic link
        with _open_members(archive) as members:
            if missing := [name for name in targets if name not in members]:
                raise DataError(f"{archive} does not contain {', '.join(missing)}; delete it to download it again")
            # Only the needed members are read, and their paths do not come from the archive. They are read in archive
            # order, because seeking backwards in a .tar.gz means decompressing it from the start.
            for name in filter(targets.__contains__, members):
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                with members[name]() as member, (scratch / name).open("xb") as file:
                    shutil.copyfileobj(member, file, 1 << 20)
        for name, path in targets.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).replace(path)
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        raise DataError(
            f"{archive} could not be unpacked into {folder}: {error}; check that the archive is complete and that the "
            f"disk has space"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _open_members(archive: Path) -> Iterator[dict[str, Callable[[], IO[bytes]]]]:
    """Check all members of an archive and return a function to open each of its files, by name, in archive order."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                _check_member(archive, info.filename, is_plain=not stat.S_ISLNK(info.external_attr >> 16))
            yield {_key(info.filename): partial(opened.open, info) for info in opened.infolist() if not info.is_dir()}
    else:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                _check_member(archive, member.name, is_plain=member.isreg() or member.isdir())
            # `extractfile` returns None only for members that are no regular files.
            extract = cast("Callable[[tarfile.TarInfo], IO[bytes]]", tar.extractfile)
            yield {_key(member.name): partial(extract, member) for member in tar if member.isreg()}


def _check_member(archive: Path, name: str, *, is_plain: bool) -> None:
    path = PureWindowsPath(name)  # recognizes both separators, and drives
    if path.anchor or ".." in path.parts:
        raise DataError(
            f"{archive} contains {name!r}, a path outside its folder; nothing was unpacked, do not trust it"
        )
    if not is_plain:
        raise DataError(f"{archive} contains {name!r}, a link or a device; nothing was unpacked, do not trust it")


def _key(name: str) -> str:
    return PurePosixPath(name).as_posix()  # `./a/b` is `a/b`
