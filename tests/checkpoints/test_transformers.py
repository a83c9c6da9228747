import dataclasses
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from evenrank.core.errors import ConfigError, StateError
from evenrank.dataloader import LoaderConfig, StreamConfig, TimeWindows, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.training import accumulate
from tests.checkpoints.resuming import COST, GLOBAL_BATCH_SIZE, Model, balance, environment_of, ids_of
from tests.ranks import RankPool

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate")
EPOCHS = 2


@dataclasses.dataclass
class Run:
    """What a rank has seen of a training."""

    samples: list[list[int]] = dataclasses.field(default_factory=list)  # of each batch
    losses: dict[int, float] = dataclasses.field(default_factory=dict)  # by step, over all ranks
    epochs: dict[int, float] = dataclasses.field(default_factory=dict)  # by step
    weights: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def _train(
    rank: int, world_size: int, path: Path, folder: Path, resume_from: int | None, options: dict[str, Any]
) -> Run:
    """Train two epochs, or the rest of them after a step; a checkpoint of each step is saved in a run that begins."""
    from evenrank.training.trainers.transformers_trainer import BalancedTrainer

    run = Run()

    class Trainer(BalancedTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], **_: Any) -> torch.Tensor:
            run.samples.append(ids_of(inputs["batch"]))
            loss: torch.Tensor = model(**inputs)
            return loss

        def log(self, logs: dict[str, float], *_: Any) -> None:
            if "loss" in logs:
                run.losses[self.state.global_step] = logs["loss"]
                run.epochs[self.state.global_step] = self.state.epoch

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with patch.dict(os.environ, environment_of(rank, world_size)), balance(path, rank, world_size) as loader:
        args = transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=GLOBAL_BATCH_SIZE // world_size,
            num_train_epochs=EPOCHS,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            logging_steps=1,
            save_strategy="steps" if resume_from is None else "no",
            save_steps=1,
            use_cpu=True,
            ddp_find_unused_parameters=False,
            disable_tqdm=True,
            report_to="none",
            **options,
        )
        try:
            torch.manual_seed(0)
            trainer = Trainer(Model(), args, train_dataset=loader)
            checkpoint = None if resume_from is None else str(folder / f"checkpoint-{resume_from}")
            trainer.train(resume_from_checkpoint=checkpoint)
        finally:
            accelerate.state.AcceleratorState._reset_state(True)
        run.weights = trainer.model.state_dict()
    return run


