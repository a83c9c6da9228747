from typing import Any

import numpy as np
import pytest

from evenrank.codebooks import kmeans, report
from evenrank.codebooks.kmeans import Codebooks, Rows
from evenrank.codebooks.report import fidelity, usage

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
    monkeypatch.setattr(kmeans, "_VALUES_AT_ONCE", 3)
    found = fidelity(Rows(vectors, np.arange(1, 5)), codes, BOOKS, QUIET)
    assert found["reconstruction_error"] == pytest.approx(1 / (np.var([-5, -3, 3, 6]) * 4))
    same = Rows(np.ones((2, 1), dtype=np.float32), np.arange(2))
    assert fidelity(same, codes[:2], BOOKS, QUIET)["reconstruction_error"] == 0


NEAREST = {  # of -5, -3.2, 3 and 4.4, by the sums of their codes
    "-5 -3 3 3: all are kept": ([[0, 0], [0, 1], [1, 0], [1, 0]], 1),
    "-5 -5 -5 -5: one of three that are equally near": ([[0, 0]] * 4, 1 / 3),
    "-5 3 -3 5: 2 3 0 1 instead of 1 0 3 2": ([[0, 0], [1, 0], [0, 1], [1, 1]], 0),
}


@pytest.mark.parametrize(("codes", "expected"), NEAREST.values(), ids=NEAREST)
def test_neighbours_kept_by_hand(monkeypatch: pytest.MonkeyPatch, codes: Any, expected: float) -> None:
    monkeypatch.setattr(report, "_NEIGHBOURS", 1)
    vectors = Rows(np.array([[-5.0], [-3.2], [3], [4.4]]), np.arange(4))
    found = fidelity(vectors, np.array(codes, dtype=np.int32), BOOKS, QUIET)
    assert found["neighbours_kept"] == pytest.approx(expected)
    assert (
        fidelity(Rows(vectors.vectors, np.arange(1)), np.zeros((1, 2), np.int32), BOOKS, QUIET)["neighbours_kept"] == 1
    )
