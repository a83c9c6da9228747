from pathlib import Path

import pytest

from tests.examples.torchrun import numbers_of, run
from tests.examples.tutorial import check_tutorial

pytestmark = pytest.mark.examples


def test_own_cost_and_strategy_balance_like_the_built_in_ones(small_dataset: Path, tmp_path: Path) -> None:
    output = run("own_cost_and_strategy", small_dataset, tmp_path, "--steps", "5")
    lines = output.splitlines()
    results = {name.strip(): numbers_of(result) for name, _, result in (line.partition("|") for line in lines)}
    unbalanced, _, moved = results["not balanced"]
    assert unbalanced > 1.1
    assert moved == 0
    for name in ("own cost, lpt-swap", "own cost, min-move", "own cost, own strategy"):
        assert results[name][0] < 1.01, name
    # It moves samples differently from the built-in strategy that also begins with the heaviest one.
    assert results["own cost, own strategy"] != results["own cost, lpt-swap"]
    assert results["own cost, own strategy"][2] > 20
    check_tutorial("own-cost-and-strategy", output)
