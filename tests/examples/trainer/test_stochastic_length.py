"""A job that trains a random part of long histories, and evaluates them whole."""

from pathlib import Path
from typing import Any

import numpy as np

from evenrank.datasets import open_store
from tests.examples.trainer.test_job import SETTINGS, log_lines, run_job_on_rank
from tests.ranks import RankPool


def test_a_job_trains_a_part_of_histories_another_one_in_each_epoch_and_evaluates_them_whole(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    tokens: dict[str, list[int]] = {}
    whole = [np.minimum(open_store(small_dataset, split).lengths, 40) for split in ("train", "eval")]
    steps = -(-len(whole[0]) // 64)
    for name, options in (("whole", {}), ("part", {"stochastic_alpha": 1.4, "stochastic_newest": 5})):
        job: dict[str, Any] = {"data": str(small_dataset), "out": str(tmp_path / name), "batch_size": 64, "epochs": 2}
        (trained,) = ranks.run(1, run_job_on_rank, job | options | {"log_every": steps})
        assert sum(len(targets) for _, targets, _ in trained.evaluated[-1]) == whole[1].sum()
        tokens[name] = [line["tokens"] for line in log_lines(tmp_path / name, "train")]
    first, second = tokens["part"]
    assert (
        tokens["whole"] == [2 * whole[0].sum() + len(whole[0])] * 2
    )  # each event with its action, and one of the user
    assert first != second
    cut = int(SETTINGS["max_history_length"] ** 0.7)
    assert (
        2 * np.minimum(whole[0], cut).sum() + len(whole[0])
        < min(first, second)
        < max(first, second)
        < tokens["whole"][0]
    )
