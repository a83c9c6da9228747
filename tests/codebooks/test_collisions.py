from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.codebooks.collisions import move_to_free, number_items, tuple_keys
from evenrank.codebooks.kmeans import Codebooks, Rows, encode

QUIET: Any = lambda stage: None  # noqa: E731


def books_of(*levels: list[float]) -> Codebooks:
    """Return codebooks of numbers, vectors of width 1."""
    centroids = np.array(levels, dtype=np.float32)[:, :, None]
    return Codebooks(centroids, np.zeros(centroids.shape[:2], dtype=np.float32))


def rows_of(vectors: NDArray[Any]) -> Rows:
    return Rows(vectors, np.arange(len(vectors)))


def plain_numbers(before: list[int], keys: list[int]) -> list[int]:
    seen, numbers = Counter(before), []
    for key in keys:
        numbers.append(seen[key])
        seen[key] += 1
    return numbers


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_items_with_the_same_codes_are_numbered_in_their_order(before: list[int], keys: list[int]) -> None:
    arrays = (np.array(part, dtype=np.int64) for part in (before, keys))
    assert number_items(*arrays).tolist() == plain_numbers(before, keys)


MOVES = {  # of items with the codes 0 1, given what was taken: levels 0 10 20 and 0 1 2, so that tuples are numbers
    "the first keeps its own": ([1.0], [], [[0, 1]]),
    "the nearest code of the last level": ([1.0, 1.2], [], [[0, 1], [0, 2]]),
    "what was taken before": ([1.1, 1.2], [1], [[0, 2], [0, 0]]),  # key 1 is 0 1
    "another prefix if all below is taken": ([1.0], [0, 1, 2], [[1, 0]]),
    "and then the nearest below it": ([1.0, 1.0], [0, 1, 2], [[1, 0], [1, 1]]),
    "the last free one": ([1.0], [0, 1, 2, 3, 4, 5, 6, 7], [[2, 2]]),
}


@pytest.mark.parametrize(("vectors", "before", "expected"), MOVES.values(), ids=MOVES)
def test_an_item_moves_to_the_nearest_free_tuple(vectors: list[float], before: list[int], expected: Any) -> None:
    codes = np.array([[0, 1]] * len(vectors), dtype=np.int32)
    books = books_of([0, 10, 20], [0, 1, 2])
    move_to_free(rows_of(np.array(vectors)[:, None]), codes, np.array(before, dtype=np.int64), books, QUIET)
    assert codes.tolist() == expected


def plain_move(
    vectors: NDArray[Any], codes: list[tuple[int, ...]], before: set[tuple[int, ...]], books: Codebooks
) -> Any:
    """Move items by trying all tuples."""
    size, levels = books.centroids.shape[1], len(codes[0])
    taken = before | set(codes)
    owners, result = set(before), []
    for item, own in enumerate(codes):
        found: tuple[int, ...] = own
        if own in owners:
            found, residual = (), vectors[item].astype(np.float32)
            for level in range(levels):
                every = [key for key in np.ndindex(*[size] * levels) if key[: level + 1][:-1] == found]
                free = {key[level] for key in every if key not in taken}
                distances = np.square(books.centroids[level] - residual).sum(axis=1) + books.prices[level]
                code = min(free, key=lambda one: (distances[one], one))
                found, residual = (*found, code), residual - books.centroids[level, code]
            taken.add(found)
        owners.add(own)
        result.append(found)
    return result


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 24))
def test_moved_items_have_tuples_of_their_own_as_by_trying_all(seed: int, num_items: int) -> None:
    rng = np.random.default_rng(seed)
    books = Codebooks(rng.normal(size=(3, 3, 2)).astype(np.float32), rng.random((3, 3)).astype(np.float32))
    vectors, every = rng.normal(size=(num_items, 2)), list(np.ndindex(3, 3, 3))
    before = {every[i] for i in rng.choice(27, rng.integers(0, 28 - num_items), replace=False)}
    codes = encode(rows_of(vectors), books, QUIET)
    expected = plain_move(vectors, [tuple(row) for row in codes.tolist()], before, books)
    keys = tuple_keys(np.array([*before], dtype=np.int32).reshape(-1, 3), 3)
    move_to_free(rows_of(vectors), codes, keys, books, QUIET)
    assert [tuple(row) for row in codes.tolist()] == expected
    assert len({*expected, *before}) == num_items + len(before)
