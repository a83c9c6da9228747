from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenrank.dataloader import SequenceBatch
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer
from evenrank.training import scale_loss
from tests.examples.hstu.exactness import gradients_of
from tests.examples.hstu.samples import CONFIG, Sample, make_batch, make_ranking, make_retrieval, random_samples
from tests.ranks import RankPool

ROWS = 3
STEPS = 3
WORLD_SIZE = 4


def _samples(step: int, task: str) -> list[Sample]:
    count = WORLD_SIZE * ROWS if step < STEPS - 1 else ROWS  # in the last step, ranks have nothing
    return random_samples(count, seed=step, predict="next" if task == "retrieval" else task)


def _batch(samples: list[Sample], rows: int, step: int, task: str) -> SequenceBatch:
    batch = make_batch(samples, rows=rows).replace(position=step + 1)  # a Balancer counts steps over a list
    return batch.replace(labels=None) if task == "retrieval" else batch


def _model(task: str) -> nn.Module:
    return make_retrieval() if task == "retrieval" else make_ranking()


def _train(rank: int, world_size: int, task: str, strategies: tuple[str, ...]) -> dict[str, tuple[Any, int]]:
    """Return by strategy the gradients of each step, and how many batches have changed."""
    model = DistributedDataParallel(_model(task))
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    batches = [_batch(_samples(step, task)[mine], ROWS, step, task) for step in range(STEPS)]
    results = {}
    for strategy in strategies:
        gradients, num_changed = [], 0
        with Balancer(batches, BalanceConfig(cost=CONFIG.cost(), strategy=strategy)) as balancer:
            for batch, loaded in zip(balancer, batches, strict=True):
                loss_sums, _ = model(batch)
                scale_loss(loss_sums.sum(), batch).backward()
                gradients.append(gradients_of(model))
                num_changed += batch.features.length_per_key() != loaded.features.length_per_key()
        results[strategy] = gradients, num_changed
    return results


@pytest.mark.parametrize(
    ("task", "strategies"),
    [("candidates", tuple(STRATEGIES)), ("history", ("lpt-swap",)), ("retrieval", ("lpt-swap",))],
)
def test_gradients_equal_those_of_one_process(ranks: RankPool, task: str, strategies: tuple[str, ...]) -> None:
    model: Any = _model(task)
    expected = []
    for step in range(STEPS):
        samples = _samples(step, task)
        batch = _batch(samples, len(samples), step, task)
        (model(batch)[0].sum() / batch.loss_tokens).backward()
        expected.append(gradients_of(model))
    results = ranks.run(WORLD_SIZE, _train, task, strategies)
    for strategy in strategies:
        for result in results:
            torch.testing.assert_close(result[strategy][0], expected, rtol=1e-10, atol=1e-10)
        assert (sum(result[strategy][1] for result in results) > 0) == (strategy != "none")
