import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline import Tracer

import evenrank.training
from evenrank.core.errors import ConfigError, RankError
from evenrank.dataloader import JaggedBatch, Loader, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, LinearCost
from evenrank.dataloader.balance.ranks.connection import SCALING
from evenrank.training import LossAverage, accumulate, label_bits, scale_loss
from tests.dataloader.balance.costs import COST
from tests.ranks import RankPool

WORLD_SIZE = 4


def batch_of(**changes: Any) -> JaggedBatch:
    return JaggedBatch(batch_size=1, num_real=0).replace(**changes)


def _loader(path: Path, batch_size: int, rank: int = 0, world_size: int = 1) -> Loader[SequenceBatch]:
    config = LoaderConfig(batch_size=batch_size, max_history_length=20, max_num_candidates=2)
    return build_loader(path, config, rank=rank, world_size=world_size)


def _items(batch: SequenceBatch) -> tuple[Tensor, ...]:
    return torch.split(batch.features["item_id"].values(), batch.features["item_id"].lengths().tolist())


def _counted(candidates: Tensor) -> Tensor:
    """Return which candidates are loss tokens of which of three tasks: bool [n, 3]; the last task has few."""
    return torch.stack([candidates % divisor == 0 for divisor in (1, 2, 7)], dim=-1)


def _task_tokens(batch: SequenceBatch) -> Tensor:
    candidates = [ids[len(ids) - n :] for ids, n in zip(_items(batch), batch.num_candidates.tolist(), strict=True)]
    return _counted(torch.cat([torch.empty(0, dtype=torch.int64), *candidates])).sum(dim=0)


