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


def _balance(rank: int, world_size: int, path: Path) -> list[tuple[bool, list[int], list[str]]]:
    loader = build_loader(path, CONFIG, rank=rank, world_size=world_size, transform=_add_next_ids)
    with Balancer(loader, BalanceConfig(cost=COST)) as balancer:
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


def _anew(batch: SequenceBatch, rng: np.random.Generator) -> SequenceBatch:
    """Return the same samples as a batch that knows nothing of its position."""
    return SequenceBatch(
        batch_size=batch.batch_size,
        num_real=batch.num_real,
        features=batch.features,
        labels=batch.labels,
        num_candidates=batch.num_candidates,
        sample_ids=batch.sample_ids,
    )


def _make(path: Path, kind: str, transform: Any) -> Any:
    build = build_loader if kind == "loader" else build_stream_loader
    return build(path, CONFIG, rank=0, world_size=1, transform=transform)


@pytest.mark.parametrize("is_balanced", [False, True])
@pytest.mark.parametrize("kind", ["loader", "stream"])
def test_a_batch_that_a_transform_makes_anew_keeps_its_position(
    small_dataset: Path, kind: str, is_balanced: bool
) -> None:
    def make(transform: Any) -> Any:
        loader = _make(small_dataset, kind, transform)
        return Balancer(loader, BalanceConfig(cost=COST)) if is_balanced else loader

    expected = [(batch.epoch, batch.step, batch.position, ids_of(batch)) for batch in make(None)]
    loader = make(_anew)
    assert [(batch.epoch, batch.step, batch.position, ids_of(batch)) for batch in loader] == expected
    iterator = iter(loader)
    state = loader.state_dict(after=[next(iterator), next(iterator)][1])
    resumed = make(_anew)
    resumed.load_state_dict(state)
    assert [ids_of(batch) for batch in resumed] == [ids_of(batch) for batch in iterator]


@pytest.mark.parametrize("kind", ["loader", "stream"])
def test_a_transform_that_returns_no_batch_is_told(small_dataset: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match="the transform returned a NoneType; return the batch to yield"):
        next(iter(_make(small_dataset, kind, lambda batch, rng: None)))
