"""Fetch a public dataset's archive, verify it, and take the needed files out of it."""

import contextlib
import hashlib
import shutil
import zipfile
from pathlib import Path

import pooch
import requests

from evenrank.datasets.errors import DataError
from evenrank.preprocess.catalog import PublicDataset


def ensure_raw_files(dataset: PublicDataset, raw_dir: Path, *, show_progress: bool = False) -> Path:
    """Return the folder `raw_dir/NAME` with all the files that are read of a dataset.

    Files that are there are used as they are. Where one is missing, all are unpacked from `raw_dir/NAME.zip`, which is
    downloaded first if it is not there either. Whatever the archive holds besides stays in it.

    Raises:
        DataError: the download fails, the archive's MD5 is wrong, or it lacks a file; nothing half-written stays.

    """
    folder = raw_dir / dataset.name
    if all((folder / name).is_file() for name in dataset.files):
        return folder
    archive = raw_dir / dataset.archive
    if not archive.is_file():
        _download(dataset, archive, show_progress=show_progress)
    if (found := md5_of(archive)) != dataset.md5:
        raise DataError(f"{archive} has MD5 {found} where {dataset.md5} is expected; delete it to download it again")
    _unpack(dataset, archive, folder)
    return folder


def md5_of(path: Path) -> str:
    """Return the MD5 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _download(dataset: PublicDataset, archive: Path, *, show_progress: bool) -> None:
    pooch.get_logger().setLevel("ERROR")  # the command line says what is going on
    made = not archive.parent.exists()
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        pooch.retrieve(
            dataset.url,
            known_hash=f"md5:{dataset.md5}",
            fname=archive.name,
            path=archive.parent,
            downloader=pooch.HTTPDownloader(progressbar=show_progress, timeout=60),
        )
    except (OSError, ValueError) as error:
        if made:
            with contextlib.suppress(OSError):
                archive.parent.rmdir()
        raise DataError(
            f"{dataset.url} could not be downloaded: {_reason(error)}; check the network, or put {dataset.archive}, or "
            f"a folder {dataset.name} with {' and '.join(dataset.files)}, into {archive.parent}"
        ) from error


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, requests.HTTPError):
        return f"the server answers with status {error.response.status_code}"
    if isinstance(error, requests.ConnectionError):
        return "the server cannot be reached"
    if isinstance(error, requests.Timeout):
        return "the server does not answer in time"
    if isinstance(error, ValueError):  # pooch has deleted the file by then
        return "what came has another MD5 than the catalog says"
    return error.strerror or str(error)


def _unpack(dataset: PublicDataset, archive: Path, folder: Path) -> None:
    made = not folder.exists()
    partials = {name: folder / f"{name}.partial" for name in dataset.files}
    try:
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(archive) as opened:
            # Only members that are asked for by name are read, and their place is chosen here: other paths, or links,
            # that an archive may hold do not matter.
            for name, partial in partials.items():
                with opened.open(f"{dataset.name}/{name}") as member, partial.open("wb") as file:
                    shutil.copyfileobj(member, file, 1 << 20)
        for name, partial in partials.items():
            partial.replace(folder / name)
    except KeyError as error:
        raise DataError(f"{archive} does not hold {dataset.name}/{name}; delete it to download it again") from error
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{archive} could not be unpacked into {folder}: {error}; is there room, is it whole?"
        ) from error
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
        if made:
            with contextlib.suppress(OSError):  # it stays unless it is empty
                folder.rmdir()
