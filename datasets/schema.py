"""The sequence Parquet format: columns, dtypes, and the manifest with its checks.

    OUT/manifest.json
    OUT/train/part-00000.parquet ...      one row per user
    OUT/eval/part-00000.parquet ...

At a URL, these are in a folder OUT/VERSION, and OUT/manifest.json, that of the latest version, is written last: an
upload replaces no file that somebody reads. A folder that was copied to a URL as it is can be read too.

Columns of a row: `user_id` int64; each contextual feature, int64 (0 = missing, then 1..n by sorted value), list<int64>
(any number of 1..n) or float32 (0 = missing); `item_id` list<int64>, `action` list<int32> and `timestamp_ms`
list<int64>, all of the same length and in time order; further lists that a dataset adds, of int32, int64 or float32;
`length` int32, the number of events. Floats are finite, except for NaN as a missing value of events. Rows are sorted by
(`user_hash` of the key, key) of their user: the raw id if it is an integer, else the hash of its text.
"""

import contextlib
import hashlib
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.files import open_regular
from evenrank.core.rules import Bounds, OneOf, Valid
from evenrank.core.settings import construct
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
FLOAT_OR_MISSING = "float32?"  # of events, NaN where a value is missing
EXTRA_DTYPES = ("int64", "int32", FLOAT, FLOAT_OR_MISSING)
# Files of dense vectors, by whose they are; their types, and the largest d.
VECTOR_FILES: Mapping[str, str] = {USER_ID: "user_vectors.npy", ITEM_ID: "item_vectors.npy"}
VECTOR_DTYPES = ("float16", "float32")
MAX_WIDTH = 1 << 20
# Names of columns of the format and of keys of batches, which no contextual feature or further list column can have.
RESERVED_NAMES = frozenset(
    (USER_ID, *EVENT_DTYPES, LENGTH, NUM_TARGETS, WINDOW, "label", "semantic_id", "candidate_id")
)
_MAX_NAME_BYTES = 200  # file systems allow 255 for a file name, including its suffix
# Percentiles of history lengths in a manifest, by nearest rank, so each is a length that occurs.
LENGTH_PERCENTILES = (1, 5, 25, 50, 75, 90, 95, 99)
_LENGTH_NAMES = ("min", *(f"p{percent}" for percent in LENGTH_PERCENTILES), "max")


class Column(NamedTuple):
    """A column of the rows of a dataset, from its log to batches."""

    name: str
    kind: Literal["scalar", "list", "event"]
    """What a row has: one value; a list of any number; or a list with one value per event."""
    dtype: str
    """Of a value: `int64`, `int32` or `float32`."""
    vocabulary_size: int | None = None
    """Largest id + 1; None: values are no ids."""
    may_be_missing: bool = False
    """Whether NaN stands for missing values."""

    @property
    def type(self) -> str:
        """Type of its values, as in a manifest."""
        return MULTI_VALUED if self.kind == "list" else self.dtype + "?" * self.may_be_missing

    @property
    def is_index(self) -> bool:
        """Whether values must be at least 0, as those of all ids but users' and of `num_targets`."""
        return self.name == NUM_TARGETS or (self.vocabulary_size is not None and self.name != USER_ID)


Schema = tuple[Column, ...]


def event_column(name: str, type_: str) -> Column:
    """Return a column of events, by its type in a manifest."""
    return Column(name, "event", type_.removesuffix("?"), may_be_missing=type_ == FLOAT_OR_MISSING)


USER_IDS = Column(USER_ID, "scalar", "int64")
TARGETS = Column(NUM_TARGETS, "scalar", "int32")
EVENTS = tuple(Column(name, "event", dtype) for name, dtype in EVENT_DTYPES.items())


def _is_inside(path: str) -> bool:
    """Return whether a path is of a file inside the folder that it is relative to, on every system."""
    parts = PureWindowsPath(path)  # recognizes all separators and drives
    return bool(path.isprintable() and parts.name and not parts.anchor and ".." not in parts.parts)


_MAX_COUNT = 2**48  # its products with sizes of types fit into int64
_Count = Annotated[int, Bounds(at_least=0, at_most=_MAX_COUNT)]
_Sha256 = Annotated[str, Valid(re.compile("[0-9a-f]{64}").fullmatch, "a SHA-256")]


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

    path: Annotated[str, Valid(_is_inside, "a path inside the dataset")]
    """Relative to the dataset's folder, with forward slashes."""
    rows: _Count
    sha256: _Sha256


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorFile(DataFile):
    """The dense vectors of users or items, a `.npy` file [rows, width]: row i is that of id i, all zeros if missing."""

    width: Annotated[int, Bounds(at_least=1, at_most=MAX_WIDTH)]
    dtype: Annotated[str, OneOf(VECTOR_DTYPES)]
    missing: _Count
    """Ids from 1 on without a vector."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The files of a split, in row order, and the numbers of their rows and events."""

    files: tuple[DataFile, ...]
    rows: _Count
    interactions: _Count
    lengths: Mapping[str, Annotated[float, Bounds(at_least=0, at_most=_MAX_COUNT)]]
    """Events per row: min, p1, ..., p99, max, mean; empty if the split has no rows."""


