"""The sequence Parquet format: columns, dtypes, and the manifest with its checks.

    OUT/manifest.json
    OUT/train/part-00000.parquet ...      one row per user
    OUT/eval/part-00000.parquet ...

At a URL, these are in a folder OUT/VERSION, and OUT/manifest.json, that of the latest version, is written last: an
upload replaces no file that somebody reads. A folder that was copied to a URL as it is can be read too.

Columns of a row: `user_id` int64; each contextual feature, int64 (0 = missing, then 1..n by sorted value), list<int64>
(any number of 1..n) or float32 (0 = missing); `item_id` list<int64>, `action` list<int32> and `timestamp_ms`
list<int64>, all of the same length and in time order; further lists that a dataset adds, of int32, int64 or float32;
`length` int32, the number of events. Floats are finite. Rows are sorted by (`user_hash` of the key, key) of
their user: the raw id if it is an integer, else the hash of its text.
"""

import contextlib
import hashlib
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any, Literal, get_args

from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.files import open_regular
from evenrank.core.storage import Remote, locate

if TYPE_CHECKING:  # the command line imports this module
    import numpy as np
    from numpy.typing import NDArray

SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
REQUESTS_NAME = "requests.parquet"
CACHE_NAME = ".cache"  # subfolder of the unpacked columns
REMEDY = "preprocess the dataset again"  # of files that do not match their manifest

MAX_HISTORY_LENGTH = 512  # events of a history, where loaders and commands are not told otherwise
USER_ID = "user_id"
ITEM_ID = "item_id"
ACTION = "action"
TIMESTAMP_MS = "timestamp_ms"
LENGTH = "length"
NUM_TARGETS = "num_targets"  # optional, int32: number of last events of a row that are prediction targets
WINDOW = "window"  # optional, int32: index of a row among the rows of its user
REQUEST_COLUMNS = (USER_ID, "request_ts_ms", "history_end")  # int64 each, of REQUESTS_NAME

