from typing import Any

import numpy as np
import pytest

from evenrank.semantic_ids import report
from evenrank.semantic_ids.kmeans import Codebooks
from evenrank.semantic_ids.report import neighbours_kept, reconstruction_error, usage

QUIET: Any = lambda stage: None  # noqa: E731
# Codes 0 and 1 of the first level are -4 and 4, those of the second -1 and 1.
BOOKS = Codebooks(np.array([[[-4], [4]], [[-1], [1]]], dtype=np.float32), np.zeros((2, 2), dtype=np.float32))


def test_usage_of_levels_by_hand() -> None:
    codes = np.array([[0, 0, 0], [0, 1, 2], [1, 2, 0], [1, 3, 0]], dtype=np.int32)
    assert usage(codes, (2, 4, 5)) == {
        "coverage": [1.0, 1.0, 0.4],
        "entropy_bits": [1.0, 2.0, pytest.approx(0.811278)],  # of 3/4 and 1/4
        "dead": [0, 0, 3],
    }


def test_reconstruction_error_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.array([[9.0], [-5], [-3], [3], [6]], dtype=np.float16)  # the first is no item
    codes = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=np.int32)  # -5, -3, 3, 5: only the last is wrong, by 1
    variance = np.var([-5, -3, 3, 6]) * 4
    monkeypatch.setattr(report, "_VALUES_AT_ONCE", 3)
    assert reconstruction_error(vectors, np.arange(1, 5), codes, BOOKS, QUIET) == pytest.approx(1 / variance)
    same = np.ones((2, 1), dtype=np.float32)
    assert reconstruction_error(same, np.arange(2), codes[:2], BOOKS, QUIET) == 0


def test_neighbours_kept_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_NEIGHBOURS", 1)
    vectors = np.array([[-5.0], [-3.2], [3], [4.4]])
    items = np.arange(4)
    # Sums are -5, -3, 3 and 3: the nearest of the third and fourth are each other, and of the first two.
    assert neighbours_kept(vectors, items, np.array([[0, 0], [0, 1], [1, 0], [1, 0]], dtype=np.int32), BOOKS) == 1
    # All have the same sum, so that each is one of three equally near ones.
    assert neighbours_kept(vectors, items, np.zeros((4, 2), dtype=np.int32), BOOKS) == pytest.approx(1 / 3)
    # Sums are -5, 3, -3 and 5: the nearest are 2, 3, 0 and 1 instead of 1, 0, 3 and 2.
    swapped = np.array([[0, 0], [1, 0], [0, 1], [1, 1]], dtype=np.int32)
    assert neighbours_kept(vectors, items, swapped, BOOKS) == 0
    assert neighbours_kept(vectors[:1], items[:1], swapped[:1], BOOKS) == 1
