"""Hugging Face Accelerate, which saves the state of what is registered on rank 0, and loads it on all ranks."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.checkpoints.resuming import Model, balance, ids_of
from tests.ranks import RankPool

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


def _train(
    rank: int, world_size: int, path: Path, folder: Path, stop_after: int | None
) -> tuple[list[int], list[int], list[int]]:
    """Return the samples before and after a checkpoint is saved, or loaded, and those of the next epoch."""
    warnings.simplefilter("ignore")
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # the process group exists already
    with patch.dict(os.environ, environment), balance(path, rank, world_size) as balancer:
        accelerator = accelerate.Accelerator(cpu=True)
        assert accelerator.num_processes == world_size
        torch.manual_seed(0)
        model: Any = Model()
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
        accelerator.register_for_checkpointing(balancer)

        def train(steps: Iterator[Any], count: int) -> list[int]:
            seen: list[int] = []
            for _, batch in zip(range(count), steps, strict=False):
                optimizer.zero_grad()
                accelerator.backward(model(batch))
                optimizer.step()
                seen += ids_of(batch)
            return seen

        before: list[int] = []
        if stop_after is None:
            accelerator.load_state(str(folder))
            steps = iter(balancer)
        else:
            steps = iter(balancer)
            before = train(steps, stop_after)
            accelerator.save_state(str(folder))
        rest = train(steps, 1000)
        following = train(iter(balancer), 1000)
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