# Element types of the list columns of every dataset.
EVENT_DTYPES: Mapping[str, str] = {ITEM_ID: "int64", ACTION: "int32", TIMESTAMP_MS: "int64"}
FLOAT = "float32"
MULTI_VALUED = "list<int64>"
_CONTEXT_DTYPES = ("int64", FLOAT, MULTI_VALUED)
EXTRA_DTYPES = ("int64", "int32", FLOAT)
# Names of columns of the format and of keys of batches, which no contextual feature or further list column can have.
RESERVED_NAMES = frozenset(
    (USER_ID, *EVENT_DTYPES, LENGTH, NUM_TARGETS, WINDOW, "label", "semantic_id", "candidate_id")
)
_MAX_NAME_BYTES = 200  # file systems allow 255 for a file name, including its suffix
_MAX_COUNT = 2**48  # its products with sizes of types fit into int64
# Percentiles of history lengths in a manifest, by nearest rank, so each is a length that occurs.
LENGTH_PERCENTILES = (1, 5, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A raw file that a dataset was made from."""

    path: str
    """Relative to the raw folder, so that manifests are the same on every machine."""
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """A Parquet file of a split."""

    path: str
    """Relative to the dataset's folder, with forward slashes."""
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The files of a split, in row order, and the numbers of their rows and events."""

    files: tuple[DataFile, ...]
    rows: int
    interactions: int
    lengths: Mapping[str, float]
    """Events per row: min, p1, ..., p99, max, mean; empty if the split has no rows."""


IdKind = Literal["int64", "uint64", "text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyVersion:
    """The state of a vocabulary after a dataset was added to it."""

    size: int
    """Values; later versions begin with the same ones."""
    sha256: str
    """Of the kind and the values, in the order of their ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdSummary:
    """How the raw ids of users or items, or the values of a feature, became the ids of a dataset."""

    rule: str
    """`dense`: numbered from 1, in `vocabulary_COLUMN.parquet`; `keep`: unchanged; `hash:N`: hashed to 0..N-1."""
    kind: IdKind
    """Type of the raw ids."""
    distinct: int | None = None
    """Distinct raw ids of the log; None: not counted."""
    largest: int | None = None
    """Largest raw id; None: not counted, or text."""
    collisions: int = 0
    """Raw ids that share their hash with another."""
    versions: tuple[VocabularyVersion, ...] = ()
    """Of the vocabulary, oldest first; empty without one."""
    unknown_values: int = 0
    """Raw ids that the earlier vocabulary lacked."""
    unknown_events: int = 0
    """Their events."""

    @property
    def version(self) -> str:
        """Rule, kind and latest version, equal for two datasets only if their ids mean the same."""
        return " ".join([self.rule, self.kind, *(version.sha256 for version in self.versions[-1:])])

    def extends(self, version: str) -> bool:
        """Return whether all ids of a dataset with this `version` mean the same here."""
        return version in {replace(self, versions=self.versions[:end]).version for end in range(len(self.versions) + 1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """`manifest.json`: the description of a dataset."""

    schema_version: int = SCHEMA_VERSION
    dataset: str
    """Name of the dataset."""
    sources: tuple[SourceFile, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of preprocessing; `audit` counts what was left out, `statistics` the events."""
    splits: Mapping[str, Split] = field(default_factory=dict)
    contextual: Mapping[str, str] = field(default_factory=dict)
    """The contextual features, in column order, and their types: `int64`, `list<int64>` or `float32`."""
    extra_events: Mapping[str, str] = field(default_factory=dict)
    """Further list columns and their element types: `int64`, `int32` or `float32`."""
    vocabulary_sizes: Mapping[str, int] = field(default_factory=dict)
    """Per feature of ids: largest id + 1."""
    context_labels: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Per contextual feature of ids: the labels of ids 0 (None), 1, 2, ..."""
    ids: Mapping[str, IdSummary] = field(default_factory=dict)
    """Of `user_id` and `item_id`, and of features whose values were numbered."""
    content_hash: str = ""
    """SHA-256 of the Parquet files, their columns and the vocabulary; saved with every loader state."""
    item_features: DataFile | None = None
    """The table of the features of items, if there is one."""

    @property
    def event_dtypes(self) -> dict[str, str]:
        """Element type of every list column."""
        return {**EVENT_DTYPES, **self.extra_events}

    @property
    def row_columns(self) -> dict[str, str]:
        """Type of the values of `user_id` and every contextual feature."""
        types = {name: "int64" if dtype == MULTI_VALUED else dtype for name, dtype in self.contextual.items()}
        return {USER_ID: "int64", **types}

    @property
    def multi_valued(self) -> tuple[str, ...]:
        """Names of the contextual features with any number of values per row."""
        return tuple(name for name, dtype in self.contextual.items() if dtype == MULTI_VALUED)

    def split(self, name: str, dataset: object) -> Split:
        """Return a split, or raise a DataError that names the dataset, a folder or URL."""
        if name not in self.splits:
            raise DataError(f"{dataset} has no split {name!r}; known: {', '.join(sorted(self.splits))}")
        return self.splits[name]

    def write(self, folder: Path) -> None:
        """Write `folder/manifest.json`, of equal bytes for equal manifests."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def user_hash(user_ids: "NDArray[np.int64]", *, salt: int = 0) -> "NDArray[np.uint64]":
    """Hash user ids: uint64 of the same shape. Salt 0 orders the rows; other salts give independent hashes."""
    import numpy as np

    from evenrank.core.hashing import mix64

    hashed = mix64(user_ids.astype(np.int64).view(np.uint64))
    return mix64(hashed ^ mix64(np.array([salt], dtype=np.int64).view(np.uint64))) if salt else hashed


def check_names(names: Collection[str]) -> None:
    """Raise a ConfigError unless all can be names of contextual features and list columns.

    They become keys of batches and file names, so none may be reserved or differ from another only by case.
    """
    _check_distinct(names)
    if reserved := [name for name in names if name in RESERVED_NAMES]:
        raise ConfigError(
            f"no feature can be called {reserved[0]!r}, because datasets or batches have a column of this name; rename "
            f"it to anything but {', '.join(sorted(RESERVED_NAMES))}"
        )


def check_new_names(names: Collection[str]) -> None:
    """Check names of contextual features of a new dataset, which also become names of modules, without dots."""
    check_names(names)
    if dotted := [name for name in names if "." in name]:
        raise ConfigError(
            f"no feature can be called {dotted[0]!r}, because modules of models are named by features, without dots; "
            f"rename it, for example to {dotted[0].replace('.', '_')!r}"
        )


def _check_distinct(names: Iterable[object]) -> None:
    """Check that names are valid and no two of them name the same file on any file system."""
    seen: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name) or len(name.encode()) > _MAX_NAME_BYTES:
            raise ConfigError(
                f"{name!r} is not a name; use letters, digits, _ and -, at most {_MAX_NAME_BYTES} bytes, and begin "
                "with a letter, a digit or _"
            )
        folded = unicodedata.normalize("NFKC", name).casefold()
        if folded in seen:
            raise ConfigError(f"the names {seen[folded]!r} and {name!r} differ at most by case; rename one of them")
        seen[folded] = name


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal; raises a DataError if it cannot be read."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def summarize_lengths(lengths: "NDArray[np.int64]") -> dict[str, float]:
    """Return minimum, percentiles (nearest rank), maximum and mean of history lengths; empty if there are none."""
    import numpy as np

    if len(lengths) == 0:
        return {}
    names = ("min", *(f"p{percent}" for percent in LENGTH_PERCENTILES), "max")
    values = np.percentile(lengths, (0, *LENGTH_PERCENTILES, 100), method="inverted_cdf").tolist()
    return {**dict(zip(names, values, strict=True)), "mean": round(float(lengths.mean()), 3)}


def content_hash(manifest: Manifest) -> str:
    """Return the SHA-256, in hexadecimal, of the data that a loader sees, without raw files and options."""
    table = manifest.item_features
    visible = {
        "schema_version": SCHEMA_VERSION,
        "splits": {name: [asdict(file) for file in split.files] for name, split in manifest.splits.items()},
        "contextual": list(manifest.contextual.items()),  # in their order
        "extra_events": dict(manifest.extra_events),
        "vocabulary_sizes": dict(manifest.vocabulary_sizes),
        "ids": {name: summary.version for name, summary in manifest.ids.items()},
        **({} if table is None else {"item_features": asdict(table)}),
    }
    return hashlib.sha256(json.dumps(visible, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path | str) -> Manifest:
    """Read and check `manifest.json` of the dataset in a folder or at a URL.

    Raises:
        DataError: the file is missing, malformed, or of another schema version.
    """
    dataset = locate(folder)
    return parse_manifest(manifest_bytes(dataset), f"{dataset / MANIFEST_NAME}")


def manifest_bytes(dataset: Path | Remote) -> bytes:
    """Return the content of `manifest.json`, or raise a DataError."""
    path = dataset / MANIFEST_NAME
    if not (path.exists() if isinstance(path, Path) else path.is_file()):
        is_folder, is_there = (
            isinstance(dataset, Remote) or dataset.is_dir(),
            isinstance(dataset, Remote) or dataset.exists(),
        )
        reason = f"it contains no {MANIFEST_NAME}" if is_folder else "it is a file" if is_there else "no such folder"
        place = "FOLDER`, another one than that of the log" if is_there else f"{dataset}`"
        raise DataError(f"{dataset} is not a dataset: {reason}; make one with `evenrank preprocess --out {place}")
    if isinstance(path, Remote):
        return path.read()
    with open_regular(path) as file:
        return file.read()


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


def parse_manifest(content: bytes, path: str) -> Manifest:
    """Parse and check the content of a `manifest.json`, like `read_manifest`; messages name `path`."""
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); {REMEDY}") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        known = f"this version of evenrank reads {SCHEMA_VERSION}"
        raise DataError(f"{path} has schema version {version!r}, {known}; {REMEDY}")
    try:
        manifest = _manifest_from_json(raw)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise DataError(f"{path} has a missing or malformed field ({reason}); {REMEDY}") from error
    # Unpacked columns are found by this hash, also in caches that several datasets share.
    if manifest.content_hash != (actual := content_hash(manifest)):
        raise DataError(
            f"{path} has content hash {manifest.content_hash[:12]}, but that of its files and columns is "
            f"{actual[:12]}; {REMEDY}"
        )
    return manifest


def _manifest_from_json(raw: dict[str, Any]) -> Manifest:
    splits = {name: _checked_split(split) for name, split in raw["splits"].items()}
    _check_distinct(splits)
    contextual, extra_events = (dict(raw[field].items()) for field in ("contextual", "extra_events"))
    for dtypes, known in ((contextual, _CONTEXT_DTYPES), (extra_events, EXTRA_DTYPES)):
        if unknown := [dtype for dtype in dtypes.values() if dtype not in known]:
            raise ValueError(f"a column has the type {unknown[0]!r}; known: {', '.join(known)}")
    check_names((*contextual, *extra_events))
    ids = [name for name, dtype in contextual.items() if dtype != FLOAT]
    vocabulary_sizes = {name: _checked_count(size, 2**63) for name, size in raw["vocabulary_sizes"].items()}
    if missing := [name for name in (USER_ID, ITEM_ID, ACTION, *ids) if name not in vocabulary_sizes]:
        raise ValueError(f"vocabulary_sizes lacks {missing[0]!r}")
    labels = {name: raw["context_labels"][name] for name in ids}
    for values in labels.values():
        if not isinstance(values, list) or not all(label is None or isinstance(label, str) for label in values):
            raise ValueError("the labels of a feature are no list of strings")
    return Manifest(
        dataset=str(raw["dataset"]),
        sources=tuple(SourceFile(**source) for source in raw["sources"]),
        options=dict(raw["options"]),
        splits=splits,
        contextual=contextual,
        extra_events=extra_events,
        vocabulary_sizes=vocabulary_sizes,
        context_labels={name: tuple(values) for name, values in labels.items()},
        ids={name: _checked_ids(raw["ids"][name]) for name in (USER_ID, ITEM_ID, *raw["ids"])},
        content_hash=_checked_sha256(raw["content_hash"]),
        item_features=_checked_file(raw["item_features"]) if raw.get("item_features") else None,
    )


def _checked_ids(raw: dict[str, Any]) -> IdSummary:
    versions = tuple(VocabularyVersion(**version) for version in raw["versions"])
    for version in versions:
        _checked_count(version.size)
        _checked_sha256(version.sha256)
    if raw["kind"] not in get_args(IdKind) or not isinstance(raw["rule"], str):
        raise ValueError(f"ids have rule {raw['rule']!r} and kind {raw['kind']!r}")
    return IdSummary(**{**raw, "versions": versions})


def _checked_split(raw: dict[str, Any]) -> Split:
    split = Split(
        files=tuple(map(_checked_file, raw["files"])),
        rows=_checked_count(raw["rows"]),
        interactions=_checked_count(raw["interactions"]),
        lengths={str(name): _checked_number(value) for name, value in raw["lengths"].items()},
    )
    if (rows := sum(file.rows for file in split.files)) != split.rows:
        raise ValueError(f"a split has {split.rows} rows, its files {rows}")
    expected = ("min", *(f"p{percentile}" for percentile in LENGTH_PERCENTILES), "max", "mean") if split.rows else ()
    if set(split.lengths) != set(expected):
        raise ValueError(f"the lengths of a split of {split.rows} rows are {', '.join(split.lengths) or 'missing'}")
    return split


def _checked_file(raw: dict[str, Any]) -> DataFile:
    name, rows, sha256 = raw["path"], _checked_count(raw["rows"]), _checked_sha256(raw["sha256"])
    if isinstance(name, str) and name.isprintable():
        path = PureWindowsPath(name)  # recognizes all separators and drives
        if path.name and not path.anchor and ".." not in path.parts:
            return DataFile(path=name, rows=rows, sha256=sha256)
    raise ValueError(f"{name!r} is not a path inside the dataset")


def _checked_number(value: object, limit: int = _MAX_COUNT) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= limit:
        raise ValueError(f"{value!r} is not a number of at least 0")
    return value


def _checked_count(value: object, limit: int = _MAX_COUNT) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{value!r} is not a count")
    return int(_checked_number(value, limit))


def _checked_sha256(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"{value!r} is not a SHA-256")
    return value
