"""Datasets at URLs: where the files of a version are, and their unpacked copy on this host.

    OUT/manifest.json                        of the latest version; written last
    OUT/VERSION/manifest.json, train/...     that version, as in a local folder

So an upload replaces no file that somebody reads. A folder that was copied to a URL as it is can be read too.
"""

import contextlib
import hashlib
from pathlib import Path

from evenrank.core.errors import DataError
from evenrank.core.files import write_text
from evenrank.core.storage import Remote
from evenrank.datasets.schema import MANIFEST_NAME, manifest_bytes
from evenrank.datasets.unpack import find_or_build


def version_name(manifest: bytes) -> str:
    """Return the name of the folder of a version, by the content of its manifest."""
    return hashlib.sha256(manifest).hexdigest()[:16]


def latest_version(dataset: Path | Remote) -> tuple[bytes, Path | Remote]:
    """Return the content of the manifest of a dataset, and the folder of the files that it lists."""
    text = manifest_bytes(dataset)
    while isinstance(dataset, Remote):
        folder = dataset / version_name(text)
        with contextlib.suppress(DataError):  # permission to read a bucket does not always include asking what is there
            if (folder / MANIFEST_NAME).is_file():
                return text, folder
        if (latest := manifest_bytes(dataset)) == text:
            break
        text = latest  # the dataset was replaced, and the version removed, in between
    return text, dataset


def local_folder(manifest: bytes) -> Path:
    """Return the folder in the user's cache for a dataset at a URL: its manifest, and soon its unpacked columns."""
    name = f"{hashlib.sha256(manifest).hexdigest()}-dataset"
    return find_or_build(None, name, lambda entry: write_text(entry / MANIFEST_NAME, manifest.decode()))
