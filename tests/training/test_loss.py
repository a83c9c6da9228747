"""Balanced training has the gradients of unbalanced training, with DistributedDataParallel and traced by torch.fx."""

import contextlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline import Tracer

import evenrank.training
from evenrank.core.errors import ConfigError
from evenrank.dataloader import JaggedBatch, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, HSTUCost
from evenrank.training import accumulate, label_bits, scale_loss
from tests.ranks import RankPool

WORLD_SIZE = 4
NUM_TASKS = 3


def _config(batch_size: int) -> LoaderConfig:
    return LoaderConfig(batch_size=batch_size, max_history_length=20, max_num_candidates=2)


def _counted(candidates: Tensor) -> Tensor:
    """Return which candidates are loss tokens of which task: bool [n, NUM_TASKS]; the last task has few."""
    return torch.stack([candidates % divisor == 0 for divisor in (1, 2, 7)], dim=-1)


class _Model(torch.nn.Module):
    """Scores each candidate against the sum of the history; in float64, so that the order of sums does not matter."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(num_items, 4, dtype=torch.float64)
        self.weight = torch.nn.Parameter(torch.randn(NUM_TASKS, 4, 4, dtype=torch.float64))

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Return the sum of the loss of each task over its loss tokens."""
        assert batch.labels is not None
        items = torch.split(batch.features["item_id"].values(), batch.features["item_id"].lengths().tolist())
        labels = torch.split(batch.labels["label"].values(), batch.labels["label"].lengths().tolist())
        # The loss of a rank without samples must depend on every parameter too, or DDP waits for its gradients.
        losses = [(self.embedding.weight.sum() + self.weight.sum(dim=(1, 2))) * 0]
        for ids, actions, count in zip(items, labels, batch.num_candidates.tolist(), strict=True):
            if count:
                vectors = self.embedding(ids)
                scores = (vectors[-count:] @ self.weight @ vectors[:-count].sum(dim=0)).T
                losses.append((_counted(ids[-count:]) * (scores - actions[:, None]) ** 2).sum(dim=0))
        return torch.stack(losses).sum(dim=0)


def _task_tokens(batch: SequenceBatch) -> Tensor:
    items = torch.split(batch.features["item_id"].values(), batch.features["item_id"].lengths().tolist())
    candidates = [ids[len(ids) - count :] for ids, count in zip(items, batch.num_candidates.tolist(), strict=True)]
    return _counted(torch.cat([torch.empty(0, dtype=torch.int64), *candidates])).sum(dim=0)


class _Mode(NamedTuple):
    num_steps: int  # that are accumulated
    by_task: bool  # each task has loss tokens of its own


MODES = (_Mode(1, False), _Mode(1, True), _Mode(2, False), _Mode(2, True))


def _gradients(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _train(rank: int, world_size: int, path: Path, strategy: str) -> dict[str, Any]:
    gradients, num_real = [], []
    cost = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)
    for mode in MODES:
        model = DistributedDataParallel(_Model(501))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        loader = build_loader(path, _config(8), rank=rank, world_size=world_size)
        with Balancer(loader, BalanceConfig(cost=cost, strategy=strategy)) as balancer:
            for batches in accumulate(balancer, mode.num_steps, task_tokens=_task_tokens if mode.by_task else None):
                optimizer.zero_grad()
                for batch in batches:
                    num_real.append(batch.num_real)
                    with contextlib.nullcontext() if batch is batches[-1] else model.no_sync():
                        scale_loss(model(batch), batch).sum().backward()
                gradients.append(_gradients(model))
                optimizer.step()
    return {"gradients": gradients, "num_real": num_real}


def _train_on_one_rank(path: Path) -> list[list[Tensor]]:
    """Return the gradients of each optimizer step, with the samples of all ranks in one batch."""
    gradients = []
    for mode in MODES:
        model = _Model(501)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        batches = list(build_loader(path, _config(8 * WORLD_SIZE), rank=0, world_size=1))
        assert batches[-1].num_real <= 8 * (WORLD_SIZE - 1)  # a rank has no sample in the last step
        assert len(batches) % 2  # an optimizer step that is not full
        for start in range(0, len(batches), mode.num_steps):
            step = batches[start : start + mode.num_steps]
            tokens = torch.stack([_task_tokens(batch) for batch in step]).sum(dim=0)
            if not mode.by_task:
                tokens = torch.tensor(sum(batch.loss_tokens for batch in step))
            optimizer.zero_grad()
            (torch.stack([model(batch) for batch in step]).sum(dim=0) / tokens).sum().backward()
            gradients.append(_gradients(model))
            optimizer.step()
    return gradients


