"""What sequence Parquet looks like on disk: columns, dtypes, the manifest, and the checks on all three.

    OUT/manifest.json
    OUT/train/part-00000.parquet ...      one row per user
    OUT/eval/part-00000.parquet ...

Columns of a row: `user_id` int64; each contextual feature int64 (0 = missing, then 1..n by sorted value); `item_id`
list<int64>, `action` list<int32> and `timestamp_ms` list<int64>, all of one length and in time order; extra lists that
a dataset brings; `length` int32, the number of events. Rows are ordered by (`user_hash` of user_id, user_id).
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.core.hashing import mix64

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
CACHE_NAME = ".cache"  # what a loader keeps beside the Parquet files

USER_ID = "user_id"
ITEM_ID = "item_id"
ACTION = "action"
TIMESTAMP_MS = "timestamp_ms"
LENGTH = "length"
NUM_TARGETS = "num_targets"  # optional, int32: how many of a row's last events are to be predicted

# The element types of the list columns that every dataset has.
EVENT_DTYPES: Mapping[str, str] = {ITEM_ID: "int64", ACTION: "int32", TIMESTAMP_MS: "int64"}

# Percentiles of history lengths that a manifest holds, by nearest rank, so that each is a length that occurs.
LENGTH_PERCENTILES = (1, 5, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A raw file that a dataset was made from."""

    path: str  # relative to the raw folder, so that a manifest does not depend on the machine
    bytes: int
    sha256: str  # quicker than MD5 on processors that compute it themselves


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One Parquet file of a split."""

    path: str  # relative to the dataset's folder, with forward slashes
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The files of a split and what is in them."""

    files: tuple[DataFile, ...]
    rows: int
    interactions: int
    lengths: Mapping[str, float]  # min, p1, ..., p99, max: events per row; mean; empty if there are no rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """`manifest.json`: all that is known of a dataset without opening its Parquet files."""

    schema_version: int
    dataset: str
    sources: tuple[SourceFile, ...]
    options: Mapping[str, Any]
    splits: Mapping[str, Split]
    contextual: tuple[str, ...]  # names of the contextual features, in column order
    extra_events: Mapping[str, str]  # further list columns and their element types
    vocabulary_sizes: Mapping[str, int]  # per feature: largest id + 1
    context_labels: Mapping[str, tuple[str | None, ...]]  # per contextual feature: label of id 0 (None), 1, 2, ...
    content_hash: str  # of the Parquet files, their layout and the vocabulary; what checkpoints carry

    def write(self, folder: Path) -> None:
        """Write `folder/manifest.json`, the same bytes for the same content."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def user_hash(user_ids: NDArray[np.int64], *, salt: int = 0) -> NDArray[np.uint64]:
    """Hash user ids: uint64 of the same shape. Salt 0 orders the rows; other salts give independent hashes."""
    hashed = mix64(user_ids.astype(np.int64).view(np.uint64))
    return mix64(hashed ^ mix64(np.array([salt], dtype=np.int64).view(np.uint64))) if salt else hashed


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_hash(
    *,
    splits: Mapping[str, Split],
    contextual: tuple[str, ...],
    extra_events: Mapping[str, str],
    vocabulary_sizes: Mapping[str, int],
) -> str:
    """Return the SHA-256, in hexadecimal, of what a loader can see of a dataset; raw files and options are not."""
    seen = {
        "schema_version": SCHEMA_VERSION,
        "splits": {name: [asdict(file) for file in split.files] for name, split in splits.items()},
        "contextual": contextual,
        "extra_events": dict(extra_events),
        "vocabulary_sizes": dict(vocabulary_sizes),
    }
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder/manifest.json`.

    Raises:
        DataError: there is none, it is not readable, or it was written by another schema version.

    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        where = f"no {MANIFEST_NAME} in it" if folder.is_dir() else "no such folder"
        raise DataError(f"{folder} is not a dataset: {where}; make one with `evenrank preprocess --out {folder}`")
    return parse_manifest(path.read_bytes(), str(path))


def parse_manifest(content: bytes, path: str) -> Manifest:
    """Read and check what a `manifest.json` holds, as `read_manifest`; `path` is what messages call it."""
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); preprocess the dataset again") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema version {version!r}, this evenrank reads {SCHEMA_VERSION}; preprocess the dataset again"
        )
    try:
        return _manifest_from_json(raw)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{path} lacks or misplaces a field ({error}); preprocess the dataset again") from error


def _manifest_from_json(raw: dict[str, Any]) -> Manifest:
    splits = {
        _name(name): Split(
            files=tuple(
                DataFile(path=_relative(file["path"]), rows=_count(file["rows"]), sha256=_digest(file["sha256"]))
                for file in split["files"]
            ),
            rows=_count(split["rows"]),
            interactions=_count(split["interactions"]),
            lengths=dict(split["lengths"]),
        )
        for name, split in raw["splits"].items()
    }
    extra_events = {_name(name): str(dtype) for name, dtype in raw["extra_events"].items()}
    if unknown := [dtype for dtype in extra_events.values() if dtype not in ("int64", "int32")]:
        raise ValueError(f"extra_events has {unknown[0]!r}")
    return Manifest(
        schema_version=raw["schema_version"],
        dataset=str(raw["dataset"]),
        sources=tuple(SourceFile(**source) for source in raw["sources"]),
        options=dict(raw["options"]),
        splits=splits,
        contextual=tuple(map(_name, raw["contextual"])),
        extra_events=extra_events,
        vocabulary_sizes={str(name): _count(size) for name, size in raw["vocabulary_sizes"].items()},
        context_labels={name: tuple(labels) for name, labels in raw["context_labels"].items()},
        content_hash=_digest(raw["content_hash"]),
    )


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _digest(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"{value!r} is not a SHA-256")
    return value


def _name(value: object) -> str:
    # Names of splits and columns become names of files.
    if not isinstance(value, str) or not re.fullmatch(r"\w[\w.-]*", value):
        raise ValueError(f"{value!r} is not a name")
    return value


def _relative(value: object) -> str:
    if not isinstance(value, str) or Path(value).is_absolute() or ".." in Path(value).parts:
        raise ValueError(f"{value!r} is not a path inside the dataset")
    return value
