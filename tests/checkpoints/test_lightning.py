import contextlib
import logging
import os
import re
import tomllib
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from evenrank.dataloader import LoaderConfig, StreamConfig, TimeWindows, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from tests.checkpoints.resuming import COST, Model, balance, environment_of, ids_of
from tests.ranks import RankPool

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
environments = pytest.importorskip("lightning.pytorch.plugins.environments")
ElasticResume = pytest.importorskip("evenrank.training.trainers.lightning_callback").ElasticResume

Seen = dict[int, list[list[int]]]  # the samples of each step, by epoch
SAVING: dict[str, dict[str, Any]] = {
    "step-{step}": {"every_n_train_steps": 1},
    "end-{epoch}": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "failed": {"every_n_epochs": 100, "save_on_exception": True},
}


class Recommender(lightning.LightningModule):  # type: ignore[name-defined, misc]
    """Records the samples of each epoch of the loader, and may fail once."""

    def __init__(self, fails_at: int | None) -> None:
        super().__init__()
        self.model, self.seen, self.fails_at = Model(), Seen(), fails_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise ZeroDivisionError
        self.seen.setdefault(batch.epoch, []).append(ids_of(batch))
        loss: torch.Tensor = self.model(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def _entry_points(group: str) -> list[EntryPoint]:
    """Return ours, as where this version is installed."""
    metadata = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    declared = tomllib.loads(metadata)["project"]["entry-points"].get(group, {})
    return [EntryPoint(name, value, group) for name, value in declared.items()]


def _fit(
    loader: Any, folder: Path, checkpoint: str, *, resumes: bool = True, fails_at: int | None = None, **options: Any
) -> Seen:
    """Train from a checkpoint or, without one, from the begin, with all checkpoints of `SAVING`."""
    module, callbacks = Recommender(fails_at), [ElasticResume()] if resumes else []
    for name, when in SAVING.items() if not checkpoint else ():
        named = {"filename": name, "save_top_k": -1, "auto_insert_metric_name": False}
        callbacks.append(lightning.callbacks.ModelCheckpoint(folder, **named, **when))
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    saving = {"default_root_dir": folder, "enable_checkpointing": not checkpoint, "callbacks": callbacks}
    with patch("lightning.fabric.utilities.registry.entry_points", _entry_points):
        trainer = lightning.Trainer(accelerator="cpu", **quiet, **saving, **options)
        with contextlib.suppress(ZeroDivisionError):
            trainer.fit(module, loader, ckpt_path=f"{folder}/{checkpoint}.ckpt" if checkpoint else None)
    return module.seen


def _fit_on_ranks(rank: int, world_size: int, path: Path, folder: Path, checkpoint: str, resumes: bool = True) -> Seen:
    warnings.simplefilter("ignore")  # Lightning's advice on workers, precision and the like
    with patch.dict(os.environ, environment_of(rank, world_size)), balance(path, rank, world_size, 12) as balancer:
        cluster = environments.TorchElasticEnvironment()
        strategy = lightning.strategies.DDPStrategy(cluster_environment=cluster, process_group_backend="gloo")
        options = {"devices": world_size, "strategy": strategy, "max_epochs": 2, "use_distributed_sampler": False}
        return _fit(balancer, folder, checkpoint, resumes=resumes, **options)


def _samples(by_rank: list[Seen], epoch: int, steps: slice = slice(None)) -> list[int]:
    return sorted(sample for seen in by_rank for step in seen[epoch][steps] for sample in step)


def test_trainer_resumes_with_each_sample_once(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    job = _fit_on_ranks, small_dataset, tmp_path
    before = ranks.run(2, *job, "")
    num_steps, everything = len(before[0][0]), _samples(before, 0)
    assert len(everything) == len({*everything}) > 150
    assert len(before[0][1]) == num_steps
    for step, world_size in ((1, 3), (num_steps - 1, 3), (num_steps + 2, 2)):
        epoch, trained = divmod(step, num_steps)
        after = ranks.run(world_size, *job, f"step-{step}")
        assert _samples(after, epoch) == _samples(before, epoch, slice(trained, None)), step
        assert [*after[0]] == [*range(epoch, 2)]
        assert _samples(after, 1)[: len(everything)] == everything or epoch == 1  # the next epoch has its full length
    # Without the callback, resuming on other ranks is an error, and on the same ranks nothing is lost.
    for step, world_size in ((2, 3), (num_steps, 1)):
        first, *others = ranks.try_run(world_size, *job, f"step-{step}", False)
        assert first.type_name == "ConfigError"
        fault = r"Lightning goes on after batch \d+ of \d+, .* after batch \d+; pass .*ElasticResume"
        assert re.search(fault, first.message)
        assert [other.message for other in others] == [first.message] * len(others)
    assert _samples(ranks.run(2, *job, f"step-{num_steps}", False), 1) == everything


def _loader(kind: str, path: Path, batch_size: int) -> Any:
    alone: Any = {"rank": 0, "world_size": 1}
    packing: Any = {"pack": True, "max_tokens_per_rank": 150} if kind == "packed" else {}
    windows: Any = {"order": TimeWindows(every="2w"), "max_num_candidates": 2} if "windows" in kind else {}
    balancing, config = BalanceConfig(cost=COST, **packing), LoaderConfig(batch_size=batch_size, max_history_length=60)
    if kind == "stream, exchanged":
        stream = StreamConfig(lanes=5, window_rows=2)
        return Balancer(build_stream_loader(path, config, stream, **alone), balancing)
    config = LoaderConfig(batch_size=batch_size, max_history_length=60, **windows)
    if "exchanged" in kind:
        return Balancer(build_loader(path, config, **alone), balancing)
    return build_loader(path, config, balance=balancing, **alone)


@pytest.mark.parametrize("kind", ["epochs", "packed", "windows", "windows, exchanged", "stream, exchanged"])
def test_every_checkpoint_of_every_loader_resumes_with_what_is_left(
    small_dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    def fit(limits: dict[str, Any], checkpoint: str = "", batch_size: int = 24, **options: Any) -> Seen:
        caplog.clear()
        with warnings.catch_warnings(record=True, action="always") as warned, caplog.at_level(logging.INFO, "evenrank"):
            loader = _loader(kind, small_dataset, batch_size)
            seen = _fit(loader, tmp_path, checkpoint, devices=1, **limits, **options)
        said = caplog.messages + [str(each.message) for each in warned]
        assert not [message for message in said if "was left at" in message]
        return seen

    loader = _loader(kind, small_dataset, 24)
    whole = {epoch: [ids_of(batch) for batch in loader] for epoch in range(3)}
    assert fit({"max_epochs": 3}) == whole
    lengths = [len(steps) for steps in whole.values()]
    assert kind in ("epochs", "stream, exchanged") or len({*lengths}) > 1
    fit({"max_epochs": 1}, fails_at=2)
    steps = {"step-1": 1, "failed": 2, f"step-{lengths[0]}": lengths[0], "end-0": lengths[0], "end-1": sum(lengths[:2])}
    for name, done in steps.items():
        left = {epoch: steps[max(done - sum(lengths[:epoch]), 0) :] for epoch, steps in whole.items()}
        left = {epoch: steps for epoch, steps in left.items() if steps}
        # Iterations, by which Lightning counts with `max_steps`, are of the same batches, epochs of any.
        assert fit({"max_steps": sum(lengths), "max_epochs": -1}, name) == left, name
        resumed = fit({"max_epochs": 3}, name, batch_size=16)
        assert {epoch: _samples([resumed], epoch) for epoch in resumed} == {e: _samples([left], e) for e in left}, name
