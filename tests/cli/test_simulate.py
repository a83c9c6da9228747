import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.dataloader.balance import STRATEGIES, MeasuredCost
from tests.cli.programs import printed
from tests.dataloader.balance.metrics.example_steps import TIMED_STEPS, write

NO_GAIN = ["0.0%", "0.0%", "1.00x", "1.00", "\N{PLUS-MINUS SIGN}", "0.00"]


def _rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]


def _save_cost(path: Path, **options: Any) -> None:
    fitted: dict[str, Any] = {"seconds_per_step": 0.0, "steps": 20, "r2": 1.0, "max_tokens": 8192, "fraction_bits": 0}
    MeasuredCost(interleave_actions=False, **{**fitted, **options}).save(path)


def test_a_dataset_is_simulated_in_80_columns(small_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = printed("simulate", small_dataset, "--ranks", "2,4096", "--batch-size", 4, "--steps", 2)
    settings, *lines = text.splitlines()
    assert settings == (
        f"{small_dataset}: 2 steps of 4 samples per rank, histories of at most 512 events; cost: hstu of 8 layers of "
        "width 1024 with 4 heads"
    )
    assert max(len(line) for line in lines if not line.startswith("With 4,096 ranks")) <= 80
    assert [row[:2] for row in _rows(text)] == [[ranks, name] for ranks in ("2", "4,096") for name in STRATEGIES]
    assert {len(row) for row in _rows(text)} == {11}
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert "With 4,096 ranks a step has more samples than there are lengths, so they were drawn" in text


def test_a_distribution_and_the_log_of_a_run_are_sources(here: Path) -> None:
    _save_cost(here / "cost.json", linear=1, quadratic=0)
    one = ("--strategy", "lpt-swap", "--steps")
    text = printed("simulate", "uniform:low=5,high=5", "--ranks", 8, *one, 1, "--cost", "cost.json")
    head = "uniform:low=5,high=5: 1 steps of 32 samples per rank, histories of at most 512 events; cost: cost.json"
    assert text.splitlines()[0] == head
    assert _rows(text) == [["8", "lpt-swap", *NO_GAIN, "1.000", "0%", "0%"]]
    assert "Settings that would help" not in text
    write(here / "log.jsonl", *TIMED_STEPS)
    text = printed("simulate", "log.jsonl", "--ranks", 2, "--batch-size", 1, *one, 50, "--cost", "linear")
    assert "50 steps of 1 samples per rank, histories as long as logged; cost: linear" in text
    assert "samples of at most 8 tokens" in text


# On 2 ranks with one sample each, of 100 or 300 events, half of the steps have loads of 100 and 300.
def _idle_before(*options: object) -> str:
    np.save("lengths.npy", np.array([100, 300]))
    common = ("--ranks", 2, "--batch-size", 1, "--strategy", "none", "--steps", 3)
    ((_, _, idle, *_),) = _rows(printed("simulate", "lengths.npy", *common, *options))
    return str(idle)


def test_costs_by_name_file_and_function_and_a_fixed_part_of_a_step(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save_cost(here / "cost.json", linear=0, quadratic=1)
    # A token takes 1/1024 s.
    per_token = {"linear": 1 << 40, "quadratic": 0, "fraction_bits": 50}
    _save_cost(here / "fixed.json", **per_token, seconds_per_step=200 / 1024)
    cube = "    def cube(lengths, candidates):\n        return lengths['item_id']**3\n"
    (here / "my_costs.py").write_text(f"class Costs:\n{cube}")
    monkeypatch.delitem(sys.modules, "my_costs", raising=False)
    path = list(sys.path)
    for options, idle in (
        ("linear", 1 - 200 / 300),
        ("cost.json", 1 - (1 + 9) / 2 / 9),
        ("padded:cost.json", 1 - (1 + 9) / 2 / 9),  # one sample per rank
        ("my_costs:Costs.cube", 1 - (1 + 27) / 2 / 27),
        ("fixed.json", 1 - 400 / 500),
        ("padded:fixed.json", 1 - 400 / 500),
        # The longest sample takes 60 of 100 ms, so that loads are 100 + 200 and 300 + 200.
        ("linear --step-ms 100 --fixed-ms 40", 1 - 400 / 500),
        ("linear --step-ms 100 --fixed-ms 0", 1 - 200 / 300),
    ):
        assert _idle_before("--cost", *options.split()) == f"{idle:.1%}"
    assert sys.path == path


def test_what_would_help_is_simulated_with_the_same_fixed_time(here: Path) -> None:
    np.save(here / "lengths.npy", np.array([100, 300]))
    common = "--ranks 2 --batch-size 1 --strategy none,lpt-swap --steps 20 --cost linear --step-ms 100 --fixed-ms 40"
    text = printed("simulate", "lengths.npy", *common.split())
    assert "100% of the steps last as long as their longest sample" in text
    # An item and an action per event.
    assert "has 600 tokens on average. Settings that would help (lpt-swap)" in text
    table = [line.split() for line in text[text.index("instead") :].splitlines()]
    rows = {" ".join(row[:-2]): row[-2:] for row in table if len(row) > 2}
    assert rows["as above"] == ["20.0%", "1.00x"]
    # Mostly loads of 100 + 300 on each rank, to which the same 200 are added for twice as many samples.
    assert 0.6 <= float(rows["--batch-size 2"][1].removesuffix("x")) < 0.65
    assert rows["--max-history-length 256"] == [f"{1 - 378 / 456:.1%}", f"{456 / 500:.2f}x"]
    assert list(rows)[-3:] == ["--window 8", "--batch-size 2", "--max-history-length 256"]


def test_whole_windows_are_drawn_and_samples_that_cost_nothing_gain_nothing(here: Path) -> None:
    options = ("lengths.npy", "--batch-size", 4, "--strategy", "lpt-swap")
    np.save(here / "lengths.npy", np.zeros(64, dtype=np.int64))
    (row,) = _rows(printed("simulate", *options, "--ranks", 2))
    assert row[:8] == ["2", "lpt-swap", *NO_GAIN]
    np.save(here / "lengths.npy", np.arange(1, 65))
    text = printed("simulate", *options, "--ranks", 1, "--cost", "padded", "--window", 8, "--steps", 9)
    assert ": 16 steps of 4 samples per rank" in text.splitlines()[0]