def _weights_of_one_process(path: Path, num_accumulated: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    with balance(path, 0, 1) as balancer:
        for _ in range(EPOCHS):
            for batches in accumulate(balancer, num_accumulated):
                for batch in batches:
                    model(batch).backward()
                adam.step()
                adam.zero_grad()
    return model.state_dict()


def _samples(runs: list[Run]) -> list[list[int]]:
    """Return the samples of each batch, over all ranks."""
    batches = zip(*(run.samples for run in runs), strict=True)
    return [sorted(sample for of_rank in batch for sample in of_rank) for batch in batches]


@pytest.mark.parametrize("num_accumulated", [1, 2])
def test_trainer_resumes_with_the_same_steps(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, num_accumulated: int
) -> None:
    options = {"gradient_accumulation_steps": num_accumulated}
    whole = ranks.run(2, _train, small_dataset, tmp_path, None, options)
    samples, losses, epochs = _samples(whole), whole[0].losses, whole[0].epochs
    num_batches = len(samples) // EPOCHS
    num_steps = math.ceil(num_batches / num_accumulated)
    assert num_batches % 2 == 1  # the last step of an epoch accumulates fewer batches
    first_epoch = [sample for batch in samples[:num_batches] for sample in batch]
    assert len({*first_epoch}) == len(first_epoch) > 150
    assert [*losses] == [*range(1, EPOCHS * num_steps + 1)]
    torch.testing.assert_close(whole[0].weights, _weights_of_one_process(small_dataset, num_accumulated))
    for step, world_size in ((1, 3), (num_steps - 1, 2), (num_steps, 1), (num_steps + 2, 3)):
        resumed = ranks.run(world_size, _train, small_dataset, tmp_path, step, options)
        epoch, steps = divmod(step, num_steps)
        assert _samples(resumed) == samples[epoch * num_batches + steps * num_accumulated :]
        assert resumed[0].losses == pytest.approx({later: losses[later] for later in losses if later > step}, rel=1e-5)
        assert resumed[0].epochs == pytest.approx({later: epochs[later] for later in losses if later > step})
        torch.testing.assert_close(resumed[-1].weights, whole[0].weights)


def _refusals(rank: int, world_size: int, path: Path, folder: Path) -> list[str]:
    """Resume in ways that cannot be exact; return what is said of each."""
    said = []
    attempts: list[tuple[int, dict[str, Any]]] = [
        (1, {"gradient_accumulation_steps": 2}),
        (9, {"gradient_accumulation_steps": 3}),  # at the end of the epoch, which are the steps of three
        (1, {"ignore_data_skip": True}),
        (1, {"restore_callback_states_from_checkpoint": True}),
    ]
    for step, options in attempts:
        try:
            _train(rank, world_size, path, folder, step, options)
        except (ConfigError, StateError) as error:
            said.append(str(error))
    state = folder / "checkpoint-1" / "trainer_state.json"
    state.write_text(state.read_text().replace("LoaderPosition", "Other"))
    with pytest.raises(StateError, match="the checkpoint has no state of a loader"):
        _train(rank, world_size, path, folder, 1, {})
    return said


def test_resuming_other_steps_is_refused(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    ranks.run(1, _train, small_dataset, tmp_path, None, {"max_steps": 9})
    ((within, at_end, skip),) = ranks.run(1, _refusals, small_dataset, tmp_path)
    assert within.startswith("the checkpoint is after 1 batches of epoch 0, 1 steps here after 2 of epoch 0; resume ")
    assert at_end.startswith("the checkpoint is after 0 batches of epoch 1, 9 steps here after 0 of epoch 3; resume ")
    assert skip.startswith("ignore_data_skip makes the Trainer lose count")


class _Recorded:
    """A loader that counts the epochs that have ended."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.num_ended = loader, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader
        self.num_ended += 1


def _pull(
    rank: int, world_size: int, path: Path, folder: Path, balancing: BalanceConfig, order: Any, has_exchange: bool
) -> tuple[int, int]:
    """Pull as many batches as 20 epochs should have; return how many epochs have ended, and the samples of one."""
    from evenrank.training.trainers.transformers_trainer import BalancedTrainer

    config = LoaderConfig(batch_size=16, max_history_length=60, max_num_candidates=1, order=order)
    balance = None if has_exchange else balancing
    batches: Any = build_loader(path, config, rank=rank, world_size=world_size, balance=balance)
    loader = _Recorded(Balancer(batches, balancing) if has_exchange else batches)
    with patch.dict(os.environ, environment_of(rank, world_size)):
        args = transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, per_device_train_batch_size=16)
        trainer = BalancedTrainer(Model(), args, train_dataset=loader)
        inputs = trainer.get_train_dataloader()
        num_examples = trainer.num_examples(inputs)
        try:
            for _ in range(20):
                iterator = iter(inputs)
                for _ in range(len(inputs)):
                    next(iterator)
        finally:
            accelerate.state.AcceleratorState._reset_state(True)
    return loader.num_ended, num_examples


def test_epochs_end_with_the_last_batch_that_the_trainer_pulls(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    pulled = ranks.run(2, _pull, small_dataset, tmp_path, BalanceConfig(cost=COST), "shuffle", False)
    assert pulled == [(20, 7 * 2 * 16)] * 2


@pytest.mark.parametrize(
    ("order", "options", "has_exchange"),
    [
        ("shuffle", {"pack": True, "max_tokens_per_rank": 100}, False),
        (TimeWindows(every="2w"), {}, False),
        (TimeWindows(every="2w"), {}, True),
    ],
)
def test_epochs_of_other_lengths_are_refused(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, order: Any, options: dict[str, Any], has_exchange: bool
) -> None:
    balancing = BalanceConfig(cost=COST, **options)
    (failure,) = ranks.try_run(1, _pull, small_dataset, tmp_path, balancing, order, has_exchange)
    assert failure.type_name == "ConfigError"
    assert failure.message.startswith("the Trainer takes all epochs to have ")


LOADERS = ["Balancer", "balanced", "plain", "stream", "DataLoader"]


def _eval_loader(kind: str, path: Path, rank: int, world_size: int) -> Any:
    of_rank: Any = {"rank": rank, "world_size": world_size}
    config, balancing = LoaderConfig(batch_size=20), BalanceConfig(cost=COST)  # the last step has fewer samples
    if kind == "stream":
        return build_stream_loader(path, config, StreamConfig(lanes=3, window_rows=16), **of_rank)
    if kind == "balanced":
        return build_loader(path, config, balance=balancing, **of_rank)
    loader = build_loader(path, config, **of_rank)
    if kind == "plain":
        return loader
    return Balancer([*loader] if kind == "DataLoader" else loader, balancing)


def _evaluate(rank: int, world_size: int, path: Path, folder: Path, kind: str) -> Any:
    """Evaluate twice before training, and twice within it; return the samples and the metrics of each."""
    from evenrank.training.trainers.transformers_trainer import BalancedTrainer

    found: list[tuple[list[int], dict[str, float]]] = []
    samples: list[int] = []

    class Trainer(BalancedTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], **_: Any) -> torch.Tensor:
            if not model.training:
                samples.extend(ids_of(inputs["batch"]))
            loss: torch.Tensor = model(**inputs)
            return loss

        def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
            metrics: dict[str, float] = super().evaluate(*args, **options)
            found.append((samples.copy(), metrics))
            samples.clear()
            return metrics

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with patch.dict(os.environ, environment_of(rank, world_size)), balance(path, rank, world_size) as loader:
        args = transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=GLOBAL_BATCH_SIZE // world_size,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            learning_rate=0.0,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
        )
        try:
            torch.manual_seed(0)
            evaluated = _eval_loader(kind, path, rank, world_size)
            trainer = Trainer(Model(), args, train_dataset=loader, eval_dataset=evaluated)
            trainer.evaluate()
            trainer.evaluate()
            trainer.train()
        finally:
            accelerate.state.AcceleratorState._reset_state(True)
    return found


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_is_evaluated_with_each_sample_once_and_the_mean_over_all_ranks(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, kind: str
) -> None:
    torch.manual_seed(0)
    model, loss_sum, samples, tokens = Model(), 0.0, [], 0
    for batch in build_loader(small_dataset, LoaderConfig(batch_size=64), rank=0, world_size=1):
        scores = model.score(model.items(batch.features["item_id"].values()))
        loss_sum, tokens = loss_sum + scores.sum().item(), tokens + batch.loss_tokens
        samples += ids_of(batch)
    evaluations = list(zip(*ranks.run(2, _evaluate, small_dataset, tmp_path, kind), strict=True))
    assert len(evaluations) == 4
    for of_ranks in evaluations:
        assert sorted(sample for of_rank, _ in of_ranks for sample in of_rank) == sorted(samples)
        assert [metrics["eval_loss"] for _, metrics in of_ranks] == pytest.approx([loss_sum / tokens] * 2, rel=1e-5)
        assert all(metrics["eval_samples_per_second"] > 0 for _, metrics in of_ranks)
        assert [of_rank for of_rank, _ in of_ranks] == [of_rank for of_rank, _ in evaluations[0]]  # in the same order


def _begin(rank: int, world_size: int, path: Path, folder: Path, evaluated: str, batch_size: int) -> None:
    """Begin to train with what cannot be evaluated, or with another batch size than that of the training loader."""
    from evenrank.training.trainers.transformers_trainer import BalancedTrainer

    with patch.dict(os.environ, environment_of(rank, world_size)), balance(path, rank, world_size) as loader:
        options: dict[str, Any] = {"eval_strategy": "steps"} if evaluated else {}
        args = transformers.TrainingArguments(
            output_dir=str(folder), use_cpu=True, per_device_train_batch_size=batch_size, **options
        )
        datasets: dict[str, Any] = {
            "": None,
            "loader": DataLoader(TensorDataset(torch.zeros(1))),
            "training": loader,
            "metrics": balance(path, rank, world_size),
        }
        try:
            BalancedTrainer(
                Model(),
                args,
                train_dataset=loader,
                eval_dataset={"of today": datasets[evaluated]} if evaluated else None,
                compute_metrics=dict if evaluated == "metrics" else None,
            ).train()
        finally:
            accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    ("evaluated", "batch_size", "message"),
    [
        ("loader", GLOBAL_BATCH_SIZE, "eval_dataset is a DataLoader; pass a Balancer over it"),
        ("training", GLOBAL_BATCH_SIZE, "eval_dataset is the train_dataset, which has one position"),
        ("metrics", GLOBAL_BATCH_SIZE, "compute_metrics gets predictions in rows"),
        ("", 8, f"per_device_train_batch_size is 8, the loader's batch_size {GLOBAL_BATCH_SIZE}; pass "),
    ],
)
def test_what_the_trainer_would_take_for_something_else_is_refused_before_the_first_step(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, evaluated: str, batch_size: int, message: str
) -> None:
    (failure,) = ranks.try_run(1, _begin, small_dataset, tmp_path, evaluated, batch_size)
    assert failure.message.startswith(message)
    assert failure.type_name == "ConfigError"
