"""TorchRec's pipelines train and evaluate like a plain loop, also after a run that was abandoned."""

import functools
import itertools
import logging
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evenrank.training import accumulate
from tests.examples.sharded_model import Model, balanced, batches_of, distribute, join, scaled
from tests.ranks import RankPool
from trainer import make_pipeline, run_pipeline

PLAIN = "a plain loop"
MODES = {"cpu": ["none", "sparse-dist"], "cuda": ["none", "sparse-dist", "prefetch"]}
NUM_TRAIN, NUM_EVAL, NUM_EPOCHS = 6, 3, 2
Log = list[tuple[str, int, int, float, Any]]  # what, epoch, step, loss and logits of each batch
Steps = Iterator[tuple[Any, Tensor, Tensor]]  # batch, loss and logits


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> Steps:
    for batch in batches:
        optimizer.zero_grad()
        output = model(batch)
        loss = scaled(output, batch)
        if model.training:
            loss.backward()
            optimizer.step()
        yield batch, loss.detach(), output[1]


def _train_and_evaluate(rank: int, world_size: int, device_type: str, mode: str) -> Log:
    """Train for some epochs; evaluate after three steps and at the end of each, and without the pipeline too."""
    device = join(rank, device_type)
    model, optimizer = distribute(Model(), device, cached=mode == "prefetch")
    plain = functools.partial(_loop, model, optimizer)
    pipeline = None if mode == PLAIN else make_pipeline(mode, model, optimizer, device, loss=scaled)
    log: Log = []

    def note(kind: str, steps: Steps) -> None:
        for batch, loss, logits in steps:
            log.append((kind, batch.epoch, batch.step, float(loss), logits.detach().cpu().numpy()))

    def run(batches: Iterable[Any]) -> Steps:
        if pipeline is None:
            yield from plain(batches)
            return
        for step in run_pipeline(pipeline, batches):
            assert mode == "none" or len(pipeline._pipelined_modules) == 1  # type: ignore[attr-defined]  # ids sent ahead
            yield step.batch, step.loss, step.output[1]

    train = balanced(batches_of(rank, world_size, num_batches=NUM_TRAIN), device)
    evaluation = balanced(batches_of(rank, world_size, num_batches=NUM_EVAL), device)
    with train, evaluation:
        for number in range(NUM_EPOCHS):
            epoch: Iterator[Any] = iter(train)
            if number:  # with loss tokens per task
                with_tasks = accumulate(train, 1, task_tokens=lambda batch: batch.num_candidates.sum().view(1))
                epoch = chain.from_iterable(with_tasks)
            for part in (islice(epoch, 3), epoch):
                for _ in islice(run(evaluation), 1):  # which is abandoned
                    pass
                model.train()
                note("train", run(part))
                model.eval()
                with torch.no_grad():
                    note("eval", run(evaluation))
                    note("direct", plain(evaluation))
    return log


def _all_modes(rank: int, world_size: int, device_type: str) -> dict[str, Log]:
    logging.disable(logging.WARNING)
    return {mode: _train_and_evaluate(rank, world_size, device_type, mode) for mode in (PLAIN, *MODES[device_type])}


@pytest.mark.parametrize(
    ("pool", "device_type"), [("ranks", "cpu"), pytest.param("gpu_ranks", "cuda", marks=pytest.mark.multi_gpu)]
)
@pytest.mark.processes
def test_losses_and_logits_are_equal_with_and_without_a_pipeline(
    request: pytest.FixtureRequest, pool: str, device_type: str
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    tolerance = 0 if device_type == "cpu" else 1e-4  # sums are in no fixed order there
    evaluated = [("eval", NUM_EVAL), ("direct", NUM_EVAL)]
    parts = [("train", 3), *evaluated, ("train", NUM_TRAIN - 3), *evaluated] * NUM_EPOCHS
    for by_mode in ranks.run(2, _all_modes, device_type):
        reference = by_mode[PLAIN]
        assert [kind for kind, *_ in reference] == [kind for kind, count in parts for _ in range(count)]
        steps = [(epoch, step) for kind, epoch, step, *_ in reference if kind == "train"]
        assert steps == list(itertools.product(range(NUM_EPOCHS), range(NUM_TRAIN)))
        losses = [loss for kind, *_, loss, _ in reference if kind == "eval"]
        assert np.abs(np.subtract(losses[:NUM_EVAL], losses[-NUM_EVAL:])).min() > 1e-3  # it has been trained
        for mode, log in by_mode.items():
            assert [entry[:3] for entry in log] == [entry[:3] for entry in reference], mode
            for (*_, loss, logits), (*_, expected_loss, expected_logits) in zip(log, reference, strict=True):
                np.testing.assert_allclose(loss, expected_loss, rtol=tolerance, err_msg=mode)
                np.testing.assert_allclose(logits, expected_logits, rtol=tolerance, atol=tolerance, err_msg=mode)
