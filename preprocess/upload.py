"""Atomic output to a URL: a dataset is replaced completely or not at all, also if the upload is interrupted.

The files of a version are in a folder of their own (see `datasets.schema`), and the manifest, which leads there, is
written last. Object stores have no locks: two jobs that write to the same URL must not run at the same time.
"""

import contextlib
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from evenrank.core.errors import DataError
from evenrank.core.files import is_trusted
from evenrank.core.listing import list_files
from evenrank.core.storage import CONNECTIONS, Remote
from evenrank.datasets.schema import MANIFEST_NAME, Manifest, version_name
from evenrank.preprocess.replace import (
    DATASET_NAME,
    foreign_file_error,
    is_of_dataset,
    run_folder,
    wrap_write_errors,
)

if TYPE_CHECKING:
    from pyarrow import fs

_LOGGER = logging.getLogger("evenrank.preprocess")
_IN_VERSION = re.compile(r"[0-9a-f]{16}/(manifest\.json|rejects\.csv|\w[\w.-]*\.parquet|\w[\w.-]*/part-\d+\.parquet)")


def replace_remote(
    out: Remote, write: Callable[[Path], Manifest], *, overwrite: bool, on_stage: Callable[[str], None]
) -> Manifest:
    """Let `write` fill a temporary folder, upload it, remove what was at `out` before, and return the manifest.

    What cannot be removed stays, with a warning: the manifest leads to the new files, and the next run tries again.
    Files of a killed upload are not uploaded again if they are of this version, else removed.
    """
    _check_replaceable(out, overwrite=overwrite)
    parent = Path(tempfile.gettempdir()).resolve() / f"evenrank-{os.geteuid()}"
    with wrap_write_errors(parent):
        parent.mkdir(mode=0o700, exist_ok=True)
    if not is_trusted(parent, (os.geteuid(),)):
        raise DataError(f"{parent} is not a folder of this user alone; remove it, or set TMPDIR to another folder")
    with run_folder(parent / hashlib.sha256(out.url.encode()).hexdigest()[:16], out) as run:
        manifest, folder = write(run), run / DATASET_NAME
        earlier = _check_replaceable(out, overwrite=overwrite)  # again, because a run can take hours
        content = (folder / MANIFEST_NAME).read_bytes()
        version = out / version_name(content)
        sizes = {name: os.path.getsize(path) for name, path in list_files(folder).items()}
        there = {name: info.size for name, info in earlier.items()}
        names = [name for name, size in sizes.items() if there.get(f"{version.name}/{name}") != size]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            uploads = pool.map(lambda name: (version / name).upload(folder / name), names)
            for number, _ in enumerate(uploads, 1):
                on_stage(f"uploaded {number} of {len(names)} files to {version}")
        (out / MANIFEST_NAME).upload(folder / MANIFEST_NAME)
    with contextlib.suppress(OSError):  # another run is there
        parent.rmdir()
    for entry in sorted({name.partition("/")[0] for name in earlier} - {MANIFEST_NAME, version.name}):
        on_stage(f"removing {out / entry}")
        try:
            (out / entry).delete(is_folder=entry not in earlier)
        except DataError as error:
            _LOGGER.warning("the dataset is complete, but %s", error)
    return manifest


def _check_replaceable(out: Remote, *, overwrite: bool) -> "dict[str, fs.FileInfo]":
    """Return all files at `out`; raise a DataError if some are not of a dataset."""
    if out.is_file():
        raise DataError(f"{out} is a file; choose another output folder")
    names = out.files_below()
    if not names and not out.has_container():
        raise DataError(f"{out} cannot be written: there is no such bucket; create it, or check the URL")
    is_own = is_of_dataset((out / MANIFEST_NAME).read() if MANIFEST_NAME in names else b"")
    foreign = sorted(name for name in names if not (is_own(name) or _IN_VERSION.fullmatch(name)))
    if foreign and not overwrite:
        raise foreign_file_error(out, foreign[0])
    return names
