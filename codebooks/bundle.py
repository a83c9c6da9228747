"""The folder of semantic ids, and what its `bundle.json` says.

    OUT/codes.npy        int32 [levels, items]; -1 for items without a vector
    OUT/codebooks.npy    float32 [levels, codes, d], without the level that numbers items with the same codes
    OUT/prices.npy       float32 [levels, codes], which `balanced` adds to squared distances; else 0
    OUT/report.json      see `report.py`
    OUT/bundle.json

A bundle is never changed: appending writes a new one, whose `codes` have one version more.
"""

import json
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenrank.codebooks.config import Collisions, Method
from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.files import open_regular, write_text
from evenrank.core.settings import construct
from evenrank.datasets.schema import ITEM_ID, IdSummary, Manifest, VocabularyVersion, sha256_of

BUNDLE, CODES, REPORT, BOOKS = "bundle.json", "codes.npy", "report.json", ("codebooks.npy", "prices.npy")
RULE = "semantic-ids"  # of the versions of codes, among those of ids
_FORMAT_VERSION = 1
_REMEDY = "make it again with `evenrank semantic-ids`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """`bundle.json`: what semantic ids were made of."""

    format_version: int = _FORMAT_VERSION
    method: Method
    collisions: Collisions
    seed: int
    codebook_sizes: tuple[int, ...]
    """Codes per level; appending never changes them, so that a trained model fits."""
    items: IdSummary
    """The ids of the items, as in the manifest of the dataset."""
    codes: IdSummary = IdSummary(rule=RULE, kind="int64")
    """The versions of the codes: a later one has all codes of the earlier ones; SHA-256 of codes.npy."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Of `codebooks.npy` and `prices.npy`, and of the dataset's `vectors`."""

    def check_items(self, manifest: Manifest) -> None:
        """Raise a DataError unless ids of items mean the same in a dataset, which may have fewer or more of them."""
        ids = manifest.ids.get(ITEM_ID, self.items)  # Parquet of other programs does not say what its ids mean
        if not (ids.extends(self.items.version) or self.items.extends(ids.version)):
            raise DataError(
                f"the semantic ids are of other items than those of the dataset {manifest.dataset!r}; make them of it, "
                "or preprocess it with --vocabulary of theirs"
            )


def read_bundle(folder: Path | str) -> Bundle:
    """Return what the semantic ids in a folder were made of.

    Raises:
        DataError: `bundle.json` is missing or malformed, or `codes.npy` is not the one that it describes.
    """
    path = Path(folder) / BUNDLE
    with open_regular(path) as file:
        try:
            raw = json.loads(file.read())
            if (version := raw.get("format_version")) != _FORMAT_VERSION:
                raise ConfigError(f"it has format version {version!r}, not {_FORMAT_VERSION}")
            bundle = construct(Bundle, raw, BUNDLE)
            if not bundle.codes.versions:
                raise ConfigError("codes has no versions")
        except (ValueError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} cannot be read ({first_line(error)}); {_REMEDY}") from error
    check_file(Path(folder) / CODES, bundle.codes.versions[-1].sha256)
    return bundle


def check_file(path: Path, sha256: str | None) -> Path:
    """Return the path of a file of a bundle, or raise a DataError unless it has a SHA-256."""
    if sha256_of(path) != sha256:
        raise DataError(f"{path} does not have the SHA-256 in {BUNDLE}; {_REMEDY}")
    return path


def write_bundle(
    folder: Path, earlier: Bundle, codes: NDArray[np.int32], books: Iterable[NDArray[np.float32]], report: object
) -> Bundle:
    """Write a bundle, with one version of the codes [levels, items] more; the whole folder or nothing."""
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.mkdir(parents=True)
        hashes = {}
        for name, array in zip((CODES, *BOOKS), (codes, *books), strict=True):
            np.save(partial / name, array)
            hashes[name] = sha256_of(partial / name)
        version = VocabularyVersion(size=codes.shape[1], sha256=hashes.pop(CODES))
        versions = replace(earlier.codes, versions=(*earlier.codes.versions, version))
        bundle = replace(earlier, codes=versions, sha256={**hashes, **earlier.sha256})
        for name, content in ((REPORT, report), (BUNDLE, asdict(bundle))):
            write_text(partial / name, json.dumps(content, indent=2) + "\n")
        partial.rename(folder)
    except OSError as error:
        raise DataError(
            f"{folder} could not be written: {error.strerror or error}; choose another --out, or free some space"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return bundle