class Model(torch.nn.Module):
    """Scores each candidate against the sum of the history; in float64, so that the order of sums does not matter."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(num_items, 4, dtype=torch.float64)
        self.weight = torch.nn.Parameter(torch.randn(3, 4, 4, dtype=torch.float64))

    def forward(self, batch: SequenceBatch) -> Tensor:
        assert batch.labels is not None
        labels = torch.split(batch.labels["label"].values(), batch.labels["label"].lengths().tolist())
        # The loss of a rank without samples must depend on every parameter too, or DDP waits for its gradients.
        losses = [(self.embedding.weight.sum() + self.weight.sum(dim=(1, 2))) * 0]
        for ids, actions, count in zip(_items(batch), labels, batch.num_candidates.tolist(), strict=True):
            if count:
                vectors = self.embedding(ids)
                scores = (vectors[-count:] @ self.weight @ vectors[:-count].sum(dim=0)).T
                losses.append((_counted(ids[-count:]) * (scores - actions[:, None]) ** 2).sum(dim=0))
        return torch.stack(losses).sum(dim=0)


# The steps that are accumulated, and whether each task has loss tokens of its own.
MODES = [(num_steps, by_task) for num_steps in (1, 2) for by_task in (False, True)]


def _gradients(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _train(rank: int, world_size: int, path: Path, strategy: str) -> tuple[list[list[Tensor]], list[int]]:
    """Return the gradients of each optimizer step, and the samples of each batch."""
    gradients, num_real = [], []
    for num_steps, by_task in MODES if strategy == "none" else MODES[-1:]:
        model = DistributedDataParallel(Model(501))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        with Balancer(_loader(path, 8, rank, world_size), BalanceConfig(cost=COST, strategy=strategy)) as balancer:
            for batches in accumulate(balancer, num_steps, task_tokens=_task_tokens if by_task else None):
                optimizer.zero_grad()
                for batch in batches:
                    num_real.append(batch.num_real)
                    with contextlib.nullcontext() if batch is batches[-1] else model.no_sync():
                        scale_loss(model(batch), batch).sum().backward()
                gradients.append(_gradients(model))
                optimizer.step()
    return gradients, num_real


def _train_on_one_rank(path: Path) -> list[list[Tensor]]:
    """Return the gradients of each optimizer step, with the samples of all ranks in one batch."""
    gradients = []
    for num_steps, by_task in MODES:
        model, batches = Model(501), list(_loader(path, 8 * WORLD_SIZE))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        assert batches[-1].num_real <= 8 * (WORLD_SIZE - 1)  # a rank has no sample in the last step
        assert len(batches) % 2  # an optimizer step that is not full
        for start in range(0, len(batches), num_steps):
            step = batches[start : start + num_steps]
            tokens = sum(_task_tokens(batch) if by_task else torch.tensor(batch.loss_tokens) for batch in step)
            optimizer.zero_grad()
            (torch.stack([model(batch) for batch in step]).sum(dim=0) / tokens).sum().backward()
            gradients.append(_gradients(model))
            optimizer.step()
    return gradients


def test_balanced_gradients_equal_those_of_one_rank_with_all_samples(ranks: RankPool, small_dataset: Path) -> None:
    expected = _train_on_one_rank(small_dataset)
    assert [len(gradients) for gradients in expected] == [2] * len(expected)  # of both parameters
    for strategy in STRATEGIES:
        results = ranks.run(WORLD_SIZE, _train, small_dataset, strategy)
        assert strategy != "none" or any(0 in num_real for _, num_real in results)
        for gradients, _ in results:
            torch.testing.assert_close(gradients, expected[-len(gradients) :], rtol=1e-10, atol=1e-10)


def test_the_loss_of_each_task_is_divided_by_its_own_loss_tokens_if_they_are_counted() -> None:
    sums, batch = torch.tensor([3.0, 6.0, 0.0]), batch_of(world_loss_tokens=8, dp_size=4)
    assert scale_loss(sums, batch).tolist() == [3 * 4 / 8, 6 * 4 / 8, 0]
    assert scale_loss(sums[0], batch, dp_size=2).item() == 3 * 2 / 8
    counted = batch.replace(world_task_tokens=torch.tensor([8, 3, 0]))
    assert scale_loss(sums, counted).tolist() == [3 * 4 / 8, 6 * 4 / 3, 0]
    assert scale_loss(sums.double(), counted).dtype == torch.float64
    weights = batch.replace(world_task_tokens=torch.tensor([0.25, 0.0], dtype=torch.float64))
    assert (scale_loss(sums[1:], weights).tolist(), scale_loss(sums[1:], weights).dtype) == ([96, 0], torch.float32)
    bits = label_bits(torch.tensor([0, 1, 6, 255]), 3)
    assert (bits.tolist(), bits.dtype) == ([[0, 0, 0], [1, 0, 0], [0, 1, 1], [1, 1, 1]], torch.float32)
    assert label_bits(torch.zeros(0, dtype=torch.int64), 8).shape == (0, 8)


def steps_of(world_loss_tokens: list[int | None]) -> list[JaggedBatch]:
    return [batch_of(step=step, loss_tokens=1, world_loss_tokens=count) for step, count in enumerate(world_loss_tokens)]


def test_each_batch_has_the_loss_tokens_of_its_whole_optimizer_step_and_none_is_pulled_before_it() -> None:
    pulled: list[JaggedBatch] = []

    def pulling() -> Iterator[JaggedBatch]:
        for batch in steps_of([5, 3, 2, 0, 7]):
            pulled.append(batch)
            yield batch

    iterator = accumulate(pulling(), 2)
    assert pulled == []
    for counts, num_pulled in (([(0, 8), (1, 8)], 2), ([(2, 2), (3, 2)], 4), ([(4, 7)], 5)):
        group = next(iterator)
        assert len(pulled) == num_pulled
        assert [(batch.step, batch.world_loss_tokens) for batch in group] == counts
        assert all((batch.loss_tokens, batch.world_task_tokens) == (1, None) for batch in group)
    assert list(iterator) == []
    sums = torch.tensor([[0.5, 2**24], [0.25, 1]], dtype=torch.float32)  # of weights, which are added up in float64
    ((first, second),) = accumulate(steps_of([9, 9]), 2, task_tokens=lambda batch: sums[batch.step])
    assert first.world_task_tokens is second.world_task_tokens
    assert first.world_task_tokens is not None
    assert first.world_task_tokens.tolist() == [0.75, 2**24 + 1]


def _on_a_mesh(rank: int, world_size: int, counts: Tensor) -> tuple[list[list[list[int]]], list[list[float]]]:
    """Return the tokens of each optimizer step, and the averages of two steps, of another one, and of none."""
    dp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    mine = counts[dp.get_local_rank()]
    groups: Any = accumulate(steps_of([9, 9, 9]), 2, task_tokens=lambda batch: mine[batch.step], group=dp)
    average, averages = LossAverage(3, group=dp), []
    for step, tokens in enumerate(mine):
        # What all ranks have is nothing to average by: it may be that of several steps.
        average.update(tokens * (dp.get_local_rank() + 1.5), batch_of(world_loss_tokens=10**6), task_tokens=tokens)
        if step:
            averages.append(average.compute())
            assert repr(average.compute()) == repr(averages[-1])  # also if it is NaN
            average.reset()
    return [[batch.world_task_tokens.tolist() for batch in group] for group in groups], [*averages, average.compute()]


def test_tokens_and_averages_are_of_all_data_parallel_ranks(ranks: RankPool) -> None:
    # [data-parallel ranks, steps, tasks]; the losses are 1.5 and 2.5 for each token.
    counts = torch.tensor([[[1, 0, 7], [2, 0, 0], [4, 0, 1]], [[10, 0, 0], [20, 0, 3], [0, 5, 0]]])
    of_two = [(3 * 1.5 + 30 * 2.5) / 33, math.nan, (7 * 1.5 + 3 * 2.5) / 10]
    for tokens, averages in ranks.run(4, _on_a_mesh, counts):
        assert tokens == [[[33, 0, 10], [33, 0, 10]], [[4, 5, 1]]]
        assert averages == [pytest.approx(of, nan_ok=True) for of in (of_two, [1.5, 2.5, 1.5], [math.nan] * 3)]


def _raise_unlike_others(rank: int, world_size: int) -> None:
    """Accumulate other numbers of steps, count other tasks, or count them on one rank alone."""
    ones = torch.ones(2 + rank, dtype=torch.int64)
    for num_steps, task_tokens, message in (
        (1 + rank, None, "num_steps differs between ranks: 1 on rank 0, 2 on rank 1"),
        (1, lambda batch: ones, r"the shape of task_tokens differs between ranks: \[2\] on rank 0, \[3\] on rank 1"),
        (1, None if rank else lambda batch: ones, "task_tokens differs between ranks: given on rank 0, None on rank 1"),
    ):
        with pytest.raises(RankError, match=f"^{message}$"):
            list(accumulate(steps_of([1, 1]), num_steps, task_tokens=task_tokens))
    with pytest.raises(RankError, match=r"^num_tasks differs between ranks: 1 on rank 0, 2 on rank 1$"):
        LossAverage(1 + rank)


def test_what_differs_between_ranks_is_an_error_on_all_before_they_wait_for_each_other(ranks: RankPool) -> None:
    ranks.run(2, _raise_unlike_others)


class _Scaling(torch.nn.Module):
    """Uses the function by its name in this module, or as an attribute of the package."""

    def __init__(self, *, by_package: bool = False, **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self._by_package, self._options = by_package, options

    def forward(self, batch: JaggedBatch) -> Tensor:
        return (evenrank.training.scale_loss if self._by_package else scale_loss)(self.weight, batch, **self._options)


@pytest.mark.parametrize("tracer", [torch.fx.Tracer(), Tracer()], ids=["torch.fx", "TorchRec"])
def test_a_traced_model_scales_by_the_batch_that_it_runs_on(
    tracer: torch.fx.Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(**options: Any) -> torch.fx.GraphModule:
        return torch.fx.GraphModule(_Scaling(**options), tracer.trace(_Scaling(**options)))

    traced, batch = trace(), batch_of(world_loss_tokens=8, dp_size=4)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [scale_loss]
    assert traced(batch).tolist() == [4 / 8, 4 / 8]
    assert traced(batch_of(world_loss_tokens=5, dp_size=1)).tolist() == pytest.approx([1 / 5, 1 / 5])
    assert traced(batch.replace(world_task_tokens=torch.tensor([8, 2]))).tolist() == [4 / 8, 4 / 2]
    assert trace(dp_size=3)(batch).tolist() == [3 / 8, 3 / 8]
    with pytest.raises(ConfigError, match="the batch has no world_loss_tokens"):
        traced(batch_of())
    monkeypatch.delitem(sys.modules, "evenrank.training.loss")
    monkeypatch.delitem(vars(evenrank.training), "scale_loss", raising=False)  # as if no one had used it before
    assert trace(by_package=True)(batch).tolist() == [4 / 8, 4 / 8]


@pytest.fixture(autouse=True)
def _scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not trained yet."""
    for name in ("is_scaled", "is_sum", "is_due"):
        monkeypatch.setattr(SCALING, name, False)


