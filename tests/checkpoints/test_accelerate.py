import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.checkpoints.resuming import Model, balance, environment_of, train
from tests.ranks import RankPool

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


def _train(
    rank: int, world_size: int, path: Path, folder: Path, stop_after: int | None
) -> tuple[list[int], list[int], list[int]]:
    """Return the samples before and after a checkpoint is saved, or loaded, and those of the next epoch."""
    warnings.simplefilter("ignore")
    with patch.dict(os.environ, environment_of(rank, world_size)), balance(path, rank, world_size) as balancer:
        accelerator = accelerate.Accelerator(cpu=True)
        assert accelerator.num_processes == world_size
        torch.manual_seed(0)
        model: Any = Model()
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
        accelerator.register_for_checkpointing(balancer)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            accelerator.backward(model(batch))
            optimizer.step()

        before: list[int] = []
        if stop_after is None:
            accelerator.load_state(str(folder))
        steps = iter(balancer)
        if stop_after is not None:
            before = train(steps, step, stop_after)
            accelerator.save_state(str(folder))
        rest, following = train(steps, step), train(balancer, step)
        accelerator.free_memory()
        accelerate.state.AcceleratorState._reset_state(True)
        return before, rest, following


def test_job_resumes_with_each_sample_once(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    before = ranks.run(2, _train, small_dataset, tmp_path, 4)
    after = ranks.run(3, _train, small_dataset, tmp_path, None)
    trained, rest, following = (sorted(i for rank in before for i in rank[part]) for part in range(3))
    assert len(trained) == 4 * 24
    assert sorted(i for rank in after for i in rank[1]) == rest
    assert sorted(i for rank in after for i in rank[2]) == following == sorted(trained + rest)
