import math
from pathlib import Path

import pytest

from tests.examples.torchrun import numbers_of, run
from tests.examples.tutorial import check_tutorial

pytestmark = pytest.mark.examples


def test_a_job_with_its_own_dataloader_is_balanced_and_resumes_bit_for_bit(small_dataset: Path, tmp_path: Path) -> None:
    # An epoch has 7 steps: the checkpoint after step 10 is in the middle of the second.
    output = run("own_dataloader", small_dataset, tmp_path, "--steps", "20")
    lines = output.splitlines()
    first, second, resuming, resumed, same = lines
    assert resuming == "resuming after step 10"
    assert same == "the 10 losses after the checkpoint are the same, bit for bit"
    losses = [numbers_of(line)[1] for line in (first, second)]
    assert losses[1] < losses[0] < math.log(501)
    assert losses[1] < 5.2
    assert numbers_of(resumed)[:2] == numbers_of(second)[:2]
    load_before, load_after = numbers_of(first)[2:]
    assert 1 <= load_after < 1.01 < load_before
    assert not list(tmp_path.iterdir())
    check_tutorial("own-dataloader", output)
