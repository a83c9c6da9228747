import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from evenrank.dataloader import LoaderConfig, StreamConfig, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.training import accumulate
from tests.checkpoints.resuming import COST, GLOBAL_BATCH_SIZE, Model, balance, environment_of, ids_of
from tests.ranks import RankPool

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate")
EPOCHS = 2


@dataclass
class Run:
    """What a rank has seen of a training."""

    samples: list[list[int]] = field(default_factory=list)  # of each batch
    evaluated: list[int] = field(default_factory=list)
    evaluated_losses: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)  # by step, over all ranks
    epochs: dict[int, float] = field(default_factory=dict)  # by step
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


@contextmanager
def _job(rank: int, world_size: int) -> Iterator[None]:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        with patch.dict(os.environ, environment_of(rank, world_size)):
            torch.manual_seed(0)
            yield
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


def _trainer(run: Run, folder: Path, world_size: int, arguments: dict[str, Any], **data: Any) -> Any:
    from evenrank.training.trainers.transformers_trainer import BalancedTrainer

    class Trainer(BalancedTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], **_: Any) -> torch.Tensor:
            if model.training:
                run.samples.append(ids_of(inputs["batch"]))
            else:
                run.evaluated.extend(ids_of(inputs["batch"]))
            loss: torch.Tensor = model(**inputs)
            return loss

        def log(self, logs: dict[str, float], *_: Any) -> None:
            if "eval_loss" in logs:
                run.evaluated_losses.append(logs["eval_loss"])
            if "loss" in logs:
                run.losses[self.state.global_step] = logs["loss"]
                run.epochs[self.state.global_step] = self.state.epoch

    quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"}
    size = {"output_dir": str(folder), "per_device_train_batch_size": GLOBAL_BATCH_SIZE // world_size}
    return Trainer(Model(), transformers.TrainingArguments(**quiet | size | arguments), **data)


STEPS: dict[str, Any] = {"num_train_epochs": EPOCHS, "logging_steps": 1, "save_steps": 1, "max_grad_norm": 0}
STEPS |= {"learning_rate": 0.1, "lr_scheduler_type": "constant", "ddp_find_unused_parameters": False}
STEPS |= {"gradient_accumulation_steps": 2}


def _train(rank: int, world_size: int, path: Path, folder: Path, resume_from: int | None) -> Run:
    """Train two epochs, or the rest of them after a step; a checkpoint of each step is saved in a run that begins."""
    run, saving = Run(), {"save_strategy": "steps" if resume_from is None else "no"}
    with _job(rank, world_size), balance(path, rank, world_size) as loader:
        trainer = _trainer(run, folder, world_size, STEPS | saving, train_dataset=loader)
        trainer.train(resume_from_checkpoint=resume_from and str(folder / f"checkpoint-{resume_from}"))
        run.weights = trainer.model.state_dict()
    return run


def _weights_of_one_process(path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    with balance(path, 0, 1) as balancer:
        for batches in (batches for _ in range(EPOCHS) for batches in accumulate(balancer, 2)):
            for batch in batches:
                model(batch).backward()
            adam.step()
            adam.zero_grad()
    return model.state_dict()


def _samples(runs: list[Run]) -> list[list[int]]:
    """Return the samples of each batch, over all ranks."""
    batches = zip(*(run.samples for run in runs), strict=True)
    return [sorted(sample for of_rank in batch for sample in of_rank) for batch in batches]


def test_trainer_resumes_with_the_same_steps(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    whole = ranks.run(2, _train, small_dataset, tmp_path, None)
    samples, losses, epochs = _samples(whole), whole[0].losses, whole[0].epochs
    num_batches = len(samples) // EPOCHS
    num_steps = math.ceil(num_batches / 2)
    assert num_batches % 2 == 1  # the last step of an epoch accumulates fewer batches
    first_epoch = [sample for batch in samples[:num_batches] for sample in batch]
    assert len({*first_epoch}) == len(first_epoch) > 150
    assert [*losses] == [*range(1, EPOCHS * num_steps + 1)]
    torch.testing.assert_close(whole[0].weights, _weights_of_one_process(small_dataset))
    for step, world_size in ((1, 3), (num_steps, 1), (num_steps + 2, 3)):
        resumed = ranks.run(world_size, _train, small_dataset, tmp_path, step)
        epoch, steps = divmod(step, num_steps)
        assert _samples(resumed) == samples[epoch * num_batches + steps * 2 :]
        assert resumed[0].losses == pytest.approx({later: losses[later] for later in losses if later > step}, rel=1e-5)
        assert resumed[0].epochs == pytest.approx({later: epochs[later] for later in losses if later > step})
        torch.testing.assert_close(resumed[-1].weights, whole[0].weights)


def _eval_loader(kind: str, path: Path, rank: int, world_size: int) -> Any:
    of_rank: Any = {"rank": rank, "world_size": world_size}
    config, balancing = LoaderConfig(batch_size=20), BalanceConfig(cost=COST)  # the last step has fewer samples
    if kind == "stream":
        return build_stream_loader(path, config, StreamConfig(lanes=3, window_rows=16), **of_rank)
    loader = build_loader(path, config, balance=balancing if kind == "balanced" else None, **of_rank)
    return Balancer(loader, balancing) if kind == "Balancer" else loader


def _evaluate(rank: int, world_size: int, path: Path, folder: Path) -> Any:
    """Evaluate twice before training, and within it; return the samples and the mean loss of each."""
    found, evaluating = [], {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2, "learning_rate": 0.0}
    with balance(path, rank, world_size) as loader:
        for kind in ("Balancer", "balanced", "plain", "stream"):
            run, data = Run(), {"train_dataset": loader, "eval_dataset": _eval_loader(kind, path, rank, world_size)}
            with _job(rank, world_size):
                trainer = _trainer(run, folder, world_size, evaluating, **data)
                for evaluate in (trainer.evaluate, trainer.evaluate, trainer.train):
                    evaluate()
                    found.append((run.evaluated.copy(), run.evaluated_losses[-1]))
                    run.evaluated.clear()
    return found


def test_a_loader_is_evaluated_with_each_sample_once_and_the_mean_over_all_ranks(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, loss_sum, samples, tokens = Model(), 0.0, list[int](), 0
    for batch in build_loader(small_dataset, LoaderConfig(batch_size=64), rank=0, world_size=1):
        scores = model.score(model.items(batch.features["item_id"].values()))
        loss_sum, tokens, samples = loss_sum + scores.sum().item(), tokens + batch.loss_tokens, samples + ids_of(batch)
    evaluations = list(zip(*ranks.run(2, _evaluate, small_dataset, tmp_path), strict=True))
    assert len(evaluations) == 3 * 4
    for number, of_ranks in enumerate(evaluations):
        assert sorted(sample for of_rank, _ in of_ranks for sample in of_rank) == sorted(samples)
        assert [loss for _, loss in of_ranks] == pytest.approx([loss_sum / tokens] * 2, rel=1e-5)
        assert [ids for ids, _ in of_ranks] == [ids for ids, _ in evaluations[number // 3 * 3]]