def test_balanced_gradients_equal_those_of_one_rank_that_trains_all_samples(
    ranks: RankPool, small_dataset: Path
) -> None:
    expected = _train_on_one_rank(small_dataset)
    for strategy in STRATEGIES:
        results = ranks.run(WORLD_SIZE, _train, small_dataset, strategy)
        if strategy == "none":
            assert any(0 in result["num_real"] for result in results)
        for result in results:
            assert len(result["gradients"]) == len(expected)
            for step, reference in zip(result["gradients"], expected, strict=True):
                assert len(step) == 2  # both parameters
                for gradient, expected_gradient in zip(step, reference, strict=True):
                    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-10)


Sample = tuple[float, list[bool]]  # a feature, and of which tasks it is a loss token


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[int, list[list[list[Sample]]]]:
    """Draw a number of tasks, and the samples of each rank in each of the steps of an optimizer step."""
    num_tasks, num_steps, world_size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    sample = st.tuples(st.floats(-2, 2), st.lists(st.booleans(), min_size=num_tasks, max_size=num_tasks))
    steps = st.lists(st.lists(sample, max_size=3), min_size=num_steps, max_size=num_steps)
    return num_tasks, draw(st.lists(steps, min_size=world_size, max_size=world_size))


def _loss_sums(weight: Tensor, samples: list[Sample]) -> Tensor:
    losses = [torch.tensor(mask) * (weight * feature - 1) ** 2 for feature, mask in samples]
    return torch.stack([weight * 0, *losses]).sum(dim=0)


def _count(samples: list[Sample], num_tasks: int) -> Tensor:
    return torch.tensor([[False] * num_tasks, *(mask for _, mask in samples)]).sum(dim=0)


@given(world=_worlds(), by_task=st.booleans())
@settings(max_examples=60)
def test_gradients_do_not_depend_on_who_trains_what_in_which_step(
    world: tuple[int, list[list[list[Sample]]]], by_task: bool
) -> None:
    num_tasks, samples = world
    everything = [sample for steps in samples for of_step in steps for sample in of_step]
    weight = torch.linspace(-1, 1, num_tasks, dtype=torch.float64, requires_grad=True)
    tokens = _count(everything, num_tasks) if by_task else torch.tensor(len(everything))
    (expected,) = torch.autograd.grad((_loss_sums(weight, everything) / tokens.clamp(min=1)).sum(), weight)

    of_steps = [[sample for of_step in step for sample in of_step] for step in zip(*samples, strict=True)]
    gradients: list[Tensor] = []
    for steps in samples:
        # What a Balancer hands out, and what an all-reduce counts.
        batches = [
            JaggedBatch(batch_size=3, num_real=0, step=step, dp_size=len(samples), world_loss_tokens=len(everyones))
            for step, everyones in enumerate(of_steps)
        ]
        counting = (lambda batch: _count(of_steps[batch.step], num_tasks)) if by_task else None
        (accumulated,) = accumulate(batches, len(steps), task_tokens=counting)
        losses = [scale_loss(_loss_sums(weight, steps[batch.step]), batch).sum() for batch in accumulated]
        gradients += torch.autograd.grad(torch.stack(losses).sum(), weight)
    torch.testing.assert_close(torch.stack(gradients).mean(dim=0), expected, rtol=1e-10, atol=1e-10)


def _batch(**changes: Any) -> JaggedBatch:
    return JaggedBatch(batch_size=1, num_real=0).replace(**changes)


def test_gradients_are_averaged_over_the_ranks_that_balance_unless_others_are_given() -> None:
    batch = _batch(world_loss_tokens=8, dp_size=4)
    assert scale_loss(torch.tensor(3.0), batch).item() == 3 * 4 / 8
    assert scale_loss(torch.tensor(3.0), batch, dp_size=2).item() == 3 * 2 / 8


def test_the_loss_of_each_task_is_divided_by_its_own_loss_tokens_if_they_are_counted() -> None:
    sums = torch.tensor([3.0, 6.0, 0.0])
    batch = _batch(world_loss_tokens=8, dp_size=4)
    assert scale_loss(sums, batch).tolist() == [3 * 4 / 8, 6 * 4 / 8, 0]
    counted = batch.replace(world_task_tokens=torch.tensor([8, 3, 0]))
    assert scale_loss(sums, counted).tolist() == [3 * 4 / 8, 6 * 4 / 3, 0]
    assert scale_loss(sums.double(), counted).dtype == torch.float64


