import contextlib
import logging
import os
import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, StreamConfig, TimeWindows, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from tests.checkpoints.resuming import COST, Model, balance, environment_of, ids_of
from tests.ranks import RankPool

ROOT = Path(__file__).resolve().parents[2]

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


def _entry_points(group: str) -> list[EntryPoint]:
    """Return ours, as where this version is installed."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    return [EntryPoint(name, value, group) for name, value in declared.get(group, {}).items()]


IS_INSTALLED = patch("lightning.fabric.utilities.registry.entry_points", _entry_points)


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    with IS_INSTALLED:
        yield


def _fit(
    rank: int,
    world_size: int,
    path: Path,
    folder: Path,
    batch_size: int,
    checkpoint: str | None,
    has_callback: bool = True,
) -> dict[int, list[list[int]]]:
    warnings.simplefilter("ignore")  # Lightning's advice on workers, precision and the like
    checkpoints = lightning.callbacks.ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False
    )
    module = Recommender()
    with (
        IS_INSTALLED,
        patch.dict(os.environ, environment_of(rank, world_size)),
        balance(path, rank, world_size, batch_size) as balancer,
    ):
        cluster = environments.TorchElasticEnvironment()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=lightning.strategies.DDPStrategy(cluster_environment=cluster, process_group_backend="gloo"),
            max_epochs=2,
            callbacks=[*[ElasticResume()] * has_callback, *[checkpoints] * (checkpoint is None)],
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


def test_resuming_on_other_ranks_without_the_callback_is_one_error_on_every_rank(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    seen = ranks.run(2, _fit, small_dataset, tmp_path, 12, None, False)
    num_steps = len(seen[0][0])
    for step in (2, num_steps):
        resume: Any = (_fit, small_dataset, tmp_path, 12, str(tmp_path / f"{step}.ckpt"), False)
        first, *others = ranks.try_run(3, *resume) if step == 2 else ranks.try_run(1, *resume)
        assert first.type_name == "ConfigError"
        assert re.search(
            r"Lightning goes on after batch \d+ of \d+, .* after batch \d+; pass .*ElasticResume", first.message
        )
        assert [other.message for other in others] == [first.message] * len(others)
    # On the same ranks nothing is lost.
    assert _samples(ranks.run(2, *resume), 1, slice(None)) == _samples(seen, 1, slice(None))


WINDOWS: Any = {"order": TimeWindows(every="2w"), "max_num_candidates": 2}
ALONE: Any = {"rank": 0, "world_size": 1}


def _loader(kind: str, path: Path, batch_size: int) -> Any:
    balancing = BalanceConfig(cost=COST)
    if kind == "stream, exchanged":
        stream = StreamConfig(lanes=5, window_rows=2)
        return Balancer(build_stream_loader(path, LoaderConfig(batch_size=batch_size), stream, **ALONE), balancing)
    if "packed" in kind:
        balancing = BalanceConfig(cost=COST, pack=True, max_tokens_per_rank=150)
    options: Any = {"batch_size": batch_size, "max_history_length": 60} | (WINDOWS if "windows" in kind else {})
    if "exchanged" in kind:
        return Balancer(build_loader(path, LoaderConfig(**options), **ALONE), balancing)
    return build_loader(path, LoaderConfig(**options), balance=balancing, **ALONE)


class Failing(Recommender):
    """Records the samples of each epoch of the loader, and fails once."""

    def __init__(self, fails_at: int | None) -> None:
        super().__init__()
        self.fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise ZeroDivisionError
        self.seen.setdefault(batch.epoch, []).append(ids_of(batch))
        loss: torch.Tensor = self.model(batch)
        return loss


class Messages(logging.Handler):
    """Keeps what evenrank logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _fit_alone(
    path: Path,
    folder: Path,
    kind: str,
    limits: Mapping[str, int],
    *,
    batch_size: int = 24,
    checkpoint: str | None = None,
    fails_at: int | None = None,
    has_callback: bool = True,
) -> tuple[dict[int, list[list[int]]], list[str]]:
    """Train in this process; return the samples of each step by epoch of the loader, and what is said."""
    saving = {
        "step-{step}": {"every_n_train_steps": 1},
        "end-{epoch}": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        "failed": {"every_n_epochs": 100, "save_on_exception": True},
    }
    module, messages = Failing(fails_at), Messages()
    logging.getLogger("evenrank").addHandler(messages)
    with warnings.catch_warnings(record=True, action="always") as warned:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            callbacks=[
                *[ElasticResume()] * has_callback,
                *(
                    lightning.callbacks.ModelCheckpoint(
                        folder, filename=name, save_top_k=-1, auto_insert_metric_name=False, **options
                    )
                    for name, options in saving.items()
                    if checkpoint is None
                ),
            ],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=checkpoint is None,
            enable_progress_bar=False,
            enable_model_summary=False,
            **limits,
        )
        with contextlib.suppress(ZeroDivisionError):
            trainer.fit(module, _loader(kind, path, batch_size), ckpt_path=checkpoint and str(folder / checkpoint))
    logging.getLogger("evenrank").removeHandler(messages)
    return module.seen, messages.texts + [str(each.message) for each in warned]


