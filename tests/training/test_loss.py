"""Balanced training has the gradients of unbalanced training, with DistributedDataParallel on several processes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from evenrank.core.errors import ConfigError
from evenrank.dataloader import JaggedBatch, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import STRATEGIES, Balancer, HSTUCost
from evenrank.training import scale_loss
from tests.ranks import RankPool

CONFIG = LoaderConfig(batch_size=8, max_history_length=20, max_num_candidates=2)


class _Model(torch.nn.Module):
    """Scores each candidate against the sum of the history; in float64, so that the order of sums does not matter."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(num_items, 4, dtype=torch.float64)
        self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Return the sum of the loss over the batch's labels."""
        assert batch.labels is not None
        items = torch.split(batch.features["item_id"].values(), batch.features["item_id"].lengths().tolist())
        labels = torch.split(batch.labels["label"].values(), batch.labels["label"].lengths().tolist())
        # The loss of a rank without samples must depend on every parameter too, or DDP waits for its gradients.
        losses = [(self.embedding.weight.sum() + self.weight.sum()) * 0]
        for ids, actions, count in zip(items, labels, batch.num_candidates.tolist(), strict=True):
            if count:
                vectors = self.embedding(ids)
                scores = vectors[-count:] @ self.weight @ vectors[:-count].sum(dim=0)
                losses.append(((scores - actions) ** 2).sum())
        return torch.stack(losses).sum()


def _gradients(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _train(rank: int, world_size: int, path: Path, strategy: str, equal_counts: bool) -> tuple[list[list[Tensor]], int]:
    model = DistributedDataParallel(_Model(501))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = build_loader(path, CONFIG, rank=rank, world_size=world_size)
    gradients = []
    cost = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)
    with Balancer(loader, cost=cost, strategy=strategy, equal_counts=equal_counts) as balancer:
        for batch in balancer:
            optimizer.zero_grad()
            scale_loss(model(batch), batch).backward()
            gradients.append(_gradients(model))
            optimizer.step()
    return gradients, loader.num_samples


def test_balanced_gradients_equal_those_of_unbalanced_training(ranks: RankPool, small_dataset: Path) -> None:
    # The reference trains the samples of all ranks in one batch, on one rank.
    loader = build_loader(
        small_dataset, LoaderConfig(batch_size=24, max_history_length=20, max_num_candidates=2), rank=0, world_size=1
    )
    model = _Model(501)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    expected = []
    for batch in loader:
        optimizer.zero_grad()
        (model(batch) / batch.loss_tokens).backward()
        expected.append(_gradients(model))
        optimizer.step()
    for strategy, equal_counts in [*((name, True) for name in STRATEGIES), ("karmarkar-karp", False)]:
        for gradients, num_samples in ranks.run(3, _train, small_dataset, strategy, equal_counts):
            assert num_samples == loader.num_samples
            assert num_samples % 24 != 0  # the last step is not full
            assert len(gradients) == len(expected)
            for step, reference in zip(gradients, expected, strict=True):
                assert len(step) == 2  # both parameters
                for gradient, expected_gradient in zip(step, reference, strict=True):
                    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def _batch(**changes: int) -> JaggedBatch:
    return JaggedBatch(batch_size=1, num_real=0).replace(**changes)


def test_gradients_are_averaged_over_the_ranks_that_balance_unless_others_are_given() -> None:
    batch = _batch(world_loss_tokens=8, dp_size=4)
    assert scale_loss(torch.tensor(3.0), batch).item() == 3 * 4 / 8
    assert scale_loss(torch.tensor(3.0), batch, dp_size=2).item() == 3 * 2 / 8


def test_zero_loss_tokens_give_a_zero_loss_with_zero_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = scale_loss(weight.sum(), _batch(world_loss_tokens=0, dp_size=2))
    loss.backward()
    assert loss.item() == 0
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 0]


def test_a_batch_without_world_loss_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no world_loss_tokens; iterate over a Balancer instead of the loader"):
        scale_loss(torch.ones(()), _batch(), dp_size=2)


def test_a_batch_without_dp_size_is_refused_unless_it_is_given() -> None:
    with pytest.raises(ConfigError, match="has no dp_size; iterate over a Balancer, or pass dp_size to scale_loss"):
        scale_loss(torch.ones(()), _batch(world_loss_tokens=1))