@pytest.mark.parametrize("counts", [None, [0, 0]])
def test_zero_loss_tokens_give_a_zero_loss_with_zero_gradients(counts: list[int] | None) -> None:
    weight = torch.ones(2, requires_grad=True)
    tokens = None if counts is None else torch.tensor(counts)
    loss = scale_loss(weight * 2, _batch(world_loss_tokens=0, dp_size=2, world_task_tokens=tokens)).sum()
    loss.backward()
    assert loss.item() == 0
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 0]


_TASKS = {"world_loss_tokens": 8, "dp_size": 4, "world_task_tokens": torch.tensor([8, 3])}


@pytest.mark.parametrize(
    ("sums", "batch", "dp_size", "message"),
    [
        (torch.ones(()), _TASKS, None, r"loss_sums has the shape \[\], but the loss tokens of 2 tasks"),
        (torch.ones(3), _TASKS, None, r"loss_sums has the shape \[3\], but the loss tokens of 2 tasks"),
        (torch.ones(()), {}, 2, "has no world_loss_tokens; iterate over a Balancer instead of the loader"),
        (torch.ones(()), {"world_loss_tokens": 1}, None, "has no dp_size; iterate over a Balancer, or pass dp_size to"),
        ((torch.ones(1), torch.ones(3)), _TASKS, None, "loss_sums must be a tensor, got tuple; pass the sums alone"),
    ],
)
def test_a_loss_that_cannot_be_scaled_is_refused(
    sums: Any, batch: dict[str, Any], dp_size: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        scale_loss(sums, _batch(**batch), dp_size=dp_size)


def test_each_task_is_a_bit_of_the_label() -> None:
    bits = label_bits(torch.tensor([0, 1, 6, 255]), 3)
    assert bits.tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 1], [1, 1, 1]]
    assert bits.dtype == torch.float32
    assert label_bits(torch.zeros(0, dtype=torch.int64), 8).shape == (0, 8)


class _Summing(torch.nn.Module):
    def __init__(self, dp_size: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self._dp_size = dp_size

    def forward(self, batch: JaggedBatch) -> Tensor:
        return scale_loss(self.weight.sum(), batch, dp_size=self._dp_size)


class _OfTasks(_Summing):
    def forward(self, batch: JaggedBatch) -> Tensor:
        return scale_loss(self.weight, batch)


class _UsingThePackage(_Summing):
    def forward(self, batch: JaggedBatch) -> Tensor:
        return evenrank.training.scale_loss(self.weight.sum(), batch)


@pytest.fixture(params=[torch.fx.Tracer, Tracer])
def tracer(request: pytest.FixtureRequest) -> torch.fx.Tracer:
    made: torch.fx.Tracer = request.param()
    return made


def _traced(model: torch.nn.Module, tracer: torch.fx.Tracer) -> torch.fx.GraphModule:
    return torch.fx.GraphModule(model, tracer.trace(model))


def test_a_traced_model_scales_by_the_batch_that_it_runs_on(tracer: torch.fx.Tracer) -> None:
    traced = _traced(_Summing(), tracer)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [scale_loss]
    assert traced(_batch(world_loss_tokens=8, dp_size=4)).item() == 2 * 4 / 8
    assert traced(_batch(world_loss_tokens=5, dp_size=1)).item() == pytest.approx(2 / 5)
    with pytest.raises(ConfigError, match="the batch has no world_loss_tokens"):
        traced(_batch())


def test_a_traced_model_passes_all_arguments_on(tracer: torch.fx.Tracer) -> None:
    batch = _batch(world_loss_tokens=8, dp_size=4, world_task_tokens=torch.tensor([8, 2]))
    assert _traced(_OfTasks(), tracer)(batch).tolist() == [4 / 8, 4 / 2]
    assert _traced(_Summing(dp_size=3), tracer)(_batch(world_loss_tokens=8, dp_size=4)).item() == 2 * 3 / 8


def test_the_first_use_may_be_while_tracing(tracer: torch.fx.Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "evenrank.training.loss")
    monkeypatch.delitem(vars(evenrank.training), "scale_loss", raising=False)  # as if no one had used it before
    traced = _traced(_UsingThePackage(), tracer)
    assert "evenrank.training.loss" in sys.modules
    assert traced(_batch(world_loss_tokens=8, dp_size=4)).item() == 2 * 4 / 8
