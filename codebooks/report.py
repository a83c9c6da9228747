"""What codes are worth: `report.json`, whose entries docs/reference/semantic-ids.md lists."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.codebooks.kmeans import Codebooks, OnStage, Rows, parts

_NEIGHBOURS, _QUERIES, _CANDIDATES = 10, 1000, 100_000  # the last two are samples, if there are more items


def usage(codes: NDArray[np.int32], sizes: tuple[int, ...]) -> dict[str, list[float]]:
    """Return coverage, entropy and dead codes of the levels of codes [n, levels]."""
    counts = [np.bincount(codes[:, level], minlength=size) for level, size in enumerate(sizes)]
    shares = [count[count > 0] / count.sum() for count in counts]
    return {
        "coverage": [len(share) / size for share, size in zip(shares, sizes, strict=True)],
        "entropy_bits": [abs(float(share @ np.log2(share))) for share in shares],
        "dead": [size - len(share) for share, size in zip(shares, sizes, strict=True)],
    }


def fidelity(vectors: Rows, codes: NDArray[np.int32], books: Codebooks, on_stage: OnStage) -> dict[str, float]:
    """Return how near vectors [n, d] are to the sums of the centroids of their codes [n, levels or more].

    `reconstruction_error` is the squared error relative to the variance of the vectors; `neighbours_kept` the share of
    the nearest vectors of one that have the nearest sums and, of equally near sums, the expected share.
    """
    error, squares, total = 0.0, 0.0, np.zeros(books.centroids.shape[2])
    for part in parts(len(vectors), len(total), on_stage, "reconstruction of items"):
        points = vectors[part]
        error += float(np.square(points - _sums(codes[part], books)).sum(dtype=np.float64))
        squares += float(np.square(points).sum(dtype=np.float64))
        total += points.sum(axis=0, dtype=np.float64)
    variance = squares - float(total @ total) / max(1, len(vectors))
    kept = _neighbours_kept(vectors, codes, books)
    return {"reconstruction_error": error / variance if variance > 0 else 0.0, "neighbours_kept": kept}


def _sums(codes: NDArray[np.int32], books: Codebooks) -> NDArray[np.float32]:
    total: NDArray[np.float32] = books.centroids[0][codes[:, 0]]
    for level, centroids in enumerate(books.centroids[1:], 1):
        total += centroids[codes[:, level]]
    return total


def _neighbours_kept(vectors: Rows, codes: NDArray[np.int32], books: Codebooks) -> float:
    if (most := min(_NEIGHBOURS, len(vectors) - 1)) < 1:
        return 1.0
    drawn, kept = np.random.default_rng(0), 0.0
    sample = np.sort(drawn.choice(len(vectors), min(len(vectors), _CANDIDATES), replace=False))
    queries = drawn.choice(len(sample), min(len(sample), _QUERIES), replace=False)
    points, (tuples, place) = vectors[sample], np.unique(codes[sample], axis=0, return_inverse=True)
    place, sums = place.reshape(-1), _sums(tuples, books)  # by tuple: equal codes are equally far, to the last bit
    for query in np.array_split(queries, -(-len(queries) // 50)):
        near = np.argpartition(_distances(points[query], points, query, slice(None)), most - 1)[:, :most]
        distances = _distances(sums[place[query]], sums, query, place)
        limit = np.partition(distances, most - 1)[:, most - 1 : most]
        is_nearer, is_tied = distances < limit, distances == limit
        places = (most - is_nearer.sum(axis=1, keepdims=True)) / is_tied.sum(axis=1, keepdims=True)
        kept += float(np.take_along_axis(is_nearer + is_tied * places, near, axis=1).sum())
    return kept / (most * len(queries))


def _distances(queries: NDArray[np.float32], points: NDArray[np.float32], own: Any, place: Any) -> NDArray[np.float32]:
    """Return squared distances less the query's norm, [queries, points in their places]; inf to the query's `own`."""
    found: NDArray[np.float32] = (np.square(points).sum(axis=1) - 2 * (queries @ points.T))[:, place]
    found[np.arange(len(queries)), own] = np.inf
    return found
