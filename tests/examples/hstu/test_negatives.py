"""What negatives depend on, and where they are in the features."""

import pytest

from evenrank.core.errors import ConfigError
from hstu.retrieval import UniformNegatives, without_values
from tests.dataloader.batch_helpers import rows_of
from tests.examples.hstu.samples import Sample, make_batch, random_samples


def test_negatives_are_those_of_the_step_whatever_samples_a_rank_has() -> None:
    draw = UniformNegatives(1000, 50, seed=1)
    first = make_batch(random_samples(3), rows=4).replace(epoch=2, position=48, step=5)
    other = make_batch(random_samples(1, seed=1)).replace(epoch=2, position=48, step=0)  # resumed, on another rank
    negatives = rows_of(draw(first), "negative_id")
    assert negatives[1:] == [[], [], []]
    assert len(negatives[0]) == 50
    assert 0 <= min(negatives[0]) < 100
    assert 900 <= max(negatives[0]) < 1000
    assert rows_of(draw(other), "negative_id") == negatives[:1]
    for changed in (first.replace(epoch=3), first.replace(position=49)):
        assert rows_of(draw(changed), "negative_id") != negatives
    assert rows_of(UniformNegatives(1000, 50, seed=2)(first), "negative_id") != negatives


def test_the_other_features_stay_as_they_are() -> None:
    batch = make_batch([Sample(user_id=[1], item_id=[4, 5], action=[6, 7]), Sample(tags=[3])])
    features = UniformNegatives(10, 3, seed=0)(batch)
    assert features.keys() == ["user_id", "tags", "item_id", "action", "negative_id"]
    for key in ("user_id", "tags", "item_id", "action"):
        assert rows_of(features, key) == rows_of(batch.features, key)
    assert features.length_per_key() == [1, 1, 2, 2, 3]
    assert features.lengths().tolist() == [1, 0, 0, 1, 2, 0, 2, 0, 3, 0]
    empty = without_values(batch.features)
    assert empty.keys() == batch.features.keys()
    assert [rows_of(empty, key) for key in ("user_id", "tags", "item_id", "action")] == [[[], []]] * 4


@pytest.mark.parametrize(("num_items", "count", "name"), [(0, 1, "num_items"), (1, 0, "num_negatives")])
def test_nothing_to_draw_is_refused(num_items: int, count: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        UniformNegatives(num_items, count, seed=0)
