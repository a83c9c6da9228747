import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from evenrank.codebooks import kmeans
from evenrank.codebooks.kmeans import Codebooks, Rows, encode, train_codebooks
from evenrank.codebooks.report import fidelity, usage
from tests.codebooks.crafted import vectors_of

QUIET: Any = lambda stage: None  # noqa: E731
ROWS = np.arange(4000)


@contextmanager
def without_faiss() -> Iterator[None]:
    """Hide faiss alone: `patch.dict` would forget all that is imported meanwhile, and faiss crashes if loaded twice."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "faiss", None)
        yield


def train(vectors: NDArray[Any], *, is_balanced: bool = False, seed: int = 0) -> Codebooks:
    return train_codebooks(vectors.copy(), levels=2, codes=32, is_balanced=is_balanced, seed=seed, on_stage=QUIET)


def error_of(vectors: NDArray[Any], books: Codebooks) -> float:
    rows = Rows(vectors, ROWS)
    return fidelity(rows, encode(rows, books, QUIET), books, QUIET)["reconstruction_error"]


def test_pytorch_makes_codebooks_as_good_as_those_of_faiss() -> None:
    pytest.importorskip("faiss")
    vectors = vectors_of(len(ROWS), 16, centers=40)
    of_faiss = error_of(vectors, train(vectors))
    with without_faiss():
        of_torch = error_of(vectors, train(vectors))
    assert of_torch == pytest.approx(of_faiss, rel=0.02)
    assert of_faiss < 0.2


def test_large_samples_need_faiss() -> None:
    vectors = vectors_of(100)
    limit = patch.object(kmeans, "_MOST_WITHOUT_FAISS", 100 * 6 * 32 - 1)
    with without_faiss(), limit, pytest.raises(ImportError, match="faiss"):
        train(vectors)


@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.parametrize("is_balanced", [False, True])
def test_the_same_seed_makes_the_same_codebooks(is_balanced: bool, is_missing: bool) -> None:
    vectors = vectors_of(600)
    with without_faiss() if is_missing else nullcontext():
        first, second = (train(vectors, is_balanced=is_balanced, seed=5) for _ in range(2))
        other = train(vectors, is_balanced=is_balanced, seed=6)
    assert all(np.array_equal(*both) for both in zip(first, second, strict=True))
    assert not np.array_equal(first.centroids, other.centroids)


def test_balanced_codes_are_used_about_equally_often() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(len(ROWS), 6)) * np.exp(rng.normal(size=(len(ROWS), 1)))  # a few items are far away
    vectors = vectors.astype(np.float32)
    plain, balanced = train(vectors), train(vectors, is_balanced=True)
    bits = [usage(encode(Rows(vectors, ROWS), books, QUIET), (32, 32))["entropy_bits"] for books in (plain, balanced)]
    assert max(bits[0]) < 4.5 < 4.95 < min(bits[1]) <= 5  # of log2(32)
    assert error_of(vectors, plain) < error_of(vectors, balanced) < 3 * error_of(vectors, plain)
    assert not plain.prices.any()


def test_balancing_in_parts_of_points_gives_about_the_same_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, softmax, sizes = vectors_of(600), torch.Tensor.softmax, list[int]()
    whole = train(vectors, is_balanced=True)

    def count(scores: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(scores.numel())
        return softmax(scores, dim)

    monkeypatch.setattr(kmeans, "_VALUES_AT_ONCE", 32 * 7)
    monkeypatch.setattr(torch.Tensor, "softmax", count)
    in_parts = train(vectors, is_balanced=True)
    assert max(sizes) == 32 * 7  # or temporary values would take a multiple of the memory
    assert np.allclose(in_parts.prices, whole.prices, atol=1e-3)


def test_codes_are_the_nearest_of_what_is_left_with_prices_added(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    books = Codebooks(rng.normal(size=(3, 8, 4)).astype(np.float32), rng.random((3, 8)).astype(np.float32))
    vectors = rng.normal(size=(50, 4)).astype(np.float16)
    expected = []
    for vector in vectors.astype(np.float64):
        found, left = [], vector
        for centroids, prices in zip(*books, strict=True):
            found.append(int((np.square(left - centroids).sum(axis=1) + prices).argmin()))
            left = left - centroids[found[-1]]
        expected.append(found)
    items = rng.permutation(50)[:40]
    monkeypatch.setattr(kmeans, "_VALUES_AT_ONCE", 8 * 7)  # in parts of 7 items
    assert encode(Rows(vectors, items), books, QUIET).tolist() == [expected[item] for item in items]


def test_codes_without_points_get_the_worst_ones() -> None:
    vectors = np.repeat(np.arange(40, dtype=np.float32), [400] + [1] * 39)[:, None]  # most draws are of the same point
    with without_faiss():
        books = train(vectors)
    codes = encode(Rows(vectors, np.arange(len(vectors))), books, QUIET)
    assert len(np.unique(codes[:, 0])) == 32
