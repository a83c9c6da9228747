"""The vectors of a dataset, opened from what it can be opened as, and what is noticed when the file changes."""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import DataError
from evenrank.datasets import open_store, open_vectors, read_manifest, vectors
from evenrank.datasets.schema import VECTOR_FILES, VectorFile, sha256_of
from evenrank.datasets.stream import open_stream
from tests.datasets.crafted import write_manifest
from tests.s3_server import S3


def add_vectors(dataset: Path, of: str = "item_id", width: int = 5, dtype: str = "float16") -> np.ndarray[Any, Any]:
    """Give a dataset drawn vectors, and return them."""
    manifest = read_manifest(dataset)
    size = manifest.vocabulary_sizes[of]
    values = np.random.default_rng(0).standard_normal((size, width)).astype(dtype)
    values[0] = 0
    np.save(path := dataset / VECTOR_FILES[of], values)
    sha256 = sha256_of(path)
    file = VectorFile(path=path.name, rows=size, sha256=sha256, width=width, dtype=dtype, missing=0)
    write_manifest(replace(manifest, vectors={**manifest.vectors, of: file}), dataset)
    return values


def test_vectors_are_the_same_from_all_that_a_dataset_is_opened_as(dataset: Path, s3: S3) -> None:
    expected = {"item_id": add_vectors(dataset), "user_id": add_vectors(dataset, "user_id", 4, "float32")}
    s3.put(dataset, "vectors")
    url = s3.url("vectors")
    for source in (
        dataset,
        str(dataset),
        url,
        *(open_store(place, "eval") for place in (dataset, url)),
        *(open_stream(place, "eval") for place in (dataset, url)),
        pickle.loads(pickle.dumps(open_store(dataset))),
    ):
        for of, values in expected.items():
            found = open_vectors(source, of)
            assert isinstance(found, np.memmap)
            assert not found.flags.writeable
            assert (found.dtype, found.tolist()) == (values.dtype, values.tolist())
    for of in expected:  # fetched once each
        assert s3.num_reads(f"vectors/{VECTOR_FILES[of]}") == 1


def test_a_file_is_read_for_its_hash_once_and_again_after_a_change(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, checked = add_vectors(dataset), list[Any]()
    check = vectors._check

    def count(path: Any, *given: Any) -> None:
        checked.append(path)
        check(path, *given)

    monkeypatch.setattr(vectors, "_check", count)
    path = dataset / VECTOR_FILES["item_id"]
    for _ in range(2):
        open_vectors(dataset)
    os.utime(path)
    for _ in range(2):
        assert open_vectors(open_store(dataset)).tolist() == values.tolist()
    assert checked == [path] * 2
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a program does that restores times
    with pytest.raises(DataError, match=r"item_vectors.npy does not have the SHA-256 in its manifest; preprocess the"):
        open_vectors(dataset)


def test_a_copy_of_a_url_that_is_not_that_of_the_manifest_is_not_kept(dataset: Path, s3: S3) -> None:
    add_vectors(dataset)
    s3.put(dataset, "changed-vectors")
    (dataset / "item_vectors.npy").write_bytes(b"other")
    s3.put(dataset / "item_vectors.npy", "changed-vectors/item_vectors.npy")
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"^s3://.*item_vectors.npy does not have the SHA-256 in its manifest; prep"
        ):
            open_vectors(s3.url("changed-vectors"))


CHANGES: dict[str, Callable[[VectorFile], VectorFile]] = {
    "hash": lambda file: replace(file, sha256="0" * 64),
    "width": lambda file: replace(file, width=file.width + 1),
    "dtype": lambda file: replace(file, dtype="float32"),
}


def test_vectors_are_a_part_of_the_content_hash_and_datasets_without_have_the_one_of_before(dataset: Path) -> None:
    manifest = read_manifest(dataset)
    add_vectors(dataset)
    found = read_manifest(dataset)
    assert found.content_hash != manifest.content_hash
    for change in CHANGES.values():
        replace(found, vectors={"item_id": change(found.vectors["item_id"])}).write(dataset)
        with pytest.raises(DataError, match="has content hash"):
            read_manifest(dataset)
    wrong: dict[str, Any] = {"rows": 3, "width": 0, "dtype": "float64", "path": "../x"}
    for field, value in wrong.items():
        write_manifest(
            replace(found, vectors={"item_id": replace(found.vectors["item_id"], **{field: value})}), dataset
        )
        with pytest.raises(DataError, match="has a missing or malformed field"):
            read_manifest(dataset)
    write_manifest(replace(found, vectors={}), dataset)
    assert read_manifest(dataset) == manifest
