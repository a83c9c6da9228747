from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, StateError
from evenrank.dataloader import (
    LoaderConfig,
    RandomBatches,
    RandomData,
    RandomFeature,
    Requests,
    SemanticIdBatch,
    SequenceBatch,
    random_codes,
)
from evenrank.dataloader.batches.schema import check_contents, schema_of
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets.distributions import Uniform
from tests.dataloader.batch_helpers import ids_of, rows_of

DATA = RandomData(
    lengths=Uniform(low=0, high=20),
    items=Uniform(low=100, high=199),
    actions=Uniform(low=3, high=5),
    contextual={"age": Uniform(low=1, high=7)},
)
USERS = replace(DATA, users=Uniform(low=7, high=9))
CODES = random_codes(200, levels=3, codebook_size=8)
LARGE_ACTIONS = RandomData(actions=Uniform(low=1 << 31, high=1 << 32))
FEW = RandomData(lengths=Uniform(low=0, high=20), num_real=Uniform(low=0, high=3))


def _batches(data: RandomData = DATA, num_batches: int = 20, rank: int = 0, **options: Any) -> list[SequenceBatch]:
    config = LoaderConfig(**{"batch_size": 16, **options})
    return list(RandomBatches(config, data, num_batches=num_batches, rank=rank, world_size=4))


def _values(batches: list[SequenceBatch], key: str) -> NDArray[np.int64]:
    return np.concatenate([batch.features[key].values().numpy() for batch in batches])


def test_all_values_follow_their_distributions() -> None:
    of_ranks = [_batches(USERS, rank=rank, user_id=True) for rank in range(4)]
    batches = of_ranks[0]
    for batch in batches:
        check_contents(batch, schema_of(batch))
        assert (batch.batch_size, batch.num_real) == (16, 16)
        assert batch.features.keys() == ["user_id", "age", "item_id", "action"]
        for key in ("user_id", "age"):
            assert batch.features[key].lengths().tolist() == [1] * 16
    lengths = np.concatenate([batch.features["item_id"].lengths().numpy() for batch in batches])
    assert set(lengths.tolist()) == set(range(21))
    values = {"user_id": (7, 10), "item_id": (100, 200), "action": (3, 6), "age": (1, 8)}
    for key, (low, end) in values.items():
        assert set(_values(batches, key).tolist()) == set(range(low, end))
    # Whether ids of users are a feature does not change what is drawn.
    for key in ("age", "item_id"):
        assert _values(batches, key).tolist() == _values(_batches(USERS), key).tolist()
    ids = [sample for rank in of_ranks for batch in rank for sample in ids_of(batch)]
    assert sorted(ids) == list(range(4 * 20 * 16))
    # A batch depends only on seed, rank and step.
    iterated = of_ranks[2][5]
    config = LoaderConfig(batch_size=16, user_id=True)
    alone = RandomBatches(config, USERS, num_batches=9, rank=2, world_size=4).batch(5)
    assert alone.features.values().tolist() == iterated.features.values().tolist()
    assert (iterated.step, iterated.position) == (5, 6 * 4 * 16)
    others = [of_ranks[1][5], of_ranks[2][4], _batches(USERS, rank=2, user_id=True, seed=1)[5]]
    assert all(other.features.values().tolist() != iterated.features.values().tolist() for other in others)


def test_contextual_features_can_have_any_number_of_values_and_batches_few_samples() -> None:
    tags = RandomFeature(values=Uniform(low=50, high=59), lengths=Uniform(low=0, high=9), max_length=4)
    data = replace(DATA, contextual={"tags": tags, "age": Uniform(low=1, high=7)}, num_real=Uniform(low=0, high=3))
    batches = _batches(data)
    assert {batch.num_real for batch in batches} == {0, 1, 2, 3}
    for batch in batches:
        check_contents(batch, schema_of(batch))
        assert batch.features.keys()[:2] == ["tags", "age"]
        assert batch.features["age"].lengths().tolist() == [1] * batch.num_real + [0] * (16 - batch.num_real)
        assert batch.sample_ids[batch.num_real :].tolist() == [-1] * (16 - batch.num_real)
    rows = [row for batch in batches for row in rows_of(batch.features, "tags")[: batch.num_real]]
    assert {len(row) for row in rows} == {0, 1, 2, 3, 4}
    assert np.mean([len(row) == 4 for row in rows]) > 0.4  # 4 to 9 values, cut to 4
    assert {value for row in rows for value in row} == set(range(50, 60))
    (coded,) = RandomBatches(LoaderConfig(batch_size=16, codes=CODES), data, num_batches=1)
    assert coded.features.keys() == ["tags", "age", "semantic_id"]
    check_contents(coded, schema_of(coded))


def test_semantic_ids_are_codes_of_the_table() -> None:
    assert CODES.codebook_sizes == (8, 8, 8)
    known = set(map(tuple, CODES.codes[100:200].tolist()))
    batches: RandomBatches[SemanticIdBatch]
    batches = RandomBatches(LoaderConfig(batch_size=4, codes=CODES), DATA, num_batches=3)
    for batch in batches:
        tokens = batch.features["semantic_id"].values().view(-1, 3) - torch.tensor([0, 8, 16])
        targets = batch.labels["label"].values().view(-1, 3)
        assert len(targets) == batch.num_real == 4
        assert set(map(tuple, [*tokens.tolist(), *targets.tolist()])) <= known


def _contents(batch: SequenceBatch) -> tuple[object, ...]:
    tensors = (batch.features.lengths(), batch.features.values(), batch.sample_ids)
    return (batch.epoch, batch.position, batch.num_real, *(tensor.tolist() for tensor in tensors))


