from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from evenrank.core.errors import StateError
from evenrank.dataloader import LoaderConfig, RandomBatches, RandomData, RandomFeature, random_codes
from evenrank.dataloader.batches.schema import check_contents, schema_of
from evenrank.datasets.distributions import Uniform
from tests.dataloader.batch_helpers import rows_of

DATA = RandomData(
    lengths=Uniform(low=0, high=20),
    items=Uniform(low=100, high=199),
    actions=Uniform(low=3, high=5),
    contextual={"age": Uniform(low=1, high=7)},
    users=Uniform(low=7, high=9),
)
FEW = RandomData(lengths=Uniform(low=0, high=20), num_real=Uniform(low=0, high=3))


def _random(data: RandomData = DATA, num_batches: int = 20, rank: int = 0, world_size: int = 4, **options: Any) -> Any:
    made = {name: options.pop(name) for name in ("num_distinct",) if name in options}
    config = LoaderConfig(**{"batch_size": 16, **options})
    return RandomBatches(config, data, num_batches=num_batches, rank=rank, world_size=world_size, **made)


def _values(batches: Any, key: str) -> NDArray[np.int64]:
    return np.concatenate([batch.features[key].values().numpy() for batch in batches])


def _contents(batch: Any) -> list[Any]:
    tensors = batch.features.lengths(), batch.features.values(), batch.sample_ids
    return [batch.num_real, *(tensor.tolist() for tensor in tensors)]


def test_all_values_follow_their_distributions_and_seed_rank_and_step() -> None:
    of_ranks = [list(_random(rank=rank, user_id=True)) for rank in range(4)]
    batches = of_ranks[0]
    for batch in batches:
        check_contents(batch, schema_of(batch))
        assert (batch.batch_size, batch.num_real) == (16, 16)
        assert batch.features.keys() == ["user_id", "age", "item_id", "action"]
        assert batch.features["age"].lengths().tolist() == batch.features["user_id"].lengths().tolist() == [1] * 16
    lengths = np.concatenate([batch.features["item_id"].lengths().numpy() for batch in batches])
    assert set(lengths.tolist()) == set(range(21))
    for key, (low, end) in {"user_id": (7, 10), "item_id": (100, 200), "action": (3, 6), "age": (1, 8)}.items():
        assert set(_values(batches, key).tolist()) == set(range(low, end))
    # Whether ids of users are a feature does not change what is drawn.
    assert _values(batches, "item_id").tolist() == _values(_random(), "item_id").tolist()
    iterated = of_ranks[2][5]
    assert _contents(_random(num_batches=9, rank=2, user_id=True).batch(5)) == _contents(iterated)
    assert (iterated.step, iterated.position) == (5, 6 * 4 * 16)
    others = [of_ranks[1][5], of_ranks[2][4], list(_random(rank=2, user_id=True, seed=1))[5]]
    assert all(other.features.values().tolist() != iterated.features.values().tolist() for other in others)


def test_contextual_features_can_have_any_number_of_values_batches_few_samples_and_items_codes() -> None:
    tags = RandomFeature(values=Uniform(low=50, high=59), lengths=Uniform(low=0, high=9), max_length=4)
    data = replace(DATA, contextual={"tags": tags, "age": Uniform(low=1, high=7)}, num_real=Uniform(low=0, high=3))
    batches = list(_random(data))
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
    codes = random_codes(200, levels=3, codebook_size=8)
    known = set(map(tuple, codes.codes[100:200].tolist()))
    for batch in _random(replace(data, num_real=None), codes=codes, num_batches=3):
        check_contents(batch, schema_of(batch))
        assert batch.features.keys() == ["tags", "age", "semantic_id"]
        tokens = batch.features["semantic_id"].values().view(-1, 3) - torch.tensor([0, 8, 16])
        targets = batch.labels["label"].values().view(-1, 3)
        assert len(targets) == batch.num_real == 16
        assert set(map(tuple, [*tokens.tolist(), *targets.tolist()])) <= known


@pytest.mark.parametrize(("num_distinct", "batch_size"), [(3, 16), (2, 1), (50, 4)])
def test_distinct_batches_are_made_beforehand_and_repeated_also_after_a_stop(
    num_distinct: int, batch_size: int
) -> None:
    options = {"batch_size": batch_size, "rank": 2, "num_batches": 8}
    batches, resumed = (_random(FEW, num_distinct=num_distinct, **options) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RandomBatches, "_make", None)  # nothing is drawn or collated from here on
        cycled = list(batches)
        resumed.load_state_dict(batches.state_dict(after=cycled[4]))
        rest = list(resumed)
    assert len(batches) == len(cycled) == 8
    assert [(batch.step, batch.position) for batch in cycled] == [(s, (s + 1) * 4 * batch_size) for s in range(8)]
    assert [_contents(batch) for batch in rest] == [_contents(batch) for batch in cycled[5:]]
    drawn = list(_random(FEW, **options))
    for step, batch in enumerate(cycled):
        check_contents(batch, schema_of(batch))
        assert _contents(batch)[:3] == _contents(drawn[step % num_distinct])[:3]


def test_a_state_is_refused_where_ranks_draw_other_samples_or_as_many_in_other_batches() -> None:
    state = _random(FEW, batch_size=4, num_batches=6).state_dict()
    _random(FEW, batch_size=4, num_batches=3, world_size=8).load_state_dict(state)
    changes: list[Any] = [{"batch_size": 6, "num_batches": 4}, {"num_batches": 7}, {"num_distinct": 2}]
    for change in changes:
        with pytest.raises(StateError, match="the loader's state is of other data, codes or filters"):
            _random(FEW, **{"batch_size": 4, "num_batches": 6, **change}).load_state_dict(state)
