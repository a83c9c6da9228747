"""TorchRec's pipelines train and evaluate like a plain loop, resume after the batch trained last, and never wait."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evenrank.training import accumulate
from tests.dataloader.batch_helpers import ids_of
from tests.examples.sharded_model import Model, balanced, batches_of, distribute, join, scaled
from tests.ranks import RankPool
from trainer import make_pipeline, run_pipeline

PLAIN = "a plain loop"
MODES = {"cpu": ["none", "sparse-dist"], "cuda": ["none", "sparse-dist", "prefetch"]}
DEVICES = pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
NUM_TRAIN, NUM_EVAL, NUM_EPOCHS = 6, 3, 2
Log = list[tuple[str, int, int, float, Any]]  # what, epoch, step, loss and logits of each batch
Steps = Iterator[tuple[Any, Tensor, Tensor]]  # batch, loss and logits


@pytest.fixture
def pool(device_type: str, request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = request.getfixturevalue("ranks" if device_type == "cpu" else "gpu_ranks")
    return pool


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


@DEVICES
@pytest.mark.processes
def test_losses_and_logits_are_equal_with_and_without_a_pipeline(pool: RankPool, device_type: str) -> None:
    tolerance = 0 if device_type == "cpu" else 1e-4  # sums are in no fixed order there
    evaluated = [("eval", NUM_EVAL), ("direct", NUM_EVAL)]
    parts = [("train", 3), *evaluated, ("train", NUM_TRAIN - 3), *evaluated] * NUM_EPOCHS
    for by_mode in pool.run(2, _all_modes, device_type):
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


def _stop_and_resume(rank: int, world_size: int, device_type: str) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Stop after three steps, to save a state and for good; return the ids of all steps, and those of the loader."""
    logging.disable(logging.WARNING)
    device = join(rank, device_type)
    results = []
    for mode in MODES[device_type]:
        model, optimizer = distribute(Model(), device, cached=mode == "prefetch")
        pipeline = make_pipeline(mode, model, optimizer, device, loss=scaled)
        with balanced(batches_of(rank, world_size), device) as source:
            iterator: Any = iter(source)
            trained = [pipeline.progress(iterator).batch for _ in range(3)]
            assert next(iterator).step - trained[-1].step >= 2  # it had pulled batches that it did not train
            state = source.state_dict(after=trained[-1])
            pipeline.reset()
            iterator.close()
            for step in islice(run_pipeline(pipeline, source), 3):
                assert step.batch.epoch == 1
            # That run is abandoned.
            assert [step.batch.step for step in run_pipeline(pipeline, source)] == list(range(8))
        with balanced(batches_of(rank, world_size), device) as resumed:
            resumed.load_state_dict(state)
            ids = [ids_of(batch) for batch in (*trained, *resumed)]
        results.append((ids, [ids_of(batch) for batch in batches_of(rank, world_size)]))
    return results


@DEVICES
@pytest.mark.processes
def test_a_job_resumes_after_the_batch_trained_last_and_an_abandoned_run_ends(pool: RankPool, device_type: str) -> None:
    for of_ranks in zip(*pool.run(2, _stop_and_resume, device_type), strict=True):
        resumed, expected = (zip(*steps, strict=True) for steps in zip(*of_ranks, strict=True))
        for step, expected_step in zip(resumed, expected, strict=True):
            assert sorted(chain(*step)) == sorted(chain(*expected_step))


@contextmanager
def _ids_may_be_counted() -> Iterator[None]:
    """Exempt TorchRec's input distribution, which copies to the host how many ids each rank gets, ahead of the step."""
    from torchrec.distributed import embedding_sharding
    from torchrec.distributed.embedding import ShardedEmbeddingCollection

    def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("default")
            try:
                return function(*arguments, **options)
            finally:
                torch.cuda.set_sync_debug_mode(mode)

        return call

    exempt = [
        (ShardedEmbeddingCollection, "input_dist"),
        (embedding_sharding.KJTListSplitsAwaitable, "_wait_impl"),
        (embedding_sharding.FusedKJTListSplitsAwaitable, "__init__"),
        (embedding_sharding.FusedKJTListSplitsAwaitable, "_wait_impl"),
        (embedding_sharding.KJTListAwaitable, "_wait_impl"),
    ]
    with ExitStack() as stack:
        for owner, name in exempt:
            stack.enter_context(patch.object(owner, name, unchecked(getattr(owner, name))))
        yield


def _train_without_synchronizing(rank: int, world_size: int, mode: str) -> list[float]:
    """Train with an error wherever the host would wait for the device, after a warm-up, and return the losses."""
    logging.disable(logging.WARNING)
    device = join(rank, "cuda")
    model, optimizer = distribute(Model(), device, cached=mode == "prefetch")
    pipeline = make_pipeline(mode, model, optimizer, device, loss=scaled)
    losses = []
    with balanced(batches_of(rank, world_size, num_batches=16), device) as batches, _ids_may_be_counted():
        try:
            for step in run_pipeline(pipeline, batches):
                losses.append(step.loss)
                # DistributedDataParallel arranges its buckets in the first steps.
                torch.cuda.set_sync_debug_mode("error" if 5 <= len(losses) < 15 else "default")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [float(loss) for loss in losses]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("mode", MODES["cuda"])
def test_no_step_waits_for_the_device(gpu_ranks: RankPool, mode: str) -> None:
    for losses in gpu_ranks.run(2, _train_without_synchronizing, mode):
        assert len(losses) == 16
        assert np.isfinite(losses).all()