def test_distinct_batches_are_made_beforehand_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoaderConfig(batch_size=16)
    batches = RandomBatches(config, DATA, num_batches=8, num_distinct=3, rank=2, world_size=4)
    monkeypatch.setattr(RandomBatches, "_make", None)  # nothing is drawn or collated from here on
    cycled = list(batches)
    assert len(batches) == len(cycled) == 8
    assert [(batch.step, batch.position) for batch in cycled] == [(step, (step + 1) * 4 * 16) for step in range(8)]
    monkeypatch.undo()
    drawn = _batches(num_batches=3, rank=2)
    for step, batch in enumerate(cycled):
        check_contents(batch, schema_of(batch))
        assert _contents(batch)[2:] == _contents(drawn[step % 3])[2:]


def test_distinct_batches_of_one_sample_are_repeated() -> None:
    batches = RandomBatches(LoaderConfig(batch_size=1), DATA, num_batches=5, num_distinct=2)
    of_steps = [_contents(batch)[2:] for batch in batches]
    assert of_steps == [of_steps[step % 2] for step in range(5)]
    assert of_steps[0] != of_steps[1]


@pytest.mark.parametrize("num_distinct", [None, 1, 3, 50])
def test_after_a_stop_at_any_step_the_same_batches_follow(num_distinct: int | None) -> None:
    def make(rank: int = 1) -> RandomBatches[SequenceBatch]:
        config = LoaderConfig(batch_size=4)
        return RandomBatches(config, FEW, num_batches=5, num_distinct=num_distinct, rank=rank, world_size=2)

    batches = make()
    yielded = [batch for _ in range(2) for batch in batches]
    assert [batch.epoch for batch in yielded] == [0] * 5 + [1] * 5
    for index, batch in enumerate(yielded):
        resumed = make()
        resumed.load_state_dict(make(rank=0).state_dict(after=batch))
        assert resumed.state_dict() == batches.state_dict(after=batch)
        assert len(resumed) == 5
        remaining = resumed.remaining_batches()
        rest = list(resumed)
        assert resumed.epoch == rest[0].epoch + 1
        assert len(rest) == remaining == 5 - (index + 1) % 5
        assert [batch.step for batch in rest] == list(range(remaining))
        expected = [*yielded, *make()][index + 1 : index + 1 + remaining]
        assert [_contents(batch)[1:] for batch in rest] == [_contents(batch)[1:] for batch in expected]
        assert {batch.epoch for batch in rest} == {(index + 1) // 5}


def test_a_state_of_other_batches_is_refused() -> None:
    def make(batch_size: int = 4, key_maps: Any = None, **options: Any) -> RandomBatches[SequenceBatch]:
        config = LoaderConfig(batch_size=batch_size, key_maps=key_maps or {})
        return RandomBatches(config, **{"num_batches": 6, "world_size": 2, **options})

    state = make().state_dict()
    key_maps = {"item_id": KeyMap(num_embeddings=1 << 16, world_size=1, mode="hash_roundrobin")}
    others = [make(batch_size=6, num_batches=4), make(num_batches=7), make(num_distinct=2), make(key_maps=key_maps)]
    for other in others:
        with pytest.raises(StateError, match=r"the loader's state (is of other data, codes or filters|stores item_id)"):
            other.load_state_dict(state)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_a_state_is_loaded_on_as_many_ranks_as_draw_as_many_samples(world_size: int) -> None:
    def make(rank: int, world_size: int) -> RandomBatches[SequenceBatch]:
        num_batches = 12 // world_size
        return RandomBatches(LoaderConfig(batch_size=4), FEW, num_batches=num_batches, rank=rank, world_size=world_size)

    def by_first_id(loaders: list[RandomBatches[SequenceBatch]]) -> dict[int, Any]:
        found = [batch for loader in loaders for batch in loader if batch.num_real]
        return {ids_of(batch)[0]: batch.features.values().tolist() for batch in found}

    loader = make(0, 2)
    position = next(iter(loader)).position
    rest = {first: values for first, values in by_first_id([make(0, 2), make(1, 2)]).items() if first >= position}
    resumed = [make(rank, world_size) for rank in range(world_size)]
    for each in resumed:
        each.load_state_dict(loader.state_dict())
    assert by_first_id(resumed) == rest


def _random(**options: Any) -> Any:
    return RandomBatches(LoaderConfig(batch_size=4, **options.pop("config", {})), **{"num_batches": 1, **options})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _random(num_batches=0), "num_batches must be at least 1, got 0"),
        (lambda: _random(num_distinct=0), "num_distinct must be at least 1, got 0"),
        (
            lambda: _random(config={"order": Requests(), "max_num_candidates": 1}),
            "random batches have no times or requests; leave out order=",
        ),
        (lambda: _random(config={"extra_events": ("play_time_ms",)}), "no extra events 'play_time_ms'"),
        (
            lambda: _random(data=LARGE_ACTIONS).batch(0),
            r"actions must be between 0 and 2147483647, got \d+ to \d+; choo",
        ),
        (lambda: RandomData(contextual={"item_id": Uniform(low=1, high=2)}), "no feature can be called 'item_id'"),
        (lambda: RandomFeature(values=Uniform(), lengths=Uniform(), max_length=-1), "max_length must be .* 0, got -1"),
        (lambda: random_codes(5, levels=0, codebook_size=4), "levels must be at least 1, got 0"),
    ],
)
def test_invalid_settings_are_refused_with_the_value(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
