import contextlib
import logging
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline import Tracer

import evenrank.training
from evenrank.core.errors import ConfigError
from evenrank.dataloader import JaggedBatch, Loader, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, LinearCost
from evenrank.dataloader.balance.ranks.connection import SCALING
from evenrank.training import LossAverage, accumulate, label_bits, scale_loss
from tests.dataloader.balance.costs import COST, rich_tokens
from tests.dataloader.rich_batch import rich_batch
from tests.ranks import RankPool

WORLD_SIZE = 4


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


class _Model(torch.nn.Module):
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
    for num_steps, by_task in MODES:
        model = DistributedDataParallel(_Model(501))
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
        model = _Model(501)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        batches = list(_loader(path, 8 * WORLD_SIZE))
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
            torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-10)


_WEIGHTED: dict[str, Any] = {"max_history_length": 20, "label": "price", "weight": "share"}


def _weighted_loss_sum(bias: Tensor, batch: SequenceBatch) -> Tensor:
    assert batch.float_labels is not None
    assert batch.weights is not None
    weights: Tensor = batch.weights.values()
    errors: Tensor = batch.float_labels.values() - bias
    return (weights * errors**2).sum().view(1) + 0 * bias


def _weight_sum(batch: SequenceBatch) -> Tensor:
    assert batch.weights is not None
    weights: Tensor = batch.weights.values()
    return weights.sum().view(1)


def _train_weighted(rank: int, world_size: int, path: Path) -> list[float]:
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    average, gradients = LossAverage(), []
    loader = build_loader(path, LoaderConfig(batch_size=8, **_WEIGHTED), rank=rank, world_size=world_size)
    with Balancer(loader, BalanceConfig(cost=COST)) as balancer:
        for (batch,) in accumulate(balancer, 1, task_tokens=_weight_sum):
            loss_sums = _weighted_loss_sum(bias, batch)
            average.update(loss_sums.detach(), batch, task_tokens=_weight_sum(batch))
            (gradient,) = torch.autograd.grad(scale_loss(loss_sums, batch).sum(), bias)
            torch.distributed.all_reduce(gradient)
            gradients.append(gradient.item() / world_size)  # as DDP averages them
    return [*gradients, *average.compute()]


def test_weighted_gradients_and_averages_equal_those_of_one_rank_with_all_samples(
    ranks: RankPool, rich_dataset: Path
) -> None:
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    gradients: list[Tensor] = []
    totals = torch.zeros(2, dtype=torch.float64)
    for batch in build_loader(rich_dataset, LoaderConfig(batch_size=16, **_WEIGHTED), rank=0, world_size=1):
        loss_sum, weight_sum = _weighted_loss_sum(bias, batch), _weight_sum(batch).double()
        totals += torch.cat([loss_sum.detach(), weight_sum])
        gradients += torch.autograd.grad(loss_sum / weight_sum, bias)
    expected = [*(gradient.item() for gradient in gradients), (totals[0] / totals[1]).item()]
    assert len(expected) > 10
    assert ranks.run(2, _train_weighted, rich_dataset) == [pytest.approx(expected, rel=1e-6)] * 2


def test_a_sum_of_weights_below_1_divides_the_loss_in_its_dtype() -> None:
    batch = JaggedBatch(batch_size=1, num_real=1, world_loss_tokens=1, dp_size=2)
    batch.world_task_tokens = torch.tensor([0.25, 0.0], dtype=torch.float64)
    scaled = scale_loss(torch.tensor([1.5, 0.0]), batch)
    assert scaled.tolist() == [12.0, 0.0]
    assert scaled.dtype == torch.float32


Sample = tuple[float, list[bool]]  # a feature, and of which tasks it is a loss token


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[int, list[list[list[Sample]]]]:
    num_tasks, num_steps, world_size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    sample = st.tuples(st.floats(-2, 2), st.lists(st.booleans(), min_size=num_tasks, max_size=num_tasks))
    steps = st.lists(st.lists(sample, max_size=3), min_size=num_steps, max_size=num_steps)
    return num_tasks, draw(st.lists(steps, min_size=world_size, max_size=world_size))


def _count(samples: list[Sample], num_tasks: int) -> Tensor:
    return torch.tensor([[False] * num_tasks, *(mask for _, mask in samples)]).sum(dim=0)


def _loss_sums(weight: Tensor, samples: list[Sample]) -> Tensor:
    losses = [torch.tensor(mask) * (weight * feature - 1) ** 2 for feature, mask in samples]
    return torch.stack([weight * 0, *losses]).sum(dim=0)


