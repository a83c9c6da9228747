"""A log whose labels are sometimes missing, from its file to the gradients of several ranks."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.datasets import read_manifest
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from evenrank.training import LossAverage, RegressionMetrics, accumulate, scale_loss
from tests.dataloader.balance.costs import COST
from tests.ranks import RankPool

WORLD_SIZE, NUM_USERS, NUM_ITEMS = 3, 41, 9
WAYS = ("alone", "Balancer")
Event = tuple[int, float | None, float]  # item, rating, weight
Step = tuple[list[Tensor], list[float], dict[str, float]]  # gradients, mean loss, metrics


def _users() -> list[list[Event]]:
    """Return the events of users; some have no rating at all, many have ratings of none but some events."""
    rng = random.Random(0)
    return [
        [
            (rng.randrange(1, NUM_ITEMS), rng.random() if rng.random() < user % 5 / 4 else None, rng.random())
            for _ in range(rng.randrange(1, 30))
        ]
        for user in range(NUM_USERS)
    ]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("missing")
    rows = [
        f"{user},{item},{place},{'' if rating is None else rating},{weight}\n"
        for user, events in enumerate(_users())
        for place, (item, rating, weight) in enumerate(events)
    ]
    (folder / "log.csv").write_text("user,item,time,rating,w\n" + "".join(rows))
    log = TabularConfig(
        events=(folder / "log.csv",),
        user_column="user",
        item_column="item",
        timestamp_column="time",
        timestamp_unit="s",
        label="rating:float?",
        weight="w",
    )
    config = PreprocessConfig(
        dataset="custom", out=folder / "out", custom=log, split="none", ids="keep", allow_empty=True
    )
    preprocess(config)
    return folder / "out"


def test_events_without_a_label_are_counted(dataset: Path) -> None:
    ratings = [rating for events in _users() for _, rating, _ in events]
    assert read_manifest(dataset).options["audit"]["events without rating (kept)"] == ratings.count(None) > 0


class _Model(torch.nn.Module):
    """Predicts the rating of an item; in float64, so that the order of sums does not matter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(NUM_ITEMS, 1, dtype=torch.float64)

    def forward(self, items: Tensor) -> Tensor:
        scores: Tensor = self.embedding(items)[:, 0]
        return scores


def _items(batch: SequenceBatch, num_candidates: int) -> Tensor:
    """Return the items that labels are of: the last ones of each row."""
    items = batch.features["item_id"]
    of_rows = torch.split(items.values(), items.lengths().tolist())
    return torch.cat([row[len(row) - num_candidates if num_candidates else 0 :] for row in of_rows])


def _train(
    rank: int, world_size: int, path: Path, way: str, num_candidates: int, is_weighted: bool
) -> tuple[Step, set[int]]:
    """Return what all ranks together get for an epoch in one optimizer step, and the places of known labels."""
    config = LoaderConfig(
        batch_size=7,
        max_history_length=99,
        max_num_candidates=num_candidates,
        label="rating",
        weight="w" if is_weighted else None,
    )
    model, average, metrics = _Model(), LossAverage(), RegressionMetrics()
    if way == "alone":
        loader: Loader[SequenceBatch] | Balancer[SequenceBatch] = build_loader(
            path, config, rank=rank, world_size=world_size, balance=BalanceConfig(cost=COST)
        )
    else:
        loader = Balancer(build_loader(path, config, rank=rank, world_size=world_size), BalanceConfig(cost=COST))

    def task_tokens(batch: SequenceBatch) -> Tensor:
        assert batch.weights is not None
        tokens: Tensor = batch.weights.values().double().sum().view(1)
        return tokens

    known = set()
    for batches in accumulate(loader, 99, task_tokens=task_tokens if is_weighted else None):
        for batch in batches:
            assert batch.float_labels is not None
            assert batch.known is not None
            labels = batch.float_labels.values()
            is_known = ~labels.isnan()
            weights = batch.weights.values() if batch.weights is not None else is_known
            scores = model(_items(batch, num_candidates))
            losses = (scores - labels.nan_to_num()) ** 2 * weights
            loss_sum = losses.sum().view(1)
            scale_loss(loss_sum + model.embedding.weight.sum() * 0, batch).sum().backward()
            average.update(loss_sum, batch, task_tokens=task_tokens(batch) if is_weighted else None)
            metrics.update(scores[:, None], labels[:, None], weights)
            starts = batch.float_labels.lengths().cumsum(0) - batch.float_labels.lengths()
            places = batch.known.values() + starts.repeat_interleave(batch.known.lengths())
            assert places.tolist() == is_known.nonzero()[:, 0].tolist()
            known.add(batch.loss_tokens)
            assert batch.loss_tokens == len(places)
    gradient = model.embedding.weight.grad
    assert gradient is not None
    torch.distributed.all_reduce(gradient)
    return ([gradient / world_size], average.compute(), metrics.compute()), known


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num_candidates", "is_weighted"), [(0, False), (2, False), (2, True)])
def test_an_event_without_a_label_is_no_target(
    ranks: RankPool, dataset: Path, way: str, num_candidates: int, is_weighted: bool
) -> None:
    model = _Model()
    terms = []
    for events in _users():
        if len(events) >= num_candidates:
            for item, rating, weight in events[-num_candidates:]:
                if rating is not None:
                    weight = float(np.float32(weight)) if is_weighted else 1.0
                    terms.append((weight, weight * (model(torch.tensor([item]))[0] - float(np.float32(rating))) ** 2))
    loss = torch.stack([term for _, term in terms]).sum() / sum(weight for weight, _ in terms)
    loss.backward()
    expected = model.embedding.weight.grad
    for (gradients, means, metrics), known in ranks.run(WORLD_SIZE, _train, dataset, way, num_candidates, is_weighted):
        torch.testing.assert_close(gradients, [expected])
        assert means == [pytest.approx(loss.item())]
        assert metrics["mse"] == pytest.approx(loss.item())
        assert len(known) > 1
