"""Atomic output: the folder of a dataset is replaced completely or not at all."""

import contextlib
import ctypes
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from evenrank.core.errors import DataError
from evenrank.core.files import is_trusted, locked, open_regular
from evenrank.datasets.schema import CACHE_NAME, MANIFEST_NAME, REQUESTS_NAME
from evenrank.preprocess.build.vocabulary import vocabulary_name
from evenrank.preprocess.engine import UnfinishedError

# Files that the folder of a dataset may contain besides its manifest and its splits.
ITEM_FEATURES_NAME = "item_features.parquet"
REJECTS_NAME = "rejects.csv"
_OPTIONAL_FILES = (REQUESTS_NAME, ITEM_FEATURES_NAME, REJECTS_NAME)

DATASET_NAME = "dataset"  # folder of the new dataset in that of a run
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux
_Result = TypeVar("_Result")


def replace_folder(out: Path, write: Callable[[Path], _Result], *, overwrite: bool = False) -> _Result:
    """Let `write` fill a folder DATASET_NAME in its argument, put it in the place of `out`, and return its result.

    The folders are exchanged in one step or, where the system cannot, renamed one after the other, and the old one is
    deleted last. If anything fails, `out` is unchanged.

    If `out` is a symbolic link, the link is kept and its target replaced. A folder that contains something else than a
    dataset is only replaced with `overwrite`; a file or a mount point never.
    """
    out = Path(os.path.realpath(out))
    if not out.name or out.is_symlink():  # `realpath` leaves no other links
        raise DataError(f"{out} is {'a loop of links' if out.name else 'no folder'}; choose another output folder")
    with run_folder(out, out) as folder:
        with wrap_write_errors(out):
            _check_replaceable(out, overwrite=overwrite)
        result, dataset = write(folder), folder / DATASET_NAME
        with wrap_write_errors(out):
            for path in dataset.rglob(".*.partial"):  # of processes that were killed
                path.unlink()
            for path in (*dataset.rglob("*"), dataset):
                _flush(path)
            _check_replaceable(out, overwrite=overwrite)  # again, because a run can take hours
            _put_in_place(dataset, out, out.with_name(f".{out.name}.old"))
            _flush(out.parent)
    return result


@contextlib.contextmanager
def run_folder(out: Path, shown: object) -> Iterator[Path]:
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
                    _put_back(out, old)
                    if not is_trusted(partial, (os.geteuid(),)):
                        _remove(partial)
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


def _check_replaceable(out: Path, *, overwrite: bool) -> None:
    if Path.cwd().is_relative_to(out):
        raise DataError(f"{out} is or contains the current folder; choose another output folder")
    if not out.exists():
        return
    if not out.is_dir() or os.path.ismount(out):
        raise DataError(f"{out} is a file or a mount point; choose another output folder")
    if not overwrite and (foreign := _find_foreign(out)) is not None:
        raise foreign_file_error(out, foreign)


def _find_foreign(folder: Path) -> str | None:
    """Return the first file or link that is in neither the manifest nor the cache of a dataset."""
    content = b""
    with contextlib.suppress(DataError, OSError), open_regular(folder / MANIFEST_NAME) as file:
        content = file.read()
    is_own, folders = is_of_dataset(content), [folder]
    while folders:  # `rglob` is recursive
        for path in sorted(folders.pop().iterdir()):
            name = path.relative_to(folder).as_posix()
            if path.is_dir() and not path.is_symlink():
                folders.append(path)
            elif not is_own(name):
                return name
    return None


def foreign_file_error(out: object, name: str) -> DataError:
    """Return the error about a file in a folder or at a URL that is not of a dataset."""
    return DataError(
        f"{out} contains {name!r}, which is no part of a dataset; choose another output folder, or replace all of it "
        "with --overwrite"
    )


def is_of_dataset(content: bytes) -> Callable[[str], bool]:
    """Return a function that tells by a file's relative path whether it is in a dataset with this manifest."""
    try:
        manifest = json.loads(content)
        listed = {str(file["path"]) for split in manifest["splits"].values() for file in split["files"]}
        listed |= {MANIFEST_NAME, *_OPTIONAL_FILES, *map(vocabulary_name, manifest["vocabulary_sizes"])}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        listed = set()
    return lambda name: name in listed or name.startswith(f"{CACHE_NAME}/")


def _put_in_place(dataset: Path, out: Path, old: Path) -> None:
    if out.exists():
        dataset.rename(old)
        if _exchange(old, out):
            return
        old.rename(dataset)
        out.rename(old)
    dataset.rename(out)


def _exchange(one: Path, other: Path) -> bool:
    """Give two folders each other's names in one step, and return whether the system and the file system can."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", lambda *_: -1)
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _put_back(out: Path, old: Path) -> None:
    """Put the old folder back if nothing has taken its place, else remove it."""
    if old.exists() and not out.exists():
        old.rename(out)
    _remove(old)


def _clean_up(out: Path, partial: Path, old: Path, *, keep: bool) -> None:
    _put_back(out, old)
    if not keep:
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for folder, *_ in os.walk(path):  # of datasets that were made read-only
            with contextlib.suppress(OSError):
                os.chmod(folder, 0o700)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
