"""What is left of an epoch goes through the text of a state, and text that was damaged is refused."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.core.errors import StateError
from evenrank.dataloader.state.resume_point import OpenWindow, ResumePoint, Unfinished
from evenrank.datasets.order import RowOrder, Samples

Ints = NDArray[np.int64]


@st.composite
def _left(draw: st.DrawFn, position: int, num_samples: int) -> Ints:
    """Draw what may be left after `position` samples, of which as many are trained below its end."""
    end = draw(st.integers(position + 1, num_samples))
    low = draw(st.integers(max(0, position - 20), position))
    left = draw(st.permutations(range(low, end)))[: end - position]
    return np.sort(np.array(left, dtype=np.int64))


@st.composite
def _unfinished(draw: st.DrawFn) -> tuple[Unfinished, int, int]:
    num_samples = draw(st.integers(1, 60))
    position = draw(st.integers(0, num_samples - 1))
    left = draw(_left(position, num_samples))
    if draw(st.booleans()):
        return Unfinished(left=left), position, num_samples
    start = draw(st.integers(0, position))
    window = OpenWindow(
        start=start,
        world_size=draw(st.integers(1, 1 << 40)),
        batch_size=draw(st.integers(1, 100)),
        steps=draw(st.integers(1, 100)),
        left=draw(st.none() | _left(start, num_samples)),
    )
    return Unfinished(left=left, window=window), position, num_samples


def _entries(unfinished: Unfinished) -> list[Any]:
    def as_list(left: Ints | None) -> list[int] | None:
        return None if left is None else left.tolist()

    window = unfinished.window
    sizes = None if window is None else [window.start, window.world_size, window.batch_size, window.steps]
    return [as_list(unfinished.left), sizes, None if window is None else as_list(window.left)]


@given(_unfinished())
def test_what_is_left_goes_through_text(drawn: tuple[Unfinished, int, int]) -> None:
    unfinished, position, num_samples = drawn
    text = unfinished.to_text()
    assert text.isprintable()
    assert _entries(Unfinished.from_text(text, position=position, num_samples=num_samples)) == _entries(unfinished)


def test_without_a_window_there_is_nothing_to_tell() -> None:
    assert Unfinished().to_text() == ""
    assert Unfinished.from_text("", position=3, num_samples=3) == Unfinished()


def test_a_window_takes_one_bit_per_position() -> None:
    left = np.flatnonzero(np.arange(80_000) % 2)
    assert len(Unfinished(left=left).to_text()) == pytest.approx(80_000 / 8 * 4 / 3, abs=60)


LEFT = [2, 4, base64.b64encode(np.packbits([1, 0, 1, 1, 0, 1]).tobytes()).decode()]  # 2 4 5 7, after 4 samples
WINDOW = {"start": 0, "world_size": 2, "batch_size": 2, "steps": 2, "left": None}


def test_the_format_of_the_text() -> None:
    unfinished = Unfinished.from_text(json.dumps({"left": LEFT, "window": WINDOW}), position=4, num_samples=9)
    assert _entries(unfinished) == [[2, 4, 5, 7], [0, 2, 2, 2], None]
    assert json.loads(unfinished.to_text()) == {"left": LEFT, "window": WINDOW}


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "7",
        "[" * 100_000,
        json.dumps({"left": LEFT}),
        json.dumps({"left": LEFT, "window": {}}),
        json.dumps({"left": LEFT, "window": {**WINDOW, "start": 5}}),
        json.dumps({"left": LEFT, "window": {**WINDOW, "steps": 0}}),
        json.dumps({"left": LEFT, "window": {**WINDOW, "left": 7}}),
        json.dumps({"left": None, "window": None}),
        json.dumps({"left": [2, 4, 7], "window": None}),
        json.dumps({"left": [5, 4, LEFT[2]], "window": None}),  # begins after 4 samples
        json.dumps({"left": [2, 6, LEFT[2]], "window": None}),  # more than there are
        json.dumps({"left": [2, 5, LEFT[2]], "window": None}),
        json.dumps({"left": [4, 4, LEFT[2]], "window": None}),  # 9 is past the end
        json.dumps({"left": [2, 4, "?"], "window": None}),
        json.dumps({"left": [1, 4, "Wg=="], "window": None}),  # does not begin at 1
    ],
    ids=range(16),
)
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(
        StateError, match=r"^corrupt loader state: field 'pending' cannot be decoded; load another check"
    ):
        Unfinished.from_text(text, position=4, num_samples=9)


def test_what_is_left_comes_first() -> None:
    rest = ResumePoint(epoch=1, start=4, position=4, left=np.array([2, 4, 5, 7]))
    rows = RowOrder(samples=Samples(num_rows=20, left_out=np.array([0])))
    order = rest.order(rows)
    assert rest.end_of_left == 8
    assert rest.positions(np.array([4, 5, 6, 7, 8, 12])).tolist() == [2, 4, 5, 7, 8, 12]
    assert order.rows(np.array([8, 7, 4]), seed=0, epoch=1).tolist() == [9, 8, 3]
    assert order.num_samples == rows.num_samples
    other = ResumePoint(epoch=1, start=4, position=4, left=np.array([2, 4, 6, 7])).order(rows)
    assert len({order.fingerprint(), other.fingerprint(), rows.fingerprint()}) == 3
    assert ResumePoint(start=4, position=4).order(rows) is rows
