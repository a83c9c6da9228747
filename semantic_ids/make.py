"""`make_semantic_ids`: the vectors of a dataset -> codebooks, codes and their report, in a new folder."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.schema import ITEM_ID, IdSummary, Manifest, read_manifest
from evenrank.datasets.vectors import open_vectors
from evenrank.semantic_ids import bundle, report
from evenrank.semantic_ids.collisions import move_to_free, number_items, tuple_keys
from evenrank.semantic_ids.config import SemanticIdsConfig
from evenrank.semantic_ids.kmeans import POINTS_PER_CODE, Codebooks, encode, train_codebooks

_VALUES_AT_ONCE = 1 << 24


def make_semantic_ids(
    config: SemanticIdsConfig, *, on_stage: Callable[[str], None] = lambda stage: None
) -> tuple[bundle.Bundle, dict[str, Any]]:
    """Make semantic ids of the item vectors of a dataset, and write `config.folder`.

    On a GPU if there is one. Vectors are read from the file in parts; memory is that of the sample that codebooks are
    made of, 256 vectors per code, and of the codes. On the same machine, the same options give the same codes.

    Returns:
        What the bundle says of itself, and its report (see `report.py`).

    Raises:
        ConfigError: the folder exists, or the items have fewer vectors than a level has codes, or need more tuples.
        DataError: the dataset has no vectors of items, or `append` is damaged or of other items or vectors.
        MissingPackageError: faiss is not installed, there is no GPU, and the data are not small.
    """
    out, dataset = config.folder, config.dataset
    manifest, vectors = read_manifest(dataset), open_vectors(dataset)
    has_vector = _have_vectors(vectors, on_stage)
    begin = _begin_new if config.append is None else _read_earlier
    earlier, table, books = begin(config, manifest, vectors, has_vector, on_stage)
    (base, size), sizes = books.prices.shape, earlier.codebook_sizes
    codes = np.full((len(vectors), len(table)), -1, dtype=np.int32)
    codes[: table.shape[1]] = table.T
    items, before = np.flatnonzero(has_vector & (codes[:, 0] < 0)), tuple_keys(codes[codes[:, 0] >= 0, :base], size)
    made = encode(vectors, items, books, on_stage)
    numbers = number_items(before, tuple_keys(made, size))
    largest_group = int(numbers.max(initial=-1)) + 1
    if earlier.collisions == "level":
        if config.append is None:
            sizes = (*sizes[:-1], max(sizes[-1], 2 * largest_group))  # room for later items
        if largest_group > sizes[-1]:
            raise ConfigError(
                f"{largest_group:,} items have the same codes, and the last level of {config.append} has {sizes[-1]:,} "
                "codes; make semantic ids without --append, and train again"
            )
        made = np.concatenate([made, numbers[:, None].astype(np.int32)], axis=1)
    else:
        if (needed := len(before) + len(made)) > size**base:
            raise ConfigError(f"{needed:,} items need more than {size**base:,} tuples of codes; choose more --codes")
        move_to_free(vectors, items, made, before, books, on_stage)
    codes[items] = made
    coded = np.flatnonzero(codes[:, 0] >= 0)
    found: dict[str, Any] = {
        "items": len(coded),
        "without_code": len(codes) - 1 - len(coded),  # id 0 is no item
        "coded_now": len(items),
        "collisions": int((numbers > 0).sum()),
        "largest_group": largest_group,
        **report.usage(codes[coded], sizes),
    }
    coded = coded[has_vector[coded]]  # an earlier one may have lost its vector
    on_stage("nearest items")
    found["neighbours_kept"] = report.neighbours_kept(vectors, coded, codes[coded], books)
    found["reconstruction_error"] = report.reconstruction_error(vectors, coded, codes[coded], books, on_stage)
    vectors_sha256 = {"vectors": manifest.vectors[ITEM_ID].sha256}
    made_of = replace(earlier, codebook_sizes=sizes, items=manifest.ids[ITEM_ID], sha256=vectors_sha256)
    return bundle.write_bundle(out, made_of, np.ascontiguousarray(codes.T), books, found), found


def _have_vectors(vectors: NDArray[Any], on_stage: Callable[[str], None]) -> NDArray[np.bool_]:
    """Return whether each item has a vector: one that is not 0."""
    has_vector, rows = np.zeros(len(vectors), dtype=np.bool_), max(1, _VALUES_AT_ONCE // vectors.shape[1])
    for begin in range(0, len(vectors), rows):
        on_stage(f"vectors of items: {begin:,} of {len(vectors):,}")
        has_vector[begin : begin + rows] = vectors[begin : begin + rows].any(axis=1)
    return has_vector


_Begin = tuple[bundle.Bundle, NDArray[np.int32], Codebooks]  # codes [levels, items] and the codebooks of more


def _begin_new(
    config: SemanticIdsConfig,
    manifest: Manifest,
    vectors: NDArray[Any],
    has_vector: NDArray[np.bool_],
    on_stage: Callable[[str], None],
) -> _Begin:
    items, levels = np.flatnonzero(has_vector), config.levels + (config.collisions == "level")
    if len(items) < config.codes:
        raise ConfigError(
            f"{config.dataset} has {len(items):,} items with a vector, fewer than a level has codes, {config.codes:,}; "
            "choose fewer --codes"
        )
    random = np.random.default_rng(config.seed & 0xFFFFFFFFFFFFFFFF)
    drawn = np.sort(random.choice(len(items), min(len(items), POINTS_PER_CODE * config.codes), replace=False))
    sample, is_balanced = vectors[items[drawn]].astype(np.float32), config.method == "balanced"
    options: Any = {"is_balanced": is_balanced, "seed": config.seed, "on_stage": on_stage}
    books = train_codebooks(sample, config.levels, config.codes, **options)
    empty = bundle.Bundle(
        method=config.method,
        collisions=config.collisions,
        seed=config.seed,
        codebook_sizes=(config.codes,) * levels,
        items=manifest.ids[ITEM_ID],
        codes=IdSummary(rule=bundle.RULE, kind="int64"),
        sha256={},
    )
    return empty, np.empty((levels, 0), dtype=np.int32), books


def _read_earlier(config: SemanticIdsConfig, manifest: Manifest, vectors: NDArray[Any], *_: object) -> _Begin:
    folder = config.append
    assert folder is not None
    earlier = bundle.read_bundle(folder)
    if not manifest.ids[ITEM_ID].extends(earlier.items.version):
        raise DataError(
            f"the items of {config.dataset} do not extend those of {folder}; preprocess it with --vocabulary of the "
            "dataset that these are of, or make semantic ids without --append"
        )
    books = Codebooks(*(np.load(bundle.check_file(folder / name, earlier.sha256.get(name))) for name in bundle.BOOKS))
    if (width := books.centroids.shape[2]) != vectors.shape[1]:
        raise DataError(
            f"{config.dataset} has vectors of {vectors.shape[1]} numbers, the codebooks of {folder} {width}; pass "
            "vectors of the same model"
        )
    return earlier, np.load(folder / bundle.CODES), books
