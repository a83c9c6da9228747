"""Download the archive of a public dataset, verify it, and unpack the files that are needed."""

import contextlib
import hashlib
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, cast

from evenrank.core.errors import DataError
from evenrank.core.files import locked, opener_of_own_files
from evenrank.datasets.schema import SourceFile, sha256_of
from evenrank.preprocess.read.catalog import PublicArchive


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
    with contextlib.ExitStack() as stack:
        if not raw_dir.exists():
            stack.callback(_remove_empty, raw_dir)
        try:
            raw_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"{raw_dir} cannot be used for raw files: {error.strerror}; choose another folder"
            ) from error
        # Some network file systems have no locks; there, concurrent downloads are not protected.
        with contextlib.suppress(OSError):
            stack.enter_context(locked(raw_dir / f".{dataset.archive}.lock"))
        if not is_complete():  # another process may have fetched the files while this one waited for the lock
            archive = raw_dir / dataset.archive
            if not archive.is_file():
                _download(dataset, archive, show_progress=show_progress)
            elif (md5 := _md5_of(archive)) != (dataset.md5 or md5):
                raise DataError(f"{archive} has MD5 {md5}, expected {dataset.md5}; delete it to download it again")
            _unpack(dataset, archive, folder)
    return folder


def source_files(names: Iterable[tuple[Path, str]]) -> tuple[SourceFile, ...]:
    """Describe raw files for the manifest, with these names."""
    return tuple(SourceFile(path=name, bytes=path.stat().st_size, sha256=sha256_of(path)) for path, name in names)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _download(dataset: PublicArchive, archive: Path, *, show_progress: bool) -> None:
    """Append the bytes that the partial file lacks, or write all of them if the server does not support ranges."""
    import pooch  # takes 0.2 s, which a job that finds its files need not wait
    import requests

    partial_archive = archive.with_name(f"{archive.name}.partial")
    try:
        with open(partial_archive, "ab", opener=opener_of_own_files) as file:
            # Ranges count the bytes of the encoded body, so the server must send the file unencoded.
            headers = {"Accept-Encoding": "identity", "Range": f"bytes={file.tell()}-"}

            def start_over(response: requests.Response, **_: object) -> None:
                if response.status_code == requests.codes.ok:  # all bytes follow, not those of the range
                    file.truncate(0)

            receive = pooch.HTTPDownloader(
                progressbar=show_progress,
                chunk_size=1 << 16,
                timeout=60,
                headers=headers,
                hooks={"response": start_over},
            )
            try:
                receive(dataset.url, file, None)
            except requests.HTTPError as error:  # no bytes are left to send; the MD5 decides whether they are right
                if not (file.tell() and error.response.status_code == requests.codes.requested_range_not_satisfiable):
                    raise
        if dataset.md5 in (None, _md5_of(partial_archive)):
            partial_archive.replace(archive)
            return
        partial_archive.unlink()  # resuming would never succeed
        reason = "the MD5 of the received file differs from the catalog's"
    except requests.HTTPError as error:
        reason = f"the server returned status {error.response.status_code}"
    except requests.exceptions.ChunkedEncodingError:
        reason = "the connection was interrupted, and the next attempt resumes from there"
    except requests.ConnectionError:
        reason = "the server cannot be reached"
    except requests.Timeout:
        reason = "the server timed out"
    except OSError as error:
        reason = error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            if not partial_archive.stat().st_size:
                partial_archive.unlink()
    raise DataError(
        f"{dataset.url} could not be downloaded: {reason}; check the network, or put {dataset.archive}, or a folder "
        f"{dataset.folder} with {' and '.join(dataset.files)}, into {archive.parent}"
    )


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
    members: list[tuple[str, bool, bool, Callable[[], IO[bytes] | None]]]  # name, is file, is file or folder, open
    with contextlib.ExitStack() as stack:
        if archive.suffix == ".zip":
            zipped = stack.enter_context(zipfile.ZipFile(archive))
            members = [
                (
                    info.filename,
                    not info.is_dir(),
                    not stat.S_ISLNK(info.external_attr >> 16),
                    partial(zipped.open, info),
                )
                for info in zipped.infolist()
            ]
        else:
            tar = stack.enter_context(tarfile.open(archive, "r:gz"))
            members = [
                (info.name, info.isreg(), info.isreg() or info.isdir(), partial(tar.extractfile, info)) for info in tar
            ]
        for name, _, is_plain, _ in members:
            path = PureWindowsPath(name)  # recognizes both separators, and drives
            is_outside = bool(path.anchor) or ".." in path.parts
            if is_outside or not is_plain:
                what = "a path outside its folder" if is_outside else "a link or a device"
                raise DataError(f"{archive} contains {name!r}, {what}; nothing was unpacked, do not trust it")
        # `./a/b` is `a/b`. None is opened for members that are no files.
        yield {
            PurePosixPath(name).as_posix(): cast("Callable[[], IO[bytes]]", opener)
            for name, is_file, _, opener in members
            if is_file
        }
