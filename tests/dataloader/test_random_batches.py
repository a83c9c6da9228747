import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader import (
    LoaderConfig,
    RandomBatches,
    RandomData,
    RandomFeature,
    SemanticIdConfig,
    SequenceBatch,
    random_codes,
)
from evenrank.dataloader.balance import Balancer, HSTUCost
from evenrank.dataloader.batch import check_contents
from evenrank.datasets.distributions import Uniform
from tests.dataloader.batches import ids_of, rows_of
from tests.ranks import RankPool

DATA = RandomData(
    lengths=Uniform(low=0, high=20),
    items=Uniform(low=100, high=199),
    actions=Uniform(low=3, high=5),
    contextual={"age": Uniform(low=1, high=7)},
)
FEW = RandomData(lengths=Uniform(low=0, high=20), num_real=Uniform(low=0, high=3))


def _batches(data: RandomData = DATA, num_batches: int = 20, rank: int = 0, **options: Any) -> list[SequenceBatch]:
    config = LoaderConfig(**{"batch_size": 16, **options})
    return list(RandomBatches(config, data, num_batches=num_batches, rank=rank, world_size=4))


def _values(batches: list[SequenceBatch], key: str) -> NDArray[np.int64]:
    return np.concatenate([batch.features[key].values().numpy() for batch in batches])


def test_all_values_follow_their_distributions() -> None:
    batches = _batches()
    assert len(batches) == 20
    for batch in batches:
        check_contents(batch)
        assert (batch.batch_size, batch.num_real) == (16, 16)
        assert batch.features["age"].lengths().tolist() == [1] * 16
    lengths = np.concatenate([batch.features["item_id"].lengths().numpy() for batch in batches])
    assert set(lengths.tolist()) == set(range(21))
    assert set(_values(batches, "item_id").tolist()) == set(range(100, 200))
    assert set(_values(batches, "action").tolist()) == {3, 4, 5}
    assert set(_values(batches, "age").tolist()) == set(range(1, 8))


def test_contextual_features_can_have_any_number_of_values() -> None:
    tags = RandomFeature(values=Uniform(low=50, high=59), lengths=Uniform(low=0, high=9), max_length=4)
    data = replace(DATA, contextual={"tags": tags, "age": Uniform(low=1, high=7)}, num_real=Uniform(low=0, high=16))
    batches = _batches(data)
    for batch in batches:
        check_contents(batch)
        assert batch.features.keys()[:2] == ["tags", "age"]
        assert batch.features["age"].lengths().tolist() == [1] * batch.num_real + [0] * (16 - batch.num_real)
    rows = [row for batch in batches for row in rows_of(batch.features, "tags")[: batch.num_real]]
    assert {len(row) for row in rows} == {0, 1, 2, 3, 4}
    assert np.mean([len(row) == 4 for row in rows]) > 0.5  # 4 to 9 values, cut to 4
    assert {value for row in rows for value in row} == set(range(50, 60))
    table = random_codes(200, levels=2, codebook_size=8)
    (batch,) = RandomBatches(SemanticIdConfig(batch_size=16, codes=table), data, num_batches=1)
    assert batch.features.keys() == ["tags", "age", "semantic_id"]
    check_contents(batch)


def test_candidates_and_tasks_follow_the_configuration() -> None:
    for batch in _batches(max_num_candidates=4, max_history_length=6, num_tasks=2, num_batches=3):
        assert batch.num_candidates.tolist() == [4] * 16
        items, actions = (batch.features[key].lengths() for key in ("item_id", "action"))
        assert torch.equal(items - 4, actions)
        assert int(actions.max()) <= 6
        labels = rows_of(batch.labels, "label")
        assert [len(row) for row in labels] == [4] * 16
        assert {label for row in labels for label in row} <= {3, 4 & 3, 5 & 3}


def test_a_batch_depends_only_on_seed_rank_and_step() -> None:
    config = LoaderConfig(batch_size=16)
    alone = RandomBatches(config, DATA, num_batches=9, rank=2, world_size=4).batch(5)
    iterated = _batches(rank=2)[5]
    assert alone.features.values().tolist() == iterated.features.values().tolist()
    assert (iterated.step, iterated.position) == (5, 6 * 4 * 16)
    others = [_batches(rank=1)[5], _batches(rank=2)[4], _batches(rank=2, seed=1)[5]]
    assert all(other.features.values().tolist() != iterated.features.values().tolist() for other in others)


