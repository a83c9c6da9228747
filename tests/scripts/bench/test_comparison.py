"""The script compares all methods on the same samples, and its columns say what they should where that is known."""

import json
from typing import Any

import comparison
import numpy as np
import pytest
from balancing_methods import METHODS, MODELS, Epoch, Plan


def rows_and_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    monkeypatch.setattr("sys.argv", ["comparison.py", *options])
    comparison.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return {row["method"]: row for row in rows}, [line for line in lines if line.startswith("|")]


def test_methods_are_compared_on_the_same_samples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--ranks", "4", "--lengths", "lognormal:mean=512,std=512,high=4096", "--steps", "20", "--rounds", "1")
    rows, table = rows_and_table(capsys, monkeypatch, *options)
    assert list(rows) == list(METHODS)
    assert len(table) == len(rows) + 2
    assert {(row["ranks"], row["steps"]) for row in rows.values()} == {(4, 16)}  # 20 steps are 2 windows of 8
    for model in MODELS:
        assert rows["lpt-swap"][model] < 1.0011 < rows["kk-cost"][model] < rows["random"][model]
        assert rows["random"][model] <= rows["random"][f"{model}_worst"]
    assert rows["length-groups"]["padding"] < 0.3 < rows["random"]["padding"]
    assert rows["length-groups-strided"]["hstu"] < rows["length-groups"]["hstu"]
    assert rows["window-8"]["x_chance"] < rows["random"]["x_chance"] < 3 < rows["length-groups"]["x_chance"]
    assert rows["contiguous"]["fewest"] < 32 < rows["contiguous"]["most"]
    assert 0 == rows["random"]["moved"] < rows["min-move"]["moved"] < 0.3 < rows["lpt-swap"]["moved"]
    assert rows["lpt-swap"]["all_to_all_mb"] < rows["lpt-swap"]["all_gather_mb"]
    without_exchange = ("length-groups", "length-groups-strided", "contiguous", "window-8")
    assert {rows[method]["moved"] for method in without_exchange} == {None}
    assert rows["lpt-swap"]["x_lpt_swap"] == 1


def test_columns_of_a_plan_are_computed_from_its_lengths() -> None:
    # Two steps of two ranks with two samples each; in the second step the ranks exchange 9 and 3.
    lengths = np.array([4, 4, 2, 2, 1, 9, 3, 7])
    epoch = Epoch(lengths, MODELS["attention"], 2, 2)
    plan = Plan(epoch.samples, np.array([[0, 0, 1, 1], [0, 1, 0, 1]], dtype=np.int32))
    assert comparison.per_rank(plan, lengths, 2).tolist() == [[8, 4], [4, 16]]
    assert comparison.longest_per_rank(plan, lengths, 2).tolist() == [[4, 2], [3, 9]]
    assert comparison.epoch_time(np.array([[8.0, 4.0], [4.0, 16.0]])) == 24 / 16
    row = comparison.padding(plan, epoch)
    assert row["padding"] == round(1 - 32 / (8 + 4 + 6 + 18), 4)
    costs = dict(enumerate(epoch.model.costs(np.arange(10)).tolist()))
    even = sum(costs[length] for length in lengths.tolist()) / 4
    assert row["padded_epoch"] == round((2 * costs[4] + 2 * costs[9]) / 2 / even, 3)
    assert (row["most"], row["fewest"]) == (2, 2)
    row = comparison.measure_steps(plan, epoch, is_loaded=True)
    assert row["moved"] == 12 / 32
    # 8 tokens per rank and step, of 16 bytes, from the other of two ranks; rounded to whole bytes.
    assert row["all_gather_mb"] == 0.0
    assert row["x_chance"] == round(float(np.var([3, 5]) / (np.var(lengths) / 4)), 3)


def test_bytes_are_those_that_one_rank_receives() -> None:
    lengths = np.full(64, 1000)
    epoch = Epoch(lengths, MODELS["hstu"], 4, 8)
    rank_of = np.tile(np.arange(4, dtype=np.int32), 8)
    row = comparison.measure_steps(Plan(epoch.samples, np.broadcast_to(rank_of, (2, 32))), epoch, is_loaded=True)
    assert row["moved"] == 0.75
    assert row["all_to_all_mb"] == 8 * 0.75 * 1000 * 16 / 1e6
    assert row["all_gather_mb"] == 8 * 3 * 1000 * 16 / 1e6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lengths", "cauchy"), "unknown distribution 'cauchy'"),
        (("--ranks", "8,many"), "'many'"),
        (("--steps", "7"), "has no window of 8 steps of 8 ranks; raise --samples or --steps"),
    ],
)
def test_wrong_options_end_the_script(
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["comparison.py", *options])
    with pytest.raises(SystemExit, match="2"):
        comparison.main()
    assert message in capsys.readouterr().err
