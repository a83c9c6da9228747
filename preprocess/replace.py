"""Atomic output: the dataset in a folder or at a URL is replaced completely or not at all.

A folder is exchanged for the old one. At a URL, the files of a version are in a folder of their own (see
`datasets.schema`), and the manifest, which leads there, is written last. Object stores have no locks: two jobs that
write to the same URL must not run at the same time.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from evenrank.core.errors import DataError
from evenrank.core.files import is_trusted, locked, open_regular
from evenrank.core.listing import list_files
from evenrank.core.storage import CONNECTIONS, Remote
from evenrank.datasets.schema import CACHE_NAME, MANIFEST_NAME, REQUESTS_NAME, VECTOR_FILES, version_name
from evenrank.preprocess.build.vocabulary import vocabulary_name
from evenrank.preprocess.engine import UnfinishedError

if TYPE_CHECKING:
    from pyarrow import fs

# Files that the folder of a dataset may contain besides its manifest and its splits.
ITEM_FEATURES_NAME = "item_features.parquet"
REJECTS_NAME = "rejects.csv"
_OPTIONAL_FILES = (REQUESTS_NAME, ITEM_FEATURES_NAME, *VECTOR_FILES.values(), REJECTS_NAME)

DATASET_NAME = "dataset"  # folder of the new dataset in that of a run
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux
_AT_ONCE = 8  # files that are flushed or removed at a time
_IN_VERSION = re.compile(
    r"[0-9a-f]{16}/(manifest\.json|rejects\.csv|\w+_vectors\.npy|\w[\w.-]*\.parquet|\w[\w.-]*/part-\d+\.parquet)"
)
_LOGGER = logging.getLogger("evenrank.preprocess")
_Result = TypeVar("_Result")


def replace_dataset(
    out: Path | Remote,
    write: Callable[[Path], _Result],
    *,
    overwrite: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> _Result:
    """Let `write` fill a folder DATASET_NAME in its argument, put it in the place of `out`, and return its result.

    If anything fails, or there is no new manifest, `out` is unchanged. What is something else than a dataset is only
    replaced with `overwrite`; a file or a mount point never.

    Folders are exchanged in one step or, where the system cannot, renamed one after the other, and the old one is
    deleted last. If `out` is a symbolic link, the link is kept and its target replaced.

    Files that a killed run has uploaded are not uploaded again if they are of this version, else removed. What cannot
    be removed from a URL stays, with a warning: the manifest leads to the new files, and the next run tries again.
    """
    if isinstance(out, Path):
        out = Path(os.path.realpath(out))
        if not out.name or out.is_symlink():  # `realpath` leaves no other links
            raise DataError(f"{out} is {'a loop of links' if out.name else 'no folder'}; choose another output folder")
    with contextlib.ExitStack() as stack:
        place = out if isinstance(out, Path) else stack.enter_context(_place_for(out))
        folder = stack.enter_context(_run_folder(place, out))
        with wrap_write_errors(out):
            _check_replaceable(out, overwrite=overwrite)
        result, dataset = write(folder), folder / DATASET_NAME
        with wrap_write_errors(out):
            earlier = _check_replaceable(out, overwrite=overwrite)  # again, because a run can take hours
            if isinstance(out, Remote):
                _upload(dataset, out, earlier, on_stage)
            elif (dataset / MANIFEST_NAME).exists():
                for path in dataset.rglob(".*.partial"):  # of processes that were killed
                    path.unlink()
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    [*pool.map(_flush, [*dataset.rglob("*"), dataset])]
                _put_in_place(dataset, out, out.with_name(f".{out.name}.old"))
                _flush(out.parent)
    return result


@contextlib.contextmanager
def _place_for(out: Remote) -> Iterator[Path]:
    """Yield a path, in a folder of this user alone, beside which a run works whose output is at a URL."""
    parent = Path(tempfile.gettempdir()).resolve() / f"evenrank-{os.geteuid()}"
    with wrap_write_errors(parent):
        parent.mkdir(mode=0o700, exist_ok=True)
    if not is_trusted(parent, (os.geteuid(),)):
        raise DataError(f"{parent} is not a folder of this user alone; remove it, or set TMPDIR to another folder")
    try:
        yield parent / hashlib.sha256(out.url.encode()).hexdigest()[:16]
    finally:
        with contextlib.suppress(OSError):  # another run is there
            parent.rmdir()


@contextlib.contextmanager
def _run_folder(out: Path, shown: object) -> Iterator[Path]:
    """Yield the hidden folder beside `out` in which a run works, locked against others that would write to `shown`.

    It is kept if the run is killed or ends with an UnfinishedError, and has what that one left then.
    """
    lock, partial, old = (out.with_name(f".{out.name}.{suffix}") for suffix in ("lock", "partial", "old"))
    missing_parents = [folder for folder in out.parents if not folder.exists()]  # innermost first
    left = False
    try:
        with contextlib.ExitStack() as held:
            with wrap_write_errors(out):
                for folder in reversed(missing_parents):  # `parents=True` is recursive
                    folder.mkdir(exist_ok=True)
                try:
                    held.enter_context(locked(lock, seconds=0.1))  # a run that ends now may have deleted the file
                except TimeoutError:
                    message = f"{shown} is being written by another process; wait for it, or choose another folder"
                    raise DataError(message) from None
            try:
                with wrap_write_errors(out):
                    _clean_up(out, partial, old, keep=is_trusted(partial, (os.geteuid(),)))
                    partial.mkdir(mode=0o700, exist_ok=True)
                yield partial
            except UnfinishedError:
                left = True
                raise
            finally:
                with wrap_write_errors(out):
                    try:
                        _clean_up(out, partial, old, keep=left)
                    except BaseException:  # a further signal to stop
                        _clean_up(out, partial, old, keep=left)
                        raise
    finally:
        for folder in missing_parents:
            with contextlib.suppress(OSError):  # not empty: the dataset was written
                folder.rmdir()


@contextlib.contextmanager
def wrap_write_errors(out: object, partial: Path | None = None) -> Iterator[None]:
    """Replace an error of the operating system by a `DataError` that names `out`.

    If it is a full disk, what is in `partial` is kept.
    """
    try:
        yield
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else error  # PyArrow's text is another one
        reason = f"{out} could not be written: {cause}; it is unchanged"
        if partial is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"free some space and run it again: it goes on with what is in {partial}"
            raise UnfinishedError(f"{reason}, {remedy}") from error
        raise DataError(f"{reason}, check permissions and space") from error


def _check_replaceable(out: Path | Remote, *, overwrite: bool) -> "Mapping[str, fs.FileInfo | None]":
    """Return all files and links at `out`; raise a DataError if it must not be replaced."""
    content = b""
    if isinstance(out, Remote):
        if out.is_file():
            raise DataError(f"{out} is a file; choose another output folder")
        names: Mapping[str, fs.FileInfo | None] = out.files_below()
        if not names and not out.has_container():
            raise DataError(f"{out} cannot be written: there is no such bucket; create it, or check the URL")
        content = (out / MANIFEST_NAME).read() if MANIFEST_NAME in names else b""
    else:
        if Path.cwd().is_relative_to(out):
            raise DataError(f"{out} is or contains the current folder; choose another output folder")
        if out.exists() and (not out.is_dir() or os.path.ismount(out)):
            raise DataError(f"{out} is a file or a mount point; choose another output folder")
        names = dict.fromkeys(_files_below(out))
        with contextlib.suppress(DataError, OSError), open_regular(out / MANIFEST_NAME) as file:
            content = file.read()
    own, at_url = _names_in(content), isinstance(out, Remote)
    foreign = (name for name in names if name not in own and not name.startswith(f"{CACHE_NAME}/"))
    foreign = (name for name in foreign if not (at_url and _IN_VERSION.fullmatch(name)))
    if not overwrite and (first := min(foreign, default=None)) is not None:
        raise DataError(
            f"{out} contains {first!r}, which is no part of a dataset; choose another output folder, or replace all of "
            "it with --overwrite"
        )
    return names


def _files_below(folder: Path) -> Iterator[str]:
    folders = [folder] * folder.exists()
    while folders:  # `rglob` is recursive
        for path in folders.pop().iterdir():
            if path.is_dir() and not path.is_symlink():
                folders.append(path)
            else:
                yield path.relative_to(folder).as_posix()


def _names_in(manifest: bytes) -> set[str]:
    """Return the names of all files that a dataset with this manifest, of any version, may have but its cache's."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        content = json.loads(manifest)
        listed = {str(file["path"]) for split in content["splits"].values() for file in split["files"]}
        return listed | {MANIFEST_NAME, *_OPTIONAL_FILES, *map(vocabulary_name, content["vocabulary_sizes"])}
    return set()


