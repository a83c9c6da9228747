"""Transforms of batches, in front of a Balancer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost
from tests.dataloader.batch_helpers import ids_of
from tests.ranks import RankPool

CONFIG = LoaderConfig(batch_size=8, max_history_length=20)
COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)


def _add_next_ids(batch: SequenceBatch, rng: np.random.Generator) -> SequenceBatch:
    items = batch.features["item_id"]
    added = KeyedJaggedTensor(keys=["next_id"], values=items.values() + 1, lengths=items.lengths())
    return batch.replace(features=KeyedJaggedTensor.concat([batch.features, added]))


def _balance(rank: int, world_size: int, path: Path) -> list[list[int]]:
    loader = build_loader(path, CONFIG, rank=rank, world_size=world_size, transform=_add_next_ids)
    with Balancer(loader, BalanceConfig(cost=COST)) as balancer:
        batches = list(balancer)
    for batch in batches:
        items, added = batch.features["item_id"], batch.features["next_id"]
        assert torch.equal(added.values(), items.values() + 1)
        assert torch.equal(added.lengths(), items.lengths())
        assert batch.features.keys() == ["segment", "item_id", "action", "next_id"]
    return [ids_of(batch) for batch in batches]


def test_a_key_that_a_transform_adds_moves_with_its_samples(small_dataset: Path, ranks: RankPool) -> None:
    balanced = ranks.run(2, _balance, small_dataset)[0]
    loader = build_loader(small_dataset, CONFIG, rank=0, world_size=2)
    assert balanced != [ids_of(batch) for batch in loader]  # samples have moved


def _anew(batch: SequenceBatch, rng: np.random.Generator) -> SequenceBatch:
    """Return the same samples as a batch that knows nothing of its position."""
    names = ("batch_size", "num_real", "features", "labels", "num_candidates", "sample_ids")
    return SequenceBatch(**{name: getattr(batch, name) for name in names})


@pytest.mark.parametrize("is_balanced", [False, True])
@pytest.mark.parametrize("build", [build_loader, build_stream_loader])
def test_a_batch_that_a_transform_makes_anew_keeps_its_position(
    small_dataset: Path, build: Any, is_balanced: bool
) -> None:
    def make(transform: Any) -> Any:
        loader = build(small_dataset, CONFIG, rank=0, world_size=1, transform=transform)
        return Balancer(loader, BalanceConfig(cost=COST)) if is_balanced else loader

    expected = [(batch.epoch, batch.step, batch.position, ids_of(batch)) for batch in make(None)]
    loader = make(_anew)
    assert [(batch.epoch, batch.step, batch.position, ids_of(batch)) for batch in loader] == expected
    iterator = iter(loader)
    state = loader.state_dict(after=[next(iterator), next(iterator)][1])
    resumed = make(_anew)
    resumed.load_state_dict(state)
    assert [ids_of(batch) for batch in resumed] == [ids_of(batch) for batch in iterator]
    if not is_balanced:
        with pytest.raises(ConfigError, match="the transform returned a NoneType; return the batch to yield"):
            next(iter(make(lambda batch, rng: None)))
