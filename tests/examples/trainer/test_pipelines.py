import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evenrank.core.errors import ConfigError
from evenrank.training import accumulate
from tests.dataloader.batch_helpers import ids_of
from tests.examples.sharded_model import Model, balanced, batches_of, distribute, join, scaled, skip_without_kernels
from tests.ranks import RankPool
from tests.registrations import restored
from trainer.pipelines import PIPELINES, Pipeline, make_pipeline, run_pipeline

PLAIN = "a plain loop"


MODES = {"cpu": ["none", "sparse-dist"], "cuda": ["none", "sparse-dist", "prefetch"]}
DEVICES = pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])


@pytest.fixture
def pool(device_type: str, request: pytest.FixtureRequest) -> RankPool:
    if device_type == "cuda":
        skip_without_kernels()
    pool: RankPool = request.getfixturevalue("ranks" if device_type == "cpu" else "gpu_ranks")
    return pool


NUM_TRAIN, NUM_EVAL, NUM_EPOCHS = 6, 3, 2

Log = list[tuple[str, int, int, float, Any]]  # what, epoch, step, loss and logits of each batch
Steps = Iterator[tuple[Any, Tensor, Tensor]]  # batch, loss and logits


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, loss_inside: bool, batches: Iterable[Any]) -> Steps:
    for batch in batches:
        optimizer.zero_grad()
        output = model(batch)
        loss = output[0] if loss_inside else scaled(output, batch)
        if model.training:
            loss.backward()
            optimizer.step()
        yield batch, loss.detach(), output[1]


def _train_and_evaluate(rank: int, world_size: int, device_type: str, mode: str, loss_inside: bool) -> Log:
    """Train for some epochs; evaluate after three steps and at the end of each, and without the pipeline too."""
    device, group = join(rank, device_type)
    model, optimizer = distribute(Model(loss_inside=loss_inside), device, group, cached=mode == "prefetch")
    plain = functools.partial(_loop, model, optimizer, loss_inside)
    log: Log = []

    def note(kind: str, steps: Steps) -> None:
        for batch, loss, logits in steps:
            log.append((kind, batch.epoch, batch.step, float(loss), logits.detach().cpu().numpy()))

    if mode != PLAIN:
        pipeline: Any = make_pipeline(mode, model, optimizer, device, loss=None if loss_inside else scaled)

    def run(batches: Iterable[Any]) -> Steps:
        if mode == PLAIN:
            yield from plain(batches)
            return
        for step in run_pipeline(pipeline, batches):
            assert mode == "none" or len(pipeline._pipelined_modules) == 1  # its ids are sent ahead
            yield step.batch, step.loss, step.output if loss_inside else step.output[1]

    train = balanced(batches_of(rank, world_size, num_batches=NUM_TRAIN), device)
    evaluation = balanced(batches_of(rank, world_size, num_batches=NUM_EVAL), device)
    with train, evaluation:
        for number in range(NUM_EPOCHS):
            epoch: Iterator[Any] = iter(train)
            if number:  # with loss tokens per task
                epoch = chain.from_iterable(
                    accumulate(train, 1, task_tokens=lambda batch: batch.num_candidates.sum().view(1))
                )
            for part in (islice(epoch, 3), epoch):
                model.train()
                note("train", run(part))
                model.eval()
                with torch.no_grad():
                    note("eval", run(evaluation))
                    note("direct", plain(evaluation))
    return log


def _all_modes(rank: int, world_size: int, device_type: str) -> dict[tuple[str, bool], Log]:
    logging.disable(logging.WARNING)
    modes = itertools.product((PLAIN, *MODES[device_type]), (False, True))
    return {mode: _train_and_evaluate(rank, world_size, device_type, *mode) for mode in modes}


@DEVICES
@pytest.mark.processes
def test_losses_and_logits_are_equal_with_and_without_a_pipeline(pool: RankPool, device_type: str) -> None:
    tolerance = 0 if device_type == "cpu" else 1e-4  # sums are in no fixed order there
    evaluated = [("eval", NUM_EVAL), ("direct", NUM_EVAL)]
    parts = [("train", 3), *evaluated, ("train", NUM_TRAIN - 3), *evaluated] * NUM_EPOCHS
    for by_mode in pool.run(2, _all_modes, device_type):
        reference = by_mode[PLAIN, False]
        assert [kind for kind, *_ in reference] == [kind for kind, count in parts for _ in range(count)]
        steps = [(epoch, step) for kind, epoch, step, *_ in reference if kind == "train"]
        assert steps == [(epoch, step) for epoch in range(NUM_EPOCHS) for step in range(NUM_TRAIN)]
        losses = [loss for kind, *_, loss, _ in reference if kind == "eval"]
        assert np.abs(np.subtract(losses[:NUM_EVAL], losses[-NUM_EVAL:])).min() > 1e-3  # it has been trained
        for mode, log in by_mode.items():
            assert [entry[:3] for entry in log] == [entry[:3] for entry in reference], mode
            for (*_, loss, logits), (*_, expected_loss, expected_logits) in zip(log, reference, strict=True):
                np.testing.assert_allclose(loss, expected_loss, rtol=tolerance, err_msg=str(mode))
                np.testing.assert_allclose(logits, expected_logits, rtol=tolerance, atol=tolerance, err_msg=str(mode))