IdKind = Literal["int64", "uint64", "text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyVersion:
    """The state of a vocabulary after a dataset was added to it."""

    size: _Count
    """Values; later versions begin with the same ones."""
    sha256: _Sha256
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
    contextual: Mapping[str, Annotated[str, OneOf(("int64", FLOAT, MULTI_VALUED))]] = field(default_factory=dict)
    """The contextual features, in column order, and their types: `int64`, `list<int64>` or `float32`."""
    extra_events: Mapping[str, Annotated[str, OneOf(EXTRA_DTYPES)]] = field(default_factory=dict)
    """Further list columns and their element types: `int64`, `int32`, `float32` or, with missing values, `float32?`."""
    vocabulary_sizes: Mapping[str, Annotated[int, Bounds(at_least=0, at_most=2**63)]] = field(default_factory=dict)
    """Per feature of ids: largest id + 1."""
    context_labels: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Per contextual feature of ids: the labels of ids 0 (None), 1, 2, ..."""
    ids: Mapping[str, IdSummary] = field(default_factory=dict)
    """Of `user_id` and `item_id`, and of features whose values were numbered."""
    content_hash: _Sha256 = ""
    """SHA-256 of the Parquet files, their columns and the vocabulary; saved with every loader state."""
    item_features: DataFile | None = None
    """The table of the features of items, if there is one."""
    vectors: Mapping[Annotated[str, OneOf(VECTOR_FILES)], VectorFile] = field(default_factory=dict)
    """The dense vectors of `user_id` and `item_id`, where there are any."""

    @property
    def columns(self) -> Schema:
        """The columns of rows: `user_id`, the contextual features, and lists of events."""
        features = (
            Column(name, "list", "int64") if type_ == MULTI_VALUED else Column(name, "scalar", type_)
            for name, type_ in self.contextual.items()
        )
        further = (event_column(name, type_) for name, type_ in self.extra_events.items())
        sizes = self.vocabulary_sizes
        return tuple(c._replace(vocabulary_size=sizes.get(c.name)) for c in (USER_IDS, *features, *EVENTS, *further))

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
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))  # 4 times as large as `file_digest` has
    with open_regular(path) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def summarize_lengths(lengths: "NDArray[np.int64]") -> dict[str, float]:
    """Return minimum, percentiles (nearest rank), maximum and mean of history lengths; empty if there are none."""
    import numpy as np

    if len(lengths) == 0:
        return {}
    values = np.percentile(lengths, (0, *LENGTH_PERCENTILES, 100), method="inverted_cdf").tolist()
    return {**dict(zip(_LENGTH_NAMES, values, strict=True)), "mean": round(float(lengths.mean()), 3)}


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
        **({"vectors": {name: asdict(file) for name, file in manifest.vectors.items()}} if manifest.vectors else {}),
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
        remedy = f"make one with `evenrank preprocess --dataset NAME --out {dataset}`"
        if is_there:
            remedy = "pass a folder that `evenrank preprocess --out` wrote"
        raise DataError(f"{dataset} is not a dataset: {reason}; {remedy}")
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
    names = [field.name for field in fields(Manifest)]
    try:
        # An older manifest may lack the table of items and vectors, which are then the defaults.
        given = {name: raw[name] for name in names if name in raw or name not in ("item_features", "vectors")}
        _check(manifest := construct(Manifest, given, MANIFEST_NAME))
    except (KeyError, ConfigError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise DataError(f"{path} has a missing or malformed field ({reason}); {REMEDY}") from error
    # Unpacked columns are found by this hash, also in caches that several datasets share.
    if manifest.content_hash != (actual := content_hash(manifest)):
        raise DataError(
            f"{path} has content hash {manifest.content_hash[:12]}, but that of its files and columns is "
            f"{actual[:12]}; {REMEDY}"
        )
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise a ConfigError about what no rule of a single field says."""
    _check_distinct(manifest.splits)
    check_names((*manifest.contextual, *manifest.extra_events))
    features = [name for name, dtype in manifest.contextual.items() if dtype != FLOAT]
    of_fields = {
        "vocabulary_sizes": (USER_ID, ITEM_ID, ACTION, *features),
        "context_labels": features,
        "ids": (USER_ID, ITEM_ID),
    }
    for name, needed in of_fields.items():
        if missing := [column for column in needed if column not in getattr(manifest, name)]:
            raise ConfigError(f"{name} lacks {missing[0]!r}")
    for name, vectors in manifest.vectors.items():
        if vectors.rows != (size := manifest.vocabulary_sizes[name]):
            raise ConfigError(f"vectors of {name} have {vectors.rows} rows, its vocabulary {size}")
    for split in manifest.splits.values():
        if (rows := sum(file.rows for file in split.files)) != split.rows:
            raise ConfigError(f"a split has {split.rows} rows, its files {rows}")
        if set(split.lengths) != ({*_LENGTH_NAMES, "mean"} if split.rows else set()):
            named = ", ".join(split.lengths) or "missing"
            raise ConfigError(f"the lengths of a split of {split.rows} rows are {named}")
