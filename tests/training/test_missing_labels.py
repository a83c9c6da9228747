"""A log whose labels are sometimes missing, from its file to the gradients of several ranks."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.datasets import read_manifest
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from evenrank.training import LossAverage, RegressionMetrics, accumulate, scale_loss
from tests.dataloader.balance.costs import COST
from tests.ranks import RankPool

WORLD_SIZE, NUM_ITEMS = 3, 9
MODES = [(way, *mode) for way in ("alone", "Balancer") for mode in ((0, False), (2, False), (2, True))]
_RNG = random.Random(0)
# Of each user, the events: item, rating, weight. Some have no rating at all, many have ratings of none but some events.
USERS = [
    [
        (_RNG.randrange(1, NUM_ITEMS), _RNG.random() if _RNG.random() < user % 5 / 4 else None, _RNG.random())
        for _ in range(_RNG.randrange(1, 30))
    ]
    for user in range(41)
]


class Model(torch.nn.Module):
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


def _weight_sum(batch: SequenceBatch) -> Tensor:
    assert batch.weights is not None
    weights: Tensor = batch.weights.values()
    return weights.double().sum().view(1)


def _train(rank: int, world_size: int, path: Path) -> list[list[Any]]:
    """Return gradients, mean loss and mean squared error of an epoch in one optimizer step, in each mode."""
    found = []
    for way, num_candidates, is_weighted in MODES:
        options = {"max_history_length": 99, "max_num_candidates": num_candidates, "label": "rating"}
        config = LoaderConfig(batch_size=7, **options, weight="w" if is_weighted else None)  # type: ignore[arg-type]
        model, average, metrics = Model(), LossAverage(), RegressionMetrics()
        balance = BalanceConfig(cost=COST)
        of_way = balance if way == "alone" else None
        alone = build_loader(path, config, rank=rank, world_size=world_size, balance=of_way)
        task_tokens = _weight_sum if is_weighted else None
        for batches in accumulate(alone if way == "alone" else Balancer(alone, balance), 99, task_tokens=task_tokens):
            for batch in batches:
                assert batch.float_labels is not None
                assert batch.known is not None
                labels, lengths = batch.float_labels.values(), batch.float_labels.lengths()
                is_known = ~labels.isnan()
                weights = is_known if batch.weights is None else batch.weights.values()
                scores = model(_items(batch, num_candidates))
                loss_sum = ((scores - labels.nan_to_num()) ** 2 * weights).sum().view(1)
                scale_loss(loss_sum + model.embedding.weight.sum() * 0, batch).sum().backward()
                average.update(loss_sum, batch, task_tokens=task_tokens and task_tokens(batch))
                metrics.update(scores[:, None], labels[:, None], weights)
                starts = lengths.cumsum(0) - lengths
                places = batch.known.values() + starts.repeat_interleave(batch.known.lengths())
                assert places.tolist() == is_known.nonzero()[:, 0].tolist()
                assert batch.loss_tokens == len(places)
        gradient = model.embedding.weight.grad
        assert gradient is not None
        torch.distributed.all_reduce(gradient)
        found.append([gradient / world_size, *average.compute(), metrics.compute()["mse"]])
    return found


def test_an_event_without_a_label_is_counted_and_no_target(ranks: RankPool, tmp_path: Path) -> None:
    rows = [
        f"{user},{item},{place},{'' if rating is None else rating},{weight}\n"
        for user, events in enumerate(USERS)
        for place, (item, rating, weight) in enumerate(events)
    ]
    (tmp_path / "log.csv").write_text("user,item,time,rating,w\n" + "".join(rows))
    names = {"user_column": "user", "item_column": "item", "timestamp_column": "time", "timestamp_unit": "s"}
    log = TabularConfig(events=(tmp_path / "log.csv",), **names, label="rating:float?", weight="w")  # type: ignore[arg-type]
    out = tmp_path / "out"
    preprocess(PreprocessConfig(dataset="custom", out=out, custom=log, split="none", ids="keep", allow_empty=True))
    ratings = [rating for events in USERS for _, rating, _ in events]
    assert read_manifest(out).options["audit"]["events without rating (kept)"] == ratings.count(None) > 0
    results = ranks.run(WORLD_SIZE, _train, out)
    for number, (_, num_candidates, is_weighted) in enumerate(MODES):
        model, terms = Model(), []
        for events in (events for events in USERS if len(events) >= num_candidates):
            for item, rating, weight in events[-num_candidates:]:
                if rating is not None:
                    weight = float(np.float32(weight)) if is_weighted else 1.0
                    terms.append((weight, weight * (model(torch.tensor([item]))[0] - float(np.float32(rating))) ** 2))
        loss = torch.stack([term for _, term in terms]).sum() / sum(weight for weight, _ in terms)
        loss.backward()
        for gradient, mean, mse in (of_rank[number] for of_rank in results):
            torch.testing.assert_close(gradient, model.embedding.weight.grad)
            assert (mean, mse) == pytest.approx([loss.item()] * 2)