@given(world=_worlds(), by_task=st.booleans())
@settings(max_examples=60)
def test_gradients_do_not_depend_on_who_trains_what(world: tuple[int, list[list[list[Sample]]]], by_task: bool) -> None:
    num_tasks, samples = world
    of_steps = [list(chain(*step)) for step in zip(*samples, strict=True)]
    everything = list(chain(*of_steps))
    weight = torch.linspace(-1, 1, num_tasks, dtype=torch.float64, requires_grad=True)
    tokens = _count(everything, num_tasks) if by_task else torch.tensor(len(everything))
    (expected,) = torch.autograd.grad((_loss_sums(weight, everything) / tokens.clamp(min=1)).sum(), weight)
    gradients: list[Tensor] = []
    for steps in samples:
        # What a Balancer hands out, and what an all-reduce counts.
        batches = [
            _batch(step=step, dp_size=len(samples), world_loss_tokens=len(everyones))
            for step, everyones in enumerate(of_steps)
        ]
        counting = (lambda batch: _count(of_steps[batch.step], num_tasks)) if by_task else None
        (accumulated,) = accumulate(batches, len(steps), task_tokens=counting)
        losses = [scale_loss(_loss_sums(weight, steps[batch.step]), batch).sum() for batch in accumulated]
        gradients += torch.autograd.grad(torch.stack(losses).sum(), weight)
    torch.testing.assert_close(torch.stack(gradients).mean(dim=0), expected, rtol=1e-10, atol=1e-10)


def _batch(**changes: Any) -> JaggedBatch:
    return JaggedBatch(batch_size=1, num_real=0).replace(**changes)


def test_the_loss_of_each_task_is_divided_by_its_own_loss_tokens_if_they_are_counted() -> None:
    sums = torch.tensor([3.0, 6.0, 0.0])
    batch = _batch(world_loss_tokens=8, dp_size=4)
    assert scale_loss(sums, batch).tolist() == [3 * 4 / 8, 6 * 4 / 8, 0]
    assert scale_loss(sums[0], batch, dp_size=2).item() == 3 * 2 / 8
    counted = batch.replace(world_task_tokens=torch.tensor([8, 3, 0]))
    assert scale_loss(sums, counted).tolist() == [3 * 4 / 8, 6 * 4 / 3, 0]
    assert scale_loss(sums.double(), counted).dtype == torch.float64


_TASKS = {"world_loss_tokens": 8, "dp_size": 4, "world_task_tokens": torch.tensor([8, 3])}


@pytest.mark.parametrize(
    ("sums", "batch", "dp_size", "message"),
    [
        (torch.ones(()), _TASKS, None, r"loss_sums has the shape \[\], but the loss tokens of 2 tasks"),
        (torch.ones(3), _TASKS, None, r"loss_sums has the shape \[3\], but the loss tokens of 2 tasks"),
        (torch.ones(()), {}, 2, "has no world_loss_tokens; pass balance to build_loader, or use a Balanc"),
        (torch.ones(()), {"world_loss_tokens": 1}, None, "has no dp_size; balance the loader, or pass dp_size to"),
        ((torch.ones(1), torch.ones(3)), _TASKS, None, "loss_sums must be a tensor, got tuple; pass the sums alone"),
    ],
)
def test_a_loss_without_a_scale_is_refused(sums: Any, batch: dict[str, Any], dp_size: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scale_loss(sums, _batch(**batch), dp_size=dp_size)


def test_each_task_is_a_bit_of_the_label() -> None:
    bits = label_bits(torch.tensor([0, 1, 6, 255]), 3)
    assert bits.tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 1], [1, 1, 1]]
    assert bits.dtype == torch.float32
    assert label_bits(torch.zeros(0, dtype=torch.int64), 8).shape == (0, 8)