def _put_in_place(dataset: Path, out: Path, old: Path) -> None:
    if out.exists():
        dataset.rename(old)
        # Folders get each other's names in one step, if the system and the file system can.
        renameat2 = getattr(ctypes.CDLL(None), "renameat2", lambda *_: -1)
        if renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(out), _RENAME_EXCHANGE) == 0:
            return
        old.rename(dataset)
        out.rename(old)
    dataset.rename(out)


def _upload(
    dataset: Path, out: Remote, earlier: "Mapping[str, fs.FileInfo | None]", on_stage: Callable[[str], None]
) -> None:
    """Upload a dataset, if it is complete, and remove all other versions and files at its URL."""
    path, last = dataset / MANIFEST_NAME, out / MANIFEST_NAME
    is_new = path.exists()
    version = out / version_name(path.read_bytes() if is_new else last.read())
    if not is_new and f"{version.name}/{MANIFEST_NAME}" not in earlier:  # it was copied here, to no folder of a version
        return
    sizes = {name: os.path.getsize(file) for name, file in list_files(dataset).items()} if is_new else {}
    there = {name: info.size for name, info in earlier.items() if info is not None}
    names = [name for name, size in sizes.items() if there.get(f"{version.name}/{name}") != size]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        uploads = pool.map(lambda name: (version / name).upload(dataset / name), names)
        for number, _ in enumerate(uploads, 1):
            on_stage(f"uploaded {number} of {len(names)} files to {version}")
    if is_new:
        last.upload(path)
    for entry in sorted({name.partition("/")[0] for name in earlier} - {MANIFEST_NAME, version.name}):
        on_stage(f"removing {out / entry}")
        try:
            (out / entry).delete(is_folder=entry not in earlier)
        except DataError as error:
            _LOGGER.warning("the dataset is complete, but %s", error)


def _clean_up(out: Path, partial: Path, old: Path, *, keep: bool) -> None:
    """Put the old folder back if nothing has taken its place, else remove it; remove `partial`, unless it is kept."""
    if old.exists() and not out.exists():
        old.rename(out)
    _remove(old)
    if not keep:
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for folder, _, names in os.walk(path):
                with contextlib.suppress(OSError):
                    os.chmod(folder, 0o700)  # of datasets that were made read-only
                for name in names:
                    pool.submit(os.unlink, os.path.join(folder, name))
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
