import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.checkpoints.resuming import Model, balance, environment_of, ids_of
from tests.ranks import RankPool

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
environments = pytest.importorskip("lightning.pytorch.plugins.environments")
ElasticResume = pytest.importorskip("evenrank.training.trainers.lightning_callback").ElasticResume


class Recommender(lightning.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.seen: dict[int, list[list[int]]] = {}  # per epoch and step

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.setdefault(self.current_epoch, []).append(ids_of(batch))
        loss: torch.Tensor = self.model(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def _fit(
    rank: int, world_size: int, path: Path, folder: Path, batch_size: int, checkpoint: str | None
) -> dict[int, list[list[int]]]:
    warnings.simplefilter("ignore")  # Lightning's advice on workers, precision and the like
    checkpoints = lightning.callbacks.ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False
    )
    module = Recommender()
    with (
        patch.dict(os.environ, environment_of(rank, world_size)),
        balance(path, rank, world_size, batch_size) as balancer,
    ):
        cluster = environments.TorchElasticEnvironment()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=lightning.strategies.DDPStrategy(cluster_environment=cluster, process_group_backend="gloo"),
            max_epochs=2,
            callbacks=[ElasticResume(), *[checkpoints] * (checkpoint is None)],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=checkpoint is None,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(module, balancer, ckpt_path=checkpoint)
    return module.seen


def _samples(by_rank: Any, epoch: int, steps: slice) -> list[int]:
    return sorted(sample for seen in by_rank for step in seen[epoch][steps] for sample in step)


def test_trainer_resumes_with_each_sample_once(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    before = ranks.run(2, _fit, small_dataset, tmp_path, 12, None)
    num_steps = len(before[0][0])
    everything = _samples(before, 0, slice(None))
    assert len(everything) == len(set(everything)) > 150
    assert [len(before[0][epoch]) for epoch in range(2)] == [num_steps, num_steps]
    for step, world_size in ((1, 3), (4, 2), (num_steps - 1, 3), (num_steps + 2, 2)):
        epoch, trained = divmod(step, num_steps)
        after = ranks.run(world_size, _fit, small_dataset, tmp_path, 12, str(tmp_path / f"{step}.ckpt"))
        assert _samples(after, epoch, slice(None)) == _samples(before, epoch, slice(trained, None)), step
        assert [*after[0]] == [*range(epoch, 2)]
        if epoch == 0:  # the next epoch has its full length
            assert _samples(after, 1, slice(None)) == everything