@pytest.mark.parametrize("kind", ["epochs", "packed", "windows", "windows, exchanged", "stream, exchanged"])
def test_every_checkpoint_of_every_loader_resumes_with_what_is_left(
    small_dataset: Path, tmp_path: Path, kind: str
) -> None:
    def fit(limits: Mapping[str, int], **options: Any) -> dict[int, list[list[int]]]:
        seen, messages = _fit_alone(small_dataset, tmp_path, kind, limits, **options)
        assert not [message for message in messages if "was left at" in message]
        return seen

    def samples(seen: Mapping[int, list[list[int]]]) -> dict[int, list[int]]:
        return {epoch: sorted(sample for step in steps for sample in step) for epoch, steps in seen.items()}

    loader = _loader(kind, small_dataset, 24)
    whole = {epoch: [ids_of(batch) for batch in loader] for epoch in range(3)}
    assert fit({"max_epochs": 3}) == whole
    lengths = [len(steps) for steps in whole.values()]
    assert kind in ("epochs", "stream, exchanged") or len({*lengths}) > 1
    fit({"max_epochs": 1}, fails_at=2)
    steps = {"step-1": 1, "failed": 2, f"step-{lengths[0]}": lengths[0], "end-0": lengths[0], "end-1": sum(lengths[:2])}
    for name, done in steps.items():
        left, offset = {}, 0
        for epoch, of_epoch in whole.items():
            if rest := of_epoch[max(done - offset, 0) :]:
                left[epoch] = rest
            offset += len(of_epoch)
        # Iterations, by which Lightning counts with `max_steps`, are of the same batches, epochs of any.
        assert fit({"max_steps": offset, "max_epochs": -1}, checkpoint=f"{name}.ckpt") == left, name
        assert samples(fit({"max_epochs": 3}, checkpoint=f"{name}.ckpt", batch_size=16)) == samples(left), name


def test_without_the_callback_a_job_says_what_it_loses(small_dataset: Path, tmp_path: Path) -> None:
    arguments: Any = (small_dataset, tmp_path, "windows", {"max_epochs": 3})
    _fit_alone(*arguments)
    _, alone = _fit_alone(*arguments, has_callback=False)
    _, resumed = _fit_alone(*arguments, has_callback=False, checkpoint="step-2.ckpt")
    with pytest.raises(ConfigError, match=r"does not load the loader's state .* pass .*ElasticResume"):
        _fit_alone(*arguments, has_callback=False, checkpoint="end-0.ckpt")
    remedy = "in Lightning, pass the Trainer callbacks=[ElasticResume()]"
    for messages in (alone, resumed):
        assert any(message.startswith("epoch 1 was left at position") and remedy in message for message in messages)
    assert any("Please add the following callbacks" in message and "ElasticResume" in message for message in resumed)