def _train_on(path: Path, loss_of: Callable[[Tensor, JaggedBatch], Tensor], *, in_step: bool) -> None:
    """Evaluate, with a loss that is scaled or not, and train."""
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    balance = BalanceConfig(cost=LinearCost(interleave_actions=False))
    loader = build_loader(path, LoaderConfig(batch_size=64), rank=0, world_size=1, balance=balance)
    with torch.no_grad():
        assert len([scale_loss(weight * batch.loss_tokens, batch) if in_step else batch for batch in loader]) > 2
    for batch in loader:

        def closure(batch: JaggedBatch = batch) -> float:
            loss = loss_of(weight * torch.ones(batch.loss_tokens), batch)
            loss.backward()
            return loss.item()

        if in_step:  # as Lightning trains
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


UNSCALED, MEAN = (
    "an optimizer steps on balanced batches, and scale_loss was not",
    "scale_loss was given the mean of losses",
)


@pytest.mark.parametrize(
    ("loss_of", "warning"),
    [
        (lambda losses, batch: losses.mean(), UNSCALED),
        (lambda losses, batch: scale_loss(losses.mean(), batch), MEAN),
        (lambda losses, batch: scale_loss(losses.mean().float().view(1), batch)[0], MEAN),
        (lambda losses, batch: scale_loss(mse_loss(losses, losses * 0), batch), MEAN),
        (lambda losses, batch: scale_loss(mse_loss(losses, losses * 0, reduction="sum"), batch), None),
        (lambda losses, batch: scale_loss(losses.sum(), batch), None),
        (lambda losses, batch: scale_loss(losses.view(1, -1).mean(dim=0).sum(), batch), None),
        (lambda losses, batch: scale_loss(torch.stack([losses.sum()] * 2).mean(), batch), None),
        (lambda losses, batch: scale_loss(losses.mean() * len(losses), batch), None),
    ],
)
@pytest.mark.parametrize("in_step", [False, True])
def test_a_loss_that_is_not_a_scaled_sum_is_one_warning(
    small_dataset: Path, caplog: pytest.LogCaptureFixture, loss_of: Any, warning: str | None, in_step: bool
) -> None:
    _train_on(small_dataset, loss_of, in_step=in_step)
    found = [record.message for record in caplog.records if "scale_loss" in record.message]
    assert [message[: len(str(warning))] for message in found] == [warning] * (warning is not None)
