"""Atomic output to a URL: a dataset is replaced completely or not at all, also if the upload is interrupted.

The files of a version are in a folder of their own (see `datasets.remote`), and the manifest, which leads there, is
written last. Object stores have no locks: two jobs that write to the same URL must not run at the same time.
"""

import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evenrank.core.errors import DataError
from evenrank.core.storage import CONNECTIONS, Remote
from evenrank.datasets.remote import version_name
from evenrank.datasets.schema import MANIFEST_NAME, Manifest
from evenrank.preprocess.output.replace import foreign_file_error, is_of_dataset

_IN_VERSION = re.compile(r"[0-9a-f]{16}/(manifest\.json|\w[\w.-]*\.parquet|\w[\w.-]*/part-\d+\.parquet)")


def replace_remote(
    out: Remote, write: Callable[[Path], Manifest], *, overwrite: bool, on_stage: Callable[[str], None]
) -> Manifest:
    """Let `write` fill a temporary folder, upload it, remove what was at `out` before, and return the manifest.

    What an interrupted upload left behind is no longer there after the next one.
    """
    _check_replaceable(out, overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix="evenrank-") as temporary:
        folder = Path(temporary).resolve()
        manifest = write(folder)
        earlier = _check_replaceable(out, overwrite=overwrite)  # again, because a run can take hours
        content = (folder / MANIFEST_NAME).read_bytes()
        version = out / version_name(content)
        names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            uploads = pool.map(lambda name: (version / name).upload(folder / name), names)
            for number, _ in enumerate(uploads, 1):
                on_stage(f"uploaded {number} of {len(names)} files to {version}")
        (out / MANIFEST_NAME).upload(folder / MANIFEST_NAME)
    for entry in sorted({name.partition("/")[0] for name in earlier} - {MANIFEST_NAME, version.name}):
        on_stage(f"removing {out / entry}")
        (out / entry).delete(is_folder=entry not in earlier)
    return manifest


def _check_replaceable(out: Remote, *, overwrite: bool) -> set[str]:
    """Return the paths of all files at `out`; raise a DataError if some are not of a dataset."""
    if out.is_file():
        raise DataError(f"{out} is a file; choose another output folder")
    names = out.files_below().keys()
    if not names and not out.has_container():
        raise DataError(f"{out} cannot be written: there is no such bucket; create it, or check the URL")
    is_own = is_of_dataset((out / MANIFEST_NAME).read() if MANIFEST_NAME in names else b"")
    foreign = sorted(name for name in names if not (is_own(name) or _IN_VERSION.fullmatch(name)))
    if foreign and not overwrite:
        raise foreign_file_error(out, foreign[0])
    return set(names)