def _stop_and_resume(rank: int, world_size: int, device_type: str) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Stop after three steps, to save a state and for good; return the ids of all steps, and those of the loader."""
    logging.disable(logging.WARNING)
    device, group = join(rank, device_type)
    results = []
    for mode in MODES[device_type]:
        parts = distribute(Model(), device, group, cached=mode == "prefetch")
        pipeline = make_pipeline(mode, *parts, device, loss=scaled)
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


def _unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return function(*arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    return call


@contextmanager
def _ids_may_be_counted() -> Iterator[None]:
    """Exempt TorchRec's input distribution, which copies to the host how many ids each rank gets, ahead of the step."""
    from torchrec.distributed import embedding_sharding
    from torchrec.distributed.embedding import ShardedEmbeddingCollection

    exempt = [
        (ShardedEmbeddingCollection, "input_dist"),
        (embedding_sharding.KJTListSplitsAwaitable, "_wait_impl"),
        (embedding_sharding.FusedKJTListSplitsAwaitable, "__init__"),
        (embedding_sharding.FusedKJTListSplitsAwaitable, "_wait_impl"),
        (embedding_sharding.KJTListAwaitable, "_wait_impl"),
    ]
    with ExitStack() as stack:
        for owner, name in exempt:
            stack.enter_context(patch.object(owner, name, _unchecked(getattr(owner, name))))
        yield


def _train_without_synchronizing(rank: int, world_size: int, mode: str) -> list[float]:
    """Train with an error wherever the host would wait for the device, after a warm-up, and return the losses."""
    logging.disable(logging.WARNING)
    device, group = join(rank, "cuda")
    model, optimizer = distribute(Model(), device, group, cached=mode == "prefetch")
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
    skip_without_kernels()
    for losses in gpu_ranks.run(2, _train_without_synchronizing, mode):
        assert len(losses) == 16
        assert np.isfinite(losses).all()


def _make(name: str, model: nn.Module, **options: Any) -> Pipeline[Any]:
    return make_pipeline(name, model, torch.optim.SGD(model.parameters(), lr=0.5), "cpu", **options)


def _line() -> nn.Linear:
    line = nn.Linear(1, 1, bias=False)
    nn.init.ones_(line.weight)
    return line


def _sum(output: Tensor, batch: Tensor) -> Tensor:
    return output.sum()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sparse", r"no pipeline is called 'sparse'; known are none, sparse-dist, prefetch"),
        ("prefetch", "'prefetch' needs a CUDA device, got cpu; use 'sparse-dist' or 'none'"),
        ("sparse-dist", r"has no sharded modules for the pipeline 'sparse-dist' .*; use 'none'"),
    ],
)
def test_a_pipeline_that_cannot_work_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _make(name, Model(), loss=scaled)


def test_a_model_without_torchrec_trains_in_the_pipeline_none() -> None:
    model = _line()
    batches = [torch.full((1, 1), float(value)) for value in (1, 2)]
    losses = [step.loss.item() for step in run_pipeline(_make("none", model, loss=_sum), batches)]
    assert losses == [1, 2 * 0.5]
    assert model.weight.item() == 1 - 0.5 - 1
    with pytest.raises(ConfigError, match=r"returned Tensor instead of \(loss, output\); pass loss= to make_pipeline"):
        list(run_pipeline(_make("none", model), batches))


def test_a_registered_pipeline_is_made_and_run_like_ours() -> None:
    model = _line()
    with restored(PIPELINES):
        PIPELINES.register("mine")(lambda *parts: Mock(wraps=PIPELINES["none"](*parts)))
        pipeline: Any = _make("mine", model, loss=_sum)
    ones = [torch.ones(1, 1)] * 2
    assert [step.loss.item() for step in run_pipeline(pipeline, ones)] == [1, 0.5]
    model.eval()
    assert [(step.loss.item(), step.output.item()) for step in run_pipeline(pipeline, ones)] == [(0, 0)] * 2
    assert (pipeline.progress.call_count, pipeline.reset.call_count) == (6, 2)
    with pytest.raises(ConfigError, match="'mine' must be a function of model, optimizer, device and forward, got 1"):
        PIPELINES.register("mine")(1)  # type: ignore[arg-type]
