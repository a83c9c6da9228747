"""What codes are worth: `report.json`.

items, without_vector           numbers of items with and without codes
collisions, largest_group       items that share the codes of the codebooks, before they were told apart; the most
coverage, entropy_bits, dead    per level: share of codes in use, entropy of their items, number of unused ones
reconstruction_error            mean |x - y|^2 of vectors x and sums of centroids y, as a share of the variance of x
neighbours_kept                 of the 10 nearest x of an item, the share that is among its 10 nearest y
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.semantic_ids.kmeans import Codebooks, OnStage

_NEIGHBOURS, _QUERIES, _CANDIDATES = 10, 1000, 100_000  # the last two are samples, if there are more items
_QUERIES_AT_ONCE, _VALUES_AT_ONCE = 50, 1 << 24


def usage(codes: NDArray[np.int32], sizes: tuple[int, ...]) -> dict[str, list[float]]:
    """Return coverage, entropy and dead codes of the levels of codes [n, levels]."""
    counts = [np.bincount(codes[:, level], minlength=size) for level, size in enumerate(sizes)]
    shares = [count[count > 0] / count.sum() for count in counts]
    return {
        "coverage": [len(share) / size for share, size in zip(shares, sizes, strict=True)],
        "entropy_bits": [abs(float(share @ np.log2(share))) for share in shares],
        "dead": [size - len(share) for share, size in zip(shares, sizes, strict=True)],
    }


def reconstruct(codes: NDArray[np.int32], books: Codebooks) -> NDArray[np.float32]:
    """Return the sum of the centroids of codes [n, levels or more]: [n, d]."""
    total: NDArray[np.float32] = books.centroids[0][codes[:, 0]]
    for level, centroids in enumerate(books.centroids[1:], 1):
        total += centroids[codes[:, level]]
    return total


def reconstruction_error(
    vectors: NDArray[Any], items: NDArray[np.int64], codes: NDArray[np.int32], books: Codebooks, on_stage: OnStage
) -> float:
    """Return the squared error of rows `items` of `vectors`, relative to their variance; 0 if they are all the same."""
    width, error, squares = vectors.shape[1], 0.0, 0.0
    total, rows = np.zeros(width), max(1, _VALUES_AT_ONCE // width)
    for begin in range(0, len(items), rows):
        on_stage(f"reconstruction of items: {begin:,} of {len(items):,}")
        chunk = vectors[items[begin : begin + rows]].astype(np.float32)
        error += float(np.square(chunk - reconstruct(codes[begin : begin + rows], books)).sum(dtype=np.float64))
        squares += float(np.square(chunk).sum(dtype=np.float64))
        total += chunk.sum(axis=0, dtype=np.float64)
    variance = squares - float(total @ total) / max(1, len(items))
    return error / variance if variance > 0 else 0.0


def neighbours_kept(
    vectors: NDArray[Any], items: NDArray[np.int64], codes: NDArray[np.int32], books: Codebooks
) -> float:
    """Return the share of nearest items that are nearest by reconstruction; of equally near ones, the expected one."""
    if len(items) < 2:
        return 1.0
    drawn, most = np.random.default_rng(0), min(_NEIGHBOURS, len(items) - 1)
    sample = np.sort(drawn.choice(len(items), min(len(items), _CANDIDATES), replace=False))
    queries = drawn.choice(len(sample), min(len(sample), _QUERIES), replace=False)
    points, kept = vectors[items[sample]].astype(np.float32), 0.0
    tuples, of_point = np.unique(codes[sample], axis=0, return_inverse=True)
    of_point, made = of_point.reshape(-1), reconstruct(tuples, books)  # the same distance for the same codes
    for begin in range(0, len(queries), _QUERIES_AT_ONCE):
        chunk = queries[begin : begin + _QUERIES_AT_ONCE]
        near = np.argpartition(_distances(points[chunk], points, chunk, slice(None)), most - 1)[:, :most]
        by_made = _distances(made[of_point[chunk]], made, chunk, of_point)
        limit = np.partition(by_made, most - 1)[:, most - 1 : most]
        is_nearer, is_tied = by_made < limit, by_made == limit
        places = (most - is_nearer.sum(axis=1, keepdims=True)) / is_tied.sum(axis=1, keepdims=True)
        kept += float(np.take_along_axis(is_nearer + is_tied * places, near, axis=1).sum())
    return kept / (most * len(queries))


def _distances(queries: NDArray[np.float32], points: NDArray[np.float32], own: Any, place: Any) -> NDArray[np.float32]:
    """Return squared distances less the query's norm, [queries, points in their places]; inf to the query's `own`."""
    found = (np.square(points).sum(axis=1) - 2 * (queries @ points.T))[:, place]
    found[np.arange(len(queries)), own] = np.inf
    return np.asarray(found, dtype=np.float32)
