"""Sharded and replicated tables train like one process, with TorchRec's pipelines too, also after an abandoned run."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel

from evenrank.dataloader import LoaderConfig, SequenceBatch
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.random_batches import RandomBatches, RandomData
from evenrank.datasets.distributions import Lognormal, Uniform
from evenrank.training import accumulate, make_dmp_optimizer, scale_loss
from hstu import Embeddings, HSTUConfig, HSTURanking, at_least, shard, tables
from tests.dataloader.balance.costs import COST
from tests.ranks import RankPool
from trainer import make_pipeline, run_pipeline

RATE = 0.05
ROWS = {"item_id": 41, "action": 10, "region": 5}  # 41 rows: shards of different sizes
ITEMS, REGIONS = (Uniform(high=ROWS[key] - 1) for key in ("item_id", "region"))
LENGTHS = Lognormal(mean=10, std=10, high=40)
WIDTHS: dict[str, Any] = {"embedding_dim": 4, "hidden": 8, "heads": 1, "head_dim": 8, "layers": 1}
CONFIG = LoaderConfig(batch_size=8, max_history_length=40, max_num_candidates=2)
SHAPE = HSTUConfig(max_length=90, contextual=("region",), attention="padded", dropout=0, **WIDTHS)
DATA = RandomData(lengths=LENGTHS, items=ITEMS, contextual={"region": REGIONS}, num_real=Uniform(low=0, high=8))
PLAIN = ("a plain loop", 20)
# Pipelines, and the number of rows from which on tables are sharded: one table, all or none.
MODES = [PLAIN, ("a plain loop", 1), ("a plain loop", 1000), ("none", 20), ("sparse-dist", 20)]
NUM_SHARDED = {1: 3, 20: 1, 1000: 0}
NUM_TRAIN, NUM_EVAL, NUM_EPOCHS = 6, 3, 2
Log = list[tuple[str, int, int, float, Any]]  # what, epoch, step, loss and logits of each batch
Steps = Iterator[tuple[Any, Tensor, Tensor]]  # batch, loss and logits


@torch.no_grad()
def _fill(table: Tensor) -> Tensor:
    return table.copy_(torch.linspace(-1, 1, table.numel()).reshape(table.shape))


def _model(min_sharded_rows: int) -> HSTURanking:
    torch.manual_seed(0)
    configs = [replace(table, init_fn=_fill) for table in tables(ROWS, SHAPE)]  # which `shard` draws again
    embeddings: Any = Embeddings(configs, min_sharded_rows=min_sharded_rows)
    return HSTURanking(embeddings, SHAPE, targets=at_least(5))


def _scaled(output: tuple[Tensor, Tensor], batch: SequenceBatch) -> Tensor:
    return scale_loss(output[0], batch).sum()


def _batches_of(rank: int, world_size: int, num_batches: int) -> RandomBatches[SequenceBatch]:
    return RandomBatches(CONFIG, DATA, num_batches=num_batches, rank=rank, world_size=world_size)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> Steps:
    for batch in batches:
        optimizer.zero_grad()
        output = model(batch)
        loss = _scaled(output, batch)
        if model.training:
            loss.backward()
            optimizer.step()
        yield batch, loss.detach(), output[1]


def _train_and_evaluate(rank: int, world_size: int, device: torch.device, name: str, min_sharded_rows: int) -> Log:
    """Train for some epochs; evaluate after three steps and at the end of each, and without the pipeline too."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE}
    group = None if device.type == "cpu" else dist.new_group(backend="nccl")
    model: DistributedModelParallel = shard(
        _model(min_sharded_rows), device, fused=fused, group=group, cached=name == "prefetch"
    )
    optimizer: Any = make_dmp_optimizer(model, lambda parameters: torch.optim.SGD(parameters, lr=RATE))
    assert set(optimizer.params) == {name for name, _ in model.named_parameters()}
    assert sum(".sharded." in name for name in model.state_dict()) == NUM_SHARDED[min_sharded_rows]
    pipeline: Any = None if name == PLAIN[0] else make_pipeline(name, model, optimizer, device, loss=_scaled)
    log: Log = []
    model.eval()

    def note(kind: str, steps: Steps) -> None:
        for batch, loss, logits in steps:
            log.append((kind, batch.epoch, batch.step, float(loss), logits.detach().cpu().numpy()))

    def run(batches: Iterable[Any]) -> Steps:
        if pipeline is None:
            yield from _loop(model, optimizer, batches)
            return
        for step in run_pipeline(pipeline, batches):
            assert name == "none" or len(pipeline._pipelined_modules) == 1  # ids are sent ahead
            yield step.batch, step.loss, step.output[1]

    train, evaluation = (
        Balancer(_batches_of(rank, world_size, count), BalanceConfig(cost=COST), device=device)
        for count in (NUM_TRAIN, NUM_EVAL)
    )
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
                    note("direct", _loop(model, optimizer, evaluation))
    return log


