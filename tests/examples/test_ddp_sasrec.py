import math
from pathlib import Path

import pytest

from tests.examples.torchrun import numbers_of, run
from tests.examples.tutorial import check_tutorial

pytestmark = pytest.mark.examples


def test_sasrec_learns_what_is_popular_with_either_attention(small_dataset: Path, tmp_path: Path) -> None:
    output = run("ddp_sasrec", small_dataset, tmp_path, "--steps", "24", "--attention", "jagged")
    lines = output.splitlines()
    before, attentions, *steps, after = lines
    padded, jagged = numbers_of(attentions)
    assert 0 < padded == pytest.approx(jagged, rel=1e-4)
    losses = [numbers_of(line)[1] for line in steps]
    # A model that knows nothing has log(1 + 128 negatives) per event.
    assert losses[-1] < 3.6 < losses[0] < math.log(129)
    for line in steps:
        load_before, load_after = numbers_of(line)[2:]
        assert 1 <= load_after < 1.02 < load_before
    # Of the last items of other users, among the first 10 of 500 items, and 100. A model whose labels are not shifted
    # has as low a loss, but recommends what a user has just had.
    assert [value > chance for value, chance in zip(numbers_of(before), (0.1, 0.4), strict=True)] == [False, False]
    assert [value > chance for value, chance in zip(numbers_of(after), (0.3, 0.6), strict=True)] == [True, True]
    check_tutorial("ddp-sasrec", output)
