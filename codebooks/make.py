"""`make_semantic_ids`: the vectors of a dataset -> codebooks, codes and their report, in a new folder."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.codebooks import bundle, report
from evenrank.codebooks.collisions import move_to_free, number_items, tuple_keys
from evenrank.codebooks.config import SemanticIdsConfig
from evenrank.codebooks.kmeans import POINTS_PER_CODE, Codebooks, OnStage, Rows, encode, parts, train_codebooks
from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.schema import ITEM_ID, Manifest, read_manifest
from evenrank.datasets.vectors import open_vectors

_LARGEST = 1e15  # of values of vectors, so that squared distances are finite in float32
_Begin = tuple[bundle.Bundle, Codebooks, NDArray[np.int32]]  # the codes that there are, [levels, items]


def make_semantic_ids(
    config: SemanticIdsConfig, *, on_stage: OnStage = lambda stage: None
) -> tuple[bundle.Bundle, dict[str, Any]]:
    """Make semantic ids of the item vectors of a dataset, and write `config.folder`.

    On a GPU if there is one. Vectors are read from the file in parts; memory is that of the sample that codebooks are
    made of, 256 vectors per code, and of the codes; balancing takes up to 128 codes^2 bytes. On the same machine, the
    same options give the same codes.

    Returns:
        What the bundle says of itself, and its report (see `report.py`).

    Raises:
        ConfigError: the folder exists, or there are fewer vectors than codes, or too many for the tuples of codes.
        DataError: the dataset has no vectors of items, or very large ones; or `append` is damaged, or of other
            items or vectors.
        MissingPackageError: faiss is not installed, there is no GPU, and the data are not small.
    """
    out, manifest, vectors = config.folder, read_manifest(config.dataset), open_vectors(config.dataset)
    has_vector = np.zeros(len(vectors), dtype=np.bool_)
    for part in parts(len(vectors), vectors.shape[1], on_stage, "vectors of items"):
        has_vector[part] = (block := vectors[part]).any(axis=1)
        if (largest := float(np.abs(block).max())) > _LARGEST:
            raise DataError(f"{config.dataset} has values of vectors up to {largest:.1e}, over 1e15; scale them down")
    with_vector = Rows(vectors, np.flatnonzero(has_vector))
    earlier, books, table = (
        _train(config, manifest, with_vector, on_stage)
        if config.append is None
        else _read(config, manifest, vectors.shape[1])
    )
    (base, size), sizes = books.prices.shape, earlier.codebook_sizes
    codes = np.full((len(vectors), len(table)), -1, dtype=np.int32)
    codes[: table.shape[1]] = table.T
    new, before = Rows(vectors, np.flatnonzero(has_vector & (codes[:, 0] < 0))), codes[codes[:, 0] >= 0, :base]
    made, taken = encode(new, books, on_stage), tuple_keys(before, size)
    numbers = number_items(taken, tuple_keys(made, size))
    largest_group = int(numbers.max(initial=-1)) + 1
    if earlier.collisions == "level":
        if config.append is None:
            sizes = (*sizes[:-1], max(size, 2 * largest_group))  # room for later items
        if largest_group > sizes[-1]:
            raise ConfigError(
                f"{largest_group:,} items have the same codes, and the last level of {config.append} has {sizes[-1]:,} "
                "codes; make semantic ids without --append, and train again"
            )
        made = np.concatenate([made, numbers[:, None].astype(np.int32)], axis=1)
    else:
        if (needed := len(before) + len(made)) > size**base:
            raise ConfigError(f"{needed:,} items need more than {size**base:,} tuples of codes; choose more --codes")
        move_to_free(new, made, taken, books, on_stage)
    codes[new.items] = made
    is_coded = codes[:, 0] >= 0
    found: dict[str, Any] = {
        "items": int(is_coded.sum()),
        "without_code": int((~is_coded[1:]).sum()),  # id 0 is no item
        "coded_now": len(made),
        "collisions": int((numbers > 0).sum()),
        "largest_group": largest_group,
        **report.usage(codes[is_coded], sizes),
        **report.fidelity(with_vector, codes[with_vector.items], books, on_stage),
    }
    vectors_sha256 = {"vectors": manifest.vectors[ITEM_ID].sha256}
    made_of = replace(earlier, codebook_sizes=sizes, items=manifest.ids[ITEM_ID], sha256=vectors_sha256)
    return bundle.write_bundle(out, made_of, np.ascontiguousarray(codes.T), books, found), found


def _train(config: SemanticIdsConfig, manifest: Manifest, vectors: Rows, on_stage: OnStage) -> _Begin:
    if len(vectors) < config.codes:
        raise ConfigError(
            f"{config.dataset} has {len(vectors):,} items with a vector, fewer than a level has codes, "
            f"{config.codes:,}; choose fewer --codes"
        )
    random = np.random.default_rng(config.seed & 0xFFFFFFFFFFFFFFFF)
    drawn = np.sort(random.choice(len(vectors), min(len(vectors), POINTS_PER_CODE * config.codes), replace=False))
    is_balanced = config.method == "balanced"
    shape = {"levels": config.levels, "codes": config.codes, "seed": config.seed}
    books = train_codebooks(vectors[drawn], **shape, is_balanced=is_balanced, on_stage=on_stage)
    empty = bundle.Bundle(
        method=config.method,
        collisions=config.collisions,
        seed=config.seed,
        codebook_sizes=(config.codes,) * (config.levels + (config.collisions == "level")),
        items=manifest.ids[ITEM_ID],
    )
    return empty, books, np.empty((len(empty.codebook_sizes), 0), dtype=np.int32)


def _read(config: SemanticIdsConfig, manifest: Manifest, width: int) -> _Begin:
    folder = config.append
    assert folder is not None
    earlier = bundle.read_bundle(folder)
    if not manifest.ids[ITEM_ID].extends(earlier.items.version):
        raise DataError(
            f"the items of {config.dataset} do not extend those of {folder}; preprocess it with --vocabulary of the "
            "dataset that these are of, or make semantic ids without --append"
        )
    books = Codebooks(*(np.load(bundle.check_file(folder / name, earlier.sha256.get(name))) for name in bundle.BOOKS))
    if (needed := books.centroids.shape[2]) != width:
        raise DataError(
            f"{config.dataset} has vectors of {width} numbers, the codebooks of {folder} {needed}; pass vectors of the "
            "same model"
        )
    return earlier, books, np.load(folder / bundle.CODES)