class _Scaling(torch.nn.Module):
    """Uses the function by its name in this module, or as an attribute of the package."""

    def __init__(self, *, by_package: bool = False, **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self._by_package = by_package
        self._options = options

    def forward(self, batch: JaggedBatch) -> Tensor:
        return (evenrank.training.scale_loss if self._by_package else scale_loss)(self.weight, batch, **self._options)


def _traced(tracer: torch.fx.Tracer, **options: Any) -> torch.fx.GraphModule:
    model = _Scaling(**options)
    return torch.fx.GraphModule(model, tracer.trace(model))


TRACERS = pytest.mark.parametrize("tracer", [torch.fx.Tracer(), Tracer()], ids=["torch.fx", "TorchRec"])


@TRACERS
def test_a_traced_model_scales_by_the_batch_that_it_runs_on(tracer: torch.fx.Tracer) -> None:
    traced = _traced(tracer)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [scale_loss]
    batch = _batch(world_loss_tokens=8, dp_size=4)
    assert traced(batch).tolist() == [4 / 8, 4 / 8]
    assert traced(_batch(world_loss_tokens=5, dp_size=1)).tolist() == pytest.approx([1 / 5, 1 / 5])
    assert traced(batch.replace(world_task_tokens=torch.tensor([8, 2]))).tolist() == [4 / 8, 4 / 2]
    assert _traced(tracer, dp_size=3)(batch).tolist() == [3 / 8, 3 / 8]
    with pytest.raises(ConfigError, match="the batch has no world_loss_tokens"):
        traced(_batch())


@TRACERS
def test_the_first_use_may_be_while_tracing(tracer: torch.fx.Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "evenrank.training.loss")
    monkeypatch.delitem(vars(evenrank.training), "scale_loss", raising=False)  # as if no one had used it before
    traced = _traced(tracer, by_package=True)
    assert "evenrank.training.loss" in sys.modules
    assert traced(_batch(world_loss_tokens=8, dp_size=4)).tolist() == [4 / 8, 4 / 8]


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not trained yet."""
    monkeypatch.setattr(SCALING, "is_scaled", False)
    monkeypatch.setattr(SCALING, "is_sum", False)
    monkeypatch.setattr(SCALING, "is_due", False)


def _train_on(path: Path, loss_of: Callable[[Tensor, JaggedBatch], Tensor], *, in_step: bool) -> None:
    """Evaluate, which needs no scaling, and train."""
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    balance = BalanceConfig(cost=LinearCost(interleave_actions=False))
    loader = build_loader(path, LoaderConfig(batch_size=8), rank=0, world_size=1, balance=balance)
    with torch.no_grad():
        assert len(list(loader)) > 2
    for batch in loader:

        def closure(batch: JaggedBatch = batch) -> float:
            loss = loss_of(weight * torch.ones(batch.loss_tokens), batch)
            loss.backward()
            return loss.item()

        if in_step:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


@pytest.mark.parametrize(
    ("loss_of", "warning"),
    [
        (lambda losses, batch: losses.mean(), "an optimizer steps on balanced batches, and scale_loss was not called"),
        (lambda losses, batch: scale_loss(losses.mean(), batch), "scale_loss was given the mean of losses"),
        (lambda losses, batch: scale_loss(losses.mean().float().view(1), batch)[0], "scale_loss was given the mean of"),
        (
            lambda losses, batch: scale_loss(mse_loss(losses, losses * 0), batch),
            "scale_loss was given the mean of loss",
        ),
        (lambda losses, batch: scale_loss(mse_loss(losses, losses * 0, reduction="sum"), batch), None),
        (lambda losses, batch: scale_loss(losses.sum(), batch), None),
        (lambda losses, batch: scale_loss(losses.view(1, -1).mean(dim=0).sum(), batch), None),
        (lambda losses, batch: scale_loss(torch.stack([losses.sum()] * 2).mean(), batch), None),
        (lambda losses, batch: scale_loss(losses.mean() * len(losses), batch), None),
    ],
)
@pytest.mark.parametrize("in_step", [False, True])  # as Lightning trains
@pytest.mark.usefixtures("scaling")
def test_a_loss_that_is_not_a_scaled_sum_is_one_warning(
    small_dataset: Path, caplog: pytest.LogCaptureFixture, loss_of: Any, warning: str | None, in_step: bool
) -> None:
    _train_on(small_dataset, loss_of, in_step=in_step)
    found = [record.message for record in caplog.records if "scale_loss" in record.message]
    assert len(found) == (warning is not None)
    assert all(message.startswith(str(warning)) for message in found)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.usefixtures("scaling")
def test_a_loss_that_is_scaled_in_evaluation_alone_is_a_warning_if_balanced_batches_are_trained(
    small_dataset: Path, caplog: pytest.LogCaptureFixture, trained: bool
) -> None:
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    config, balance = LoaderConfig(batch_size=64), BalanceConfig(cost=LinearCost(interleave_actions=False))
    evaluated, plain = (build_loader(small_dataset, config, rank=0, world_size=1, balance=b) for b in (balance, None))
    with torch.no_grad():
        for batch in evaluated:
            scale_loss(weight * batch.loss_tokens, batch)
    for _ in evaluated if trained else plain:
        weight.square().backward()
        optimizer.step()
    found = [record.message[:40] for record in caplog.records if "scale_loss" in record.message]
    assert found == ["an optimizer steps on balanced batches, "] * trained


def _train_unscaled(rank: int, world_size: int, has_handles: bool) -> list[str]:
    """Behind a Balancer, whose steps it takes or makes; return the warnings."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("evenrank").addHandler(handler)
    SCALING.is_scaled = SCALING.is_due = False
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    batches = [rich_batch([[(1, 1), (1, 1)]])] * 3
    with Balancer(batches, BalanceConfig(cost=rich_tokens)) as balancer:
        steps = (balancer.finish(balancer.launch(balancer.start(batch))) for batch in batches)
        for _ in steps if has_handles else balancer:
            weight.square().backward()
            optimizer.step()
    logging.getLogger("evenrank").removeHandler(handler)
    return messages


@pytest.mark.parametrize("has_handles", [False, True])
def test_rank_0_warns_of_losses_behind_a_balancer_that_are_not_scaled(ranks: RankPool, has_handles: bool) -> None:
    first, second = ranks.run(2, _train_unscaled, has_handles)
    assert [message[:46] for message in first] == ["an optimizer steps on balanced batches, and sc"]
    assert second == []
