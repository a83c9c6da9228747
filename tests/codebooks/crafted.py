"""Datasets of vectors alone, without rows."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.codebooks import SemanticIdsConfig, make_semantic_ids
from evenrank.codebooks.bundle import Bundle
from evenrank.datasets.schema import (
    ACTION,
    ITEM_ID,
    USER_ID,
    IdSummary,
    Manifest,
    VectorFile,
    VocabularyVersion,
    content_hash,
    sha256_of,
)


def vectors_of(items: int, width: int = 6, *, seed: int = 0, centers: int = 12) -> NDArray[np.float32]:
    """Return vectors in groups of different sizes: those of the first items are the same for any number of items."""
    rng = np.random.default_rng(seed)
    means, noise = rng.normal(size=(centers, width)), np.random.default_rng(seed + 1).normal(size=(items, width))
    of_item = means[np.arange(items) % centers % (1 + np.arange(items) % 5)]
    return np.asarray(of_item + 0.2 * noise, dtype=np.float32)


def write_dataset(folder: Path, vectors: Any, vocabulary: str = "a") -> Path:
    """Write a dataset of items 0, ..., whose vectors are these; its vocabulary has one version per item."""
    array = np.asarray(vectors, dtype=np.float32)
    array = np.concatenate([np.zeros_like(array[:1]), array])  # of id 0
    folder.mkdir(parents=True)
    np.save(folder / "item_vectors.npy", array)
    versions = [
        VocabularyVersion(size=size, sha256=hashlib.sha256(f"{vocabulary}{size}".encode()).hexdigest())
        for size in range(1, len(array) + 1)
    ]
    ids = IdSummary(rule="dense", kind="int64", versions=tuple(versions))
    file = VectorFile(
        path="item_vectors.npy",
        rows=len(array),
        sha256=sha256_of(folder / "item_vectors.npy"),
        width=array.shape[1],
        dtype="float32",
        missing=int((~array[1:].any(axis=1)).sum()),
    )
    manifest = Manifest(
        dataset="crafted",
        vocabulary_sizes={USER_ID: 1, ITEM_ID: len(array), ACTION: 1},
        context_labels={},
        ids={ITEM_ID: ids, USER_ID: ids},
        vectors={ITEM_ID: file},
    )
    replace(manifest, content_hash=content_hash(manifest)).write(folder)
    return folder


def make(dataset: Path, out: Path, **options: Any) -> tuple[Bundle, dict[str, Any], NDArray[np.int32]]:
    """Return a bundle, its report, and its codes [items, levels]."""
    bundle, report = make_semantic_ids(SemanticIdsConfig(dataset=dataset, out=out, **options))
    return bundle, report, np.load(out / "codes.npy").T
