"""The public datasets: records of what their logs look like, and their archives downloaded, verified and unpacked.

Imports nothing heavy, so that a command line can list the names without loading Polars.
"""

import contextlib
import hashlib
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

from evenrank.core.errors import DataError
from evenrank.core.files import locked, opener_of_own_files
from evenrank.preprocess.log_config import DENSE, KEEP, TabularConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicArchive:
    """An archive that can be downloaded and unpacked, or a folder of files that the user downloads."""

    url: str
    md5: str | None  # of the archive, in hexadecimal; None if its host changes it from time to time
    log: TabularConfig  # whose files are paths relative to `folder`
    computed: Mapping[str, Any] = field(default_factory=dict)  # further options of the log, whose check loads NumPy
    ids: str = DENSE  # the default rule
    counts_from_start: bool = False  # whether times count from the start of the log, not from 1970

    @property
    def can_be_downloaded(self) -> bool:
        """Whether there is an archive."""
        return self.archive != self.folder

    @property
    def archive(self) -> str:
        """File name of the archive."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def folder(self) -> str:
        """Folder of the files, both inside the archive and below the raw folder."""
        return self.archive.removesuffix(".zip").removesuffix(".tar.gz")

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are needed: those of events, then those of features."""
        return tuple(map(str, filter(None, (*self.log.events, self.log.context, *self.log.item_features))))

    def log_in(self, folder: Path) -> TabularConfig:
        """Return the log with the files in a folder."""
        context = None if self.log.context is None else folder / self.log.context
        events, items = ([folder / path for path in paths] for paths in (self.log.events, self.log.item_features))
        return replace(
            self.log, events=tuple(events), context=context, item_features=tuple(items), **dict(self.computed)
        )


_RATINGS = TabularConfig(
    events=(Path("ratings.csv"),),
    user_column="userId",
    item_column="movieId",
    timestamp_column="timestamp",
    timestamp_unit="s",
    action_columns=("rating",),
    action_map="half-stars",
)
_RATINGS_1M = replace(
    _RATINGS,
    events=(Path("ratings.dat"),),
    action_map="stars",
    delimiter="::",
    columns=("userId", "movieId", "rating", "timestamp"),
    context=Path("users.dat"),
    context_header=("userId", "sex", "age_group", "occupation", "zip_code"),
    context_columns=("sex", "age_group", "occupation", "zip_code"),
)


def _movielens(size: str, *, md5: str | None, log: TabularConfig = _RATINGS) -> PublicArchive:
    url = f"http://files.grouplens.org/datasets/movielens/ml-{size}.zip"
    return PublicArchive(url=url, md5=md5, log=log)


def _kuairand(size: str, *, md5: str, parts: tuple[str, ...] = ("",)) -> PublicArchive:
    suffix, dates = size.lower(), ("4_08_to_4_21", "4_22_to_5_08")
    log = TabularConfig(
        events=tuple(Path(f"data/log_standard_{days}_{suffix}{part}.csv") for days in dates for part in parts),
        user_column="user_id",
        item_column="video_id",
        timestamp_column="time_ms",
        timestamp_unit="ms",
        # How the user responded to the video.
        action_columns=(
            *("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view"),
            "is_profile_enter",
        ),
        event_columns=("play_time_ms:int", "duration_ms:int"),
        context=Path(f"data/user_features_{suffix}.csv"),
        context_columns=(
            "user_active_degree",
            "follow_user_num_range",
            "fans_user_num_range",
            "friend_user_num_range",
            "register_days_range",
        ),
    )
    url = f"https://zenodo.org/records/10439422/files/KuaiRand-{size}.tar.gz"
    return PublicArchive(url=url, md5=md5, log=log)


def _yambda(size: str) -> PublicArchive:
    log = TabularConfig(
        events=(Path(f"raw/{size}/multi_event.parquet"),),
        user_column="uid",
        item_column="item_id",
        timestamp_column="timestamp",
        timestamp_unit="s",
        event_columns=("is_organic:int", "played_ratio_pct:int=0", "track_length_seconds:int=0"),
        item_features=tuple(Path(f"shared_metadata/{name}_item_mapping.parquet") for name in ("artist", "album")),
        item_columns=("artist_id:int", "album_id:int"),
        item_features_as="table",
    )
    listened = "event_type == 'listen' and played_ratio_pct >= 50"
    action = f"1 if {listened} else 4 if event_type == 'listen' else 2 if event_type == 'like' else 0"
    return PublicArchive(
        url="https://huggingface.co/datasets/yandex/yambda",
        md5=None,
        log=log,
        computed={"compute": (f"action={action}", f"listen_plus={listened}"), "label": "listen_plus"},
        ids=KEEP,
        counts_from_start=True,
    )


CATALOG: dict[str, PublicArchive] = {
    dataset.folder.lower(): dataset
    for dataset in (
        _movielens("latest-small", md5=None),
        _movielens("1m", md5="c4d9eecfca2ab87c1945afe126590906", log=_RATINGS_1M),
        _movielens("20m", md5="cd245b17a1ae2cc31bb14903e1204af3"),
        _movielens("25m", md5="6b51fb2759a8657d3bfcbfc42b592ada"),
        _movielens("32m", md5="d472be332d4daa821edc399621853b57"),
        _kuairand("Pure", md5="0820331067a3784d9691136f772b35a7"),
        _kuairand("1K", md5="6b0b9c8222d67fcd4c676218edca3f1f"),
        _kuairand("27K", md5="3e3c799a24e2d23a4d2c757fbf9adf59", parts=("_part1", "_part2")),
    )
}

CATALOG |= {f"yambda-{size}": _yambda(size) for size in ("50m", "500m", "5b")}

# Datasets without an archive: drawn from distributions, and read from files that the user describes.
SYNTHETIC = "synthetic"
CUSTOM = "custom"
DATASETS = (*CATALOG, SYNTHETIC, CUSTOM)


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
    if not dataset.can_be_downloaded:
        missing = next(folder / name for name in dataset.files if not (folder / name).is_file())
        raise DataError(f"there is no {missing}; put {' and '.join(dataset.files)} of {dataset.url} into {folder}")
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
    import tarfile  # which every command would wait for
    import zipfile

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
    import tarfile
    import zipfile

    found: list[tuple[str, bool, bool, Callable[[], Any]]]  # name, whether a file, whether a file or folder, open
    with contextlib.ExitStack() as stack:
        if archive.suffix == ".zip":
            zipped = stack.enter_context(zipfile.ZipFile(archive))
            modes = [(member, stat.S_ISLNK(member.external_attr >> 16)) for member in zipped.infolist()]
            found = [(m.filename, not m.is_dir(), not is_link, partial(zipped.open, m)) for m, is_link in modes]
        else:
            tar = stack.enter_context(tarfile.open(archive, "r:gz"))
            found = [(m.name, m.isreg(), m.isreg() or m.isdir(), partial(tar.extractfile, m)) for m in tar]
        for name, _, is_plain, _ in found:
            path = PureWindowsPath(name)  # recognizes both separators, and drives
            is_outside = bool(path.anchor) or ".." in path.parts
            if is_outside or not is_plain:
                what = "a path outside its folder" if is_outside else "a link or a device"
                raise DataError(f"{archive} contains {name!r}, {what}; nothing was unpacked, do not trust it")
        # `./a/b` is `a/b`. None is opened for members that are no files.
        yield {PurePosixPath(name).as_posix(): opener for name, is_file, _, opener in found if is_file}