def _all_modes(rank: int, world_size: int, device_type: str) -> dict[tuple[str, int], Log]:
    logging.disable(logging.WARNING)
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    if device_type == "cuda":
        skip_without_kernels()
        torch.cuda.set_device(device)
    modes = [*MODES, *([("prefetch", 20)] if device_type == "cuda" else [])]
    return {mode: _train_and_evaluate(rank, world_size, device, *mode) for mode in modes}


def _losses_in_one_process(world_size: int) -> list[float]:
    model = _model(PLAIN[1])
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    loaders = [_batches_of(rank, world_size, NUM_TRAIN) for rank in range(world_size)]
    for _ in range(NUM_EPOCHS):
        for batches in zip(*loaders, strict=True):
            optimizer.zero_grad()
            loss = torch.stack([model(batch)[0].sum() for batch in batches]).sum()
            (loss / sum(batch.loss_tokens for batch in batches)).backward()
            losses.append(loss.item() / sum(batch.loss_tokens for batch in batches))
            optimizer.step()
    return losses


def skip_without_kernels() -> None:
    kernel = "split_embedding_codegen_lookup_sgd_function"
    if not any(hasattr(torch.ops.fbgemm, name) for name in (kernel, f"{kernel}_pt2")):
        pytest.skip("this build of fbgemm_gpu has no embedding kernels")


@pytest.mark.parametrize(
    ("pool", "device_type"), [("ranks", "cpu"), pytest.param("gpu_ranks", "cuda", marks=pytest.mark.multi_gpu)]
)
@pytest.mark.processes
def test_losses_and_logits_are_those_of_one_process_with_any_tables_sharded_and_any_pipeline(
    request: pytest.FixtureRequest, pool: str, device_type: str
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    evaluated = [("eval", NUM_EVAL), ("direct", NUM_EVAL)]
    parts = [("train", 3), *evaluated, ("train", NUM_TRAIN - 3), *evaluated] * NUM_EPOCHS
    results = ranks.run(2, _all_modes, device_type)
    losses = [[loss for kind, *_, loss, _ in by_mode[PLAIN] if kind == "train"] for by_mode in results]
    np.testing.assert_allclose(np.mean(losses, axis=0), _losses_in_one_process(2), rtol=1e-4)
    for by_mode in results:
        reference = by_mode[PLAIN]
        assert [kind for kind, *_ in reference] == [kind for kind, count in parts for _ in range(count)]
        of_eval = [loss for kind, *_, loss, _ in reference if kind == "eval"]
        assert np.abs(np.subtract(of_eval[:NUM_EVAL], of_eval[-NUM_EVAL:])).min() > 1e-3  # it has been trained
        for mode, log in by_mode.items():
            # Sums are in another order if other tables are sharded, and in none on GPUs.
            tolerance = 0 if device_type == "cpu" and mode[1] == PLAIN[1] else 1e-4
            assert [entry[:3] for entry in log] == [entry[:3] for entry in reference], mode
            for (*_, loss, logits), (*_, expected_loss, expected_logits) in zip(log, reference, strict=True):
                np.testing.assert_allclose(loss, expected_loss, rtol=tolerance, err_msg=str(mode))
                np.testing.assert_allclose(logits, expected_logits, rtol=tolerance, atol=tolerance, err_msg=str(mode))
