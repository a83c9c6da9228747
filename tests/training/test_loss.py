import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torchrec.distributed.train_pipeline import Tracer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import evenrank.training
from evenrank.core.errors import ConfigError
from evenrank.dataloader import JaggedBatch, LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig
from evenrank.dataloader.balance.ranks.connection import SCALING
from evenrank.training import accumulate, in_batch_mask, label_bits, scale_loss
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import rows_of


def batch_of(**changes: Any) -> JaggedBatch:
    return JaggedBatch(batch_size=1, num_real=0).replace(**changes)


def steps_of(world_loss_tokens: list[int | None]) -> list[JaggedBatch]:
    return [batch_of(step=step, loss_tokens=1, world_loss_tokens=count) for step, count in enumerate(world_loss_tokens)]


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


UNSCALED = "an optimizer steps on balanced batches, and scale_loss was not"
MEAN = "scale_loss was given the mean of losses"


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
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    config, balance = LoaderConfig(batch_size=64), BalanceConfig(cost=COST)
    loader = build_loader(small_dataset, config, rank=0, world_size=1, balance=balance)
    with torch.no_grad():  # an evaluation, with a loss that is scaled or not
        assert len([scale_loss(weight * batch.loss_tokens, batch) if in_step else batch for batch in loader]) > 2
    for batch in loader:

        def closure(batch: JaggedBatch = batch) -> float:
            loss = loss_of(weight * torch.ones(batch.loss_tokens), batch)
            loss.backward()
            return float(loss.detach())

        if in_step:  # as Lightning trains
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    found = [record.message for record in caplog.records if "scale_loss" in record.message]
    assert [message[: len(str(warning))] for message in found] == [warning] * (warning is not None)


@pytest.mark.parametrize("num_candidates", [0, 1, 3])
def test_negatives_within_a_batch_are_those_of_plain_loops(small_dataset: Path, num_candidates: int) -> None:
    config = LoaderConfig(batch_size=24, max_history_length=20, max_num_candidates=num_candidates)
    seen = set()
    for batch in build_loader(small_dataset, config, rank=0, world_size=1):
        rows, features = rows_of(batch.features, "item_id"), batch.features["item_id"]
        targets = [
            (row, item)
            for row, items in enumerate(rows)
            for item in (items[len(items) - num_candidates :] if num_candidates and items else items[1:])
        ]
        mask = in_batch_mask(batch)
        assert mask.tolist() == [[other not in rows[row] for _, other in targets] for row, _ in targets]
        # Ids that differ by a multiple of 2^61, which times 24 rows is 0 in int64.
        items = features.values()
        large = KeyedJaggedTensor(["item_id"], items // 4 + (items % 4 << 61), lengths=features.lengths())
        others = [batch.replace(features=large)]
        if num_candidates:  # of which some may be no loss tokens; the lengths of labels of floats are those of integers
            others += [batch.replace(loss_tokens=0), batch.replace(labels=None, float_labels=batch.labels)]
        assert all(torch.equal(in_batch_mask(other), mask) for other in others)
        seen |= {*mask.flatten().tolist()}
    assert seen == {True, False}
    assert in_batch_mask(batch.index_select([])).shape == (0, 0)
