"""`open_vectors`: the dense vectors of users or items, one row per id, as a file that is mapped into memory.

The file must have the SHA-256 in the manifest. In a folder, the first process of a machine that opens it reads it for
that, and again after it has changed; from a URL, it is fetched once, into the user's cache.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.files import open_regular
from evenrank.core.storage import Remote, locate
from evenrank.datasets.schema import ITEM_ID, MANIFEST_NAME, REMEDY, VECTOR_FILES, latest_version, parse_manifest
from evenrank.datasets.store import SequenceStore
from evenrank.datasets.stream import StreamSource
from evenrank.datasets.unpack import find_or_build

VectorSource = SequenceStore | StreamSource | Path | str


def open_vectors(source: VectorSource, of: str = ITEM_ID) -> "np.memmap[Any, Any]":
    """Map the vectors of a dataset into memory, read-only: [vocabulary size, d], float16 or float32.

    Row i is the vector of id i, and all zeros if there is none, as that of id 0, which stands for unknown ones.

    Args:
        source: an open store or stream, or the folder or URL of a dataset.
        of: `item_id` or `user_id`.

    Raises:
        ConfigError: `of` is another name.
        DataError: the dataset has no such vectors, or the file is not that of the manifest.
    """
    if of not in VECTOR_FILES:
        raise ConfigError(f"there are no vectors of {of!r}; choose one of {', '.join(VECTOR_FILES)}")
    place: Path | Remote | None
    if isinstance(source, SequenceStore | StreamSource):
        manifest, place = source.manifest, source.place
    else:
        text, place = latest_version(dataset := locate(source))
        manifest = parse_manifest(text, f"{dataset / MANIFEST_NAME}")
    if place is None or (file := manifest.vectors.get(of)) is None:
        raise DataError(
            f"{place or 'a store in memory'} has no vectors of {of}; preprocess it with "
            f"--{of.removesuffix('_id')}-vectors FILE, and open that dataset"
        )
    remote, path = place / file.path, Path(f"{place}", file.path)
    if isinstance(remote, Remote):

        def fetch(entry: Path) -> None:
            with (entry / file.path).open("xb") as copy:
                _check(remote, (chunk for chunk in remote.chunks() if copy.write(chunk)), file.sha256)

        path = find_or_build(None, f"{file.sha256}-vectors", fetch) / file.path
    with open_regular(path) as opened:
        status = os.fstat(opened.fileno())
        if isinstance(place, Path):  # an empty entry of the cache says that this file has been read
            version = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_ctime_ns}"
            chunks = iter(lambda: opened.read(1 << 24), b"")
            find_or_build(place, f"{file.sha256}-vectors-{version}", lambda _: _check(path, chunks, file.sha256))
        num_bytes = file.rows * file.width * np.dtype(file.dtype).itemsize
        shape = file.rows, file.width
        vectors = np.memmap(opened, file.dtype, mode="r", offset=status.st_size - num_bytes, shape=shape)
        vectors.filename = str(path.absolute())
        return vectors


def _check(path: Path | Remote, chunks: Iterable[bytes], sha256: str) -> None:
    """Raise a DataError unless the chunks of a file have a SHA-256, in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise DataError(f"{path} does not have the SHA-256 in its manifest; {REMEDY}")
