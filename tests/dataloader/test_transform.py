"""Transforms of batches, in front of a Balancer."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import Balancer, HSTUCost
from tests.dataloader.batches import ids_of
from tests.ranks import RankPool

CONFIG = LoaderConfig(batch_size=8, max_history_length=20)
COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)


def _add_next_ids(batch: SequenceBatch, rng: np.random.Generator) -> SequenceBatch:
    items = batch.features["item_id"]
    added = KeyedJaggedTensor(keys=["next_id"], values=items.values() + 1, lengths=items.lengths())
    return batch.replace(features=KeyedJaggedTensor.concat([batch.features, added]))


def _balance(rank: int, world_size: int, path: Path) -> list[tuple[bool, list[int], list[str]]]:
    loader = build_loader(path, CONFIG, rank=rank, world_size=world_size, transform=_add_next_ids)
    with Balancer(loader, cost=COST) as balancer:
        return [(_has_next_ids(batch), ids_of(batch), list(batch.features.keys())) for batch in balancer]


def _has_next_ids(batch: SequenceBatch) -> bool:
    items, added = batch.features["item_id"], batch.features["next_id"]
    return torch.equal(added.values(), items.values() + 1) and torch.equal(added.lengths(), items.lengths())


def test_a_key_that_a_transform_adds_moves_with_its_samples(small_dataset: Path, ranks: RankPool) -> None:
    results: list[Any] = ranks.run(2, _balance, small_dataset)
    assert all(has_next_ids for batches in results for has_next_ids, _, _ in batches)
    assert all(keys == ["segment", "item_id", "action", "next_id"] for batches in results for _, _, keys in batches)
    loader = build_loader(small_dataset, CONFIG, rank=0, world_size=2)
    assert [ids for _, ids, _ in results[0]] != [ids_of(batch) for batch in loader]  # samples have moved
