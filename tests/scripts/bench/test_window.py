"""The script runs, and its rows say what they should where that is known beforehand."""

import json
from typing import Any

import pytest
import window

PLAIN_SHUFFLE = {"window": 1, "displacement": 0.0, "cost_by_place": None, "heaviest_by_place": None}


def rows_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> list[dict[str, Any]]:
    monkeypatch.setattr("sys.argv", ["window.py", *options])
    window.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_windows_of_the_same_samples_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--ranks", "4", "--batch-sizes", "4", "--windows", "1,8", "--steps", "64", "--planning-ranks", "")
    rows = rows_of(capsys, monkeypatch, *options)
    assert [(row["lengths"], row["window"]) for row in rows] == [
        (lengths, steps) for lengths in window.DISTRIBUTIONS for steps in (1, 8)
    ]
    for first, windowed in zip(rows[::2], rows[1::2], strict=True):
        assert first.items() >= PLAIN_SHUFFLE.items()
        assert first["steps"] == windowed["steps"] == 64
        assert first["longest"] == windowed["longest"]
        assert 1 <= windowed["heaviest"] < first["heaviest"]
        # The mean distance of two of 8 steps is 2.6.
        assert 2 < windowed["displacement"] < 3.2


def test_planning_is_timed_for_each_window(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--ranks", "", "--planning-ranks", "4", "--planning-windows", "1,8", "--rounds", "1")
    first, windowed = rows_of(capsys, monkeypatch, *options)
    assert (first["window"], first["x_window_1"], first["state_bytes"]) == (1, 1.0, 0)
    assert windowed["window"] == 8
    # 8 steps of 4 * 32 positions, a bit each in base64.
    assert 100 < windowed["state_bytes"] < 1000
    assert min(row[name] for row in (first, windowed) for name in ("ms", "first_ms", "steps_per_second")) > 0