def test_sample_ids_are_unique() -> None:
    ids = [sample for rank in range(4) for batch in _batches(rank=rank) for sample in ids_of(batch)]
    assert sorted(ids) == list(range(4 * 20 * 16))


def test_batches_can_have_few_or_no_samples() -> None:
    batches = _batches(FEW)
    assert {batch.num_real for batch in batches} == {0, 1, 2, 3}
    for batch in batches:
        check_contents(batch)
        assert batch.sample_ids[batch.num_real :].tolist() == [-1] * (16 - batch.num_real)


def test_semantic_ids_are_codes_of_the_table() -> None:
    table = random_codes(200, levels=3, codebook_size=8)
    assert table.codebook_sizes == (8, 8, 8)
    known = set(map(tuple, table.codes[100:200].tolist()))
    for batch in RandomBatches(SemanticIdConfig(batch_size=4, codes=table), DATA, num_batches=3):
        tokens = batch.features["semantic_id"].values().view(-1, 3) - torch.tensor([0, 8, 16])
        targets = batch.labels["label"].values().view(-1, 3)
        assert len(targets) == batch.num_real == 4
        assert set(map(tuple, [*tokens.tolist(), *targets.tolist()])) <= known


def _both_as_rank_0(rank: int, world_size: int) -> None:
    with Balancer(
        RandomBatches(LoaderConfig(batch_size=4), num_batches=2, rank=0, world_size=world_size),
        cost=HSTUCost(hidden=8, heads=1, head_dim=8, layers=1),
    ) as balancer:
        list(balancer)


def test_a_balancer_refuses_two_loaders_of_the_same_rank(ranks: RankPool) -> None:
    failures = ranks.try_run(2, _both_as_rank_0)
    assert all("the loader of rank 1 was created for rank 0" in failure.message for failure in failures)


def _balanced_ids(rank: int, world_size: int) -> list[int]:
    batches = RandomBatches(LoaderConfig(batch_size=4), FEW, num_batches=12, rank=rank, world_size=world_size)
    with Balancer(batches, cost=HSTUCost(hidden=8, heads=1, head_dim=8, layers=1)) as balancer:
        return [sample for batch in balancer for sample in ids_of(batch)]


def test_a_balancer_keeps_all_samples_of_ranks_with_few_or_none(ranks: RankPool) -> None:
    drawn = [
        sample
        for rank in range(3)
        for batch in RandomBatches(LoaderConfig(batch_size=4), FEW, num_batches=12, rank=rank, world_size=3)
        for sample in ids_of(batch)
    ]
    balanced = itertools.chain.from_iterable(ranks.run(3, _balanced_ids))
    assert sorted(balanced) == sorted(drawn)


def test_invalid_settings_are_refused_with_the_value() -> None:
    with pytest.raises(ConfigError, match="num_batches must be at least 1, got 0"):
        RandomBatches(LoaderConfig(batch_size=4), num_batches=0)
    with pytest.raises(ConfigError, match="got rank 3 of 3"):
        RandomBatches(LoaderConfig(batch_size=4), num_batches=1, rank=3, world_size=3)
    with pytest.raises(ConfigError, match="a contextual feature cannot be called 'item_id'"):
        RandomData(contextual={"item_id": Uniform(low=1, high=2)})
    with pytest.raises(ConfigError, match="max_length must be at least 0, got -1"):
        RandomFeature(values=Uniform(), lengths=Uniform(), max_length=-1)
    with pytest.raises(ConfigError, match="no extra events 'play_time_ms'"):
        RandomBatches(LoaderConfig(batch_size=4, extra_events=("play_time_ms",)), num_batches=1)
    with pytest.raises(ConfigError, match=r"actions must be between 0 and 2147483647, got [0-9]+ to [0-9]+; choose"):
        RandomBatches(
            LoaderConfig(batch_size=4), RandomData(actions=Uniform(low=1 << 31, high=1 << 32)), num_batches=1
        ).batch(0)
    with pytest.raises(ConfigError, match="levels must be at least 1, got 0"):
        random_codes(5, levels=0, codebook_size=4)
