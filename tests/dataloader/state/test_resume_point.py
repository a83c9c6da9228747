import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.core.errors import StateError
from evenrank.dataloader.state.resume_point import ResumePoint, SkippedSamples
from evenrank.datasets.order import RowOrder, Samples

Ints = NDArray[np.int64]


@st.composite
def _pending(draw: st.DrawFn, position: int, num_samples: int) -> Ints:
    """Draw pending positions after `position` samples, of which as many are trained below the frontier."""
    frontier = draw(st.integers(position + 1, num_samples))
    low = draw(st.integers(max(0, position - 20), position))
    return np.sort(np.array(draw(st.permutations(range(low, frontier)))[: frontier - position], dtype=np.int64))


@st.composite
def _skipped(draw: st.DrawFn) -> tuple[SkippedSamples, int, int]:
    num_samples = draw(st.integers(1, 60))
    position = draw(st.integers(0, num_samples - 1))
    pending = draw(_pending(position, num_samples))
    if draw(st.booleans()):
        return SkippedSamples(pending), position, num_samples
    start = draw(st.integers(0, position))
    begin = ResumePoint(start=start, position=start, pending=draw(st.none() | _pending(start, num_samples)))
    shape = draw(st.tuples(st.integers(1, 100), st.integers(1, 1 << 40), st.integers(1, 100)))
    return SkippedSamples(pending, begin, shape), position, num_samples


def _entries(skipped: SkippedSamples) -> list[Any]:
    points = [skipped.pending, *([] if skipped.begin is None else [skipped.begin.pending])]
    lists = [None if pending is None else pending.tolist() for pending in points]
    begin = None if skipped.begin is None else (skipped.begin.start, skipped.begin.position)
    return [*lists, begin, skipped.shape]


@given(_skipped())
def test_skipped_samples_go_through_text(drawn: tuple[SkippedSamples, int, int]) -> None:
    skipped, position, num_samples = drawn
    text = skipped.to_text()
    assert text.isprintable()
    assert _entries(SkippedSamples.from_text(text, position=position, num_samples=num_samples)) == _entries(skipped)


PENDING = [2, 4, base64.b64encode(np.packbits([1, 0, 1, 1, 0, 1]).tobytes()).decode()]  # 2 4 5 7, after 4 samples
WINDOW: dict[str, Any] = {"start": 0, "world_size": 2, "batch_size": 4, "steps": 3, "pending": None}


def test_the_format_of_the_text() -> None:
    text = json.dumps({"positions": PENDING, "window": WINDOW})
    skipped = SkippedSamples.from_text(text, position=4, num_samples=9)
    assert _entries(skipped) == [[2, 4, 5, 7], None, (0, 0), (3, 2, 4)]
    assert skipped.to_text() == text
    assert SkippedSamples().to_text() == ""
    assert SkippedSamples.from_text("", position=3, num_samples=3) == SkippedSamples()
    many = np.flatnonzero(np.arange(80_000) % 2)  # in a window, of which each position takes one bit
    assert len(SkippedSamples(many).to_text()) == pytest.approx(80_000 / 8 * 4 / 3, abs=60)


def test_damaged_text_is_refused() -> None:
    of_window = [WINDOW | change for change in ({"start": 5}, {"steps": 0}, {"pending": 7})]
    # Begins after 4 samples; more than there are; 9 is past the end; no bits; does not begin at 1.
    of_bits = (5, 4, PENDING[2]), (2, 6, PENDING[2]), (4, 4, PENDING[2]), (2, 4, "?"), (1, 4, "Wg==")
    damaged = [{"positions": PENDING}, *({"positions": PENDING, "window": window} for window in of_window)]
    damaged += [{"positions": list(positions), "window": None} for positions in of_bits]
    for text in ("x", "7", "[" * 100_000, *map(json.dumps, damaged)):
        with pytest.raises(StateError, match=r"^corrupt loader state: field 'pending' cannot be decoded; use another"):
            SkippedSamples.from_text(text, position=4, num_samples=9)


def test_pending_positions_come_first_and_what_is_left_of_a_window_is_found() -> None:
    point = ResumePoint(epoch=1, start=4, position=4, pending=np.array([2, 4, 5, 7]))
    rows = RowOrder(samples=Samples(num_rows=20, left_out=np.array([0])))
    order = point.order(rows)
    assert point.frontier == 8
    assert point.positions(np.array([4, 5, 6, 7, 8, 12])).tolist() == [2, 4, 5, 7, 8, 12]
    assert order.rows(np.array([8, 7, 4]), seed=0, epoch=1).tolist() == [9, 8, 3]
    assert order.num_samples == rows.num_samples
    other = ResumePoint(epoch=1, start=4, position=4, pending=np.array([2, 4, 6, 7])).order(rows)
    assert len({order.fingerprint(), other.fingerprint(), rows.fingerprint()}) == 3
    assert ResumePoint(start=4, position=4).order(rows) is rows
    window = SkippedSamples(np.array([2, 4, 5, 7]), ResumePoint(), (3, 2, 2))
    left: Any = window.left(4, num_samples=10)  # positions 8 and 9 have not begun, and there are no more
    assert left.rows.astype(int).tolist() == [[[0, 0], [1, 0]], [[1, 1], [0, 1]], [[1, 1], [0, 0]]]
    assert (left.begin, left.window, left.num_trained, left.has_positions) == (0, 3, 1, True)
    # The same window where 1 and 3 were pending at its begin, so that 0 and 2 come before it.
    begin = ResumePoint(start=2, position=2, pending=np.array([1, 3]))
    left = SkippedSamples(np.array([3, 4, 5, 7]), begin, (2, 2, 2)).left(6, num_samples=11)
    assert left.rows.astype(int).tolist() == [[[0, 1], [1, 1]], [[0, 1], [0, 0]]]
