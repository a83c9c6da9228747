"""Tables are found by feature, whatever the features are called."""

import pytest
import torch
from torchrec import EmbeddingCollection, KeyedJaggedTensor

from hstu.config import HSTUConfig, feature_of, tables


@pytest.mark.parametrize(
    "names",
    [("city", "user.age", "user_age", "a.b.c"), ("type", "items", "training", "_modules", "__class__", "type.")],
)
def test_features_of_any_name_have_a_table(names: tuple[str, ...]) -> None:
    sizes = {name: size for size, name in enumerate(("item_id", "action", *names), start=3)}
    config = HSTUConfig(
        max_length=20, contextual=names, embedding_dim=4, hidden=8, heads=1, head_dim=8, layers=1, dropout=0.0
    )
    configs = tables(sizes, config)
    assert {feature_of(table.name): table.num_embeddings for table in configs} == sizes
    assert [table.name for table in configs if table.name in ("city", "item_id", "action", "user_age")] == [
        name for name in (*names, "item_id", "action") if name in ("city", "item_id", "action", "user_age")
    ]
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=[*sizes], values=torch.arange(len(sizes)) % 3, lengths=torch.ones(len(sizes), dtype=torch.int64)
    )
    found = EmbeddingCollection(tables=configs)(features)
    assert found.keys() == sizes.keys()
    assert all(jagged.values().shape == (1, 4) for jagged in found.values())
