"""Settings that no model can have, attention by name, and tables by feature, whatever features are called."""

import pytest
import torch
from torchrec import EmbeddingCollection, KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from hstu.config import ATTENTIONS, HSTUConfig, feature_of, tables
from tests.examples.hstu.samples import make_sequences


def test_a_single_feature_in_place_of_a_tuple_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a tuple of features, got 'user_id'; add a comma behind it"):
        HSTUConfig(max_length=10, contextual="user_id")  # type: ignore[arg-type]


def test_triton_on_the_cpu_is_refused() -> None:
    values = torch.zeros(0, 1, 64)
    with pytest.raises(ConfigError, match="'triton' needs a CUDA device, got cpu; choose 'auto' or 'padded'"):
        ATTENTIONS["triton"](values, values, values, make_sequences([], [], []), scale_length=1)


@pytest.mark.parametrize(
    "names",
    [("city", "user.age", "user_age", "a.b.c"), ("type", "items", "training", "_modules", "__class__", "type.")],
)
def test_features_of_any_name_have_a_table(names: tuple[str, ...]) -> None:
    sizes = {name: size for size, name in enumerate(("item_id", "action", *names), start=3)}
    config = HSTUConfig(max_length=20, contextual=names, embedding_dim=4)
    configs = tables(sizes, config)
    assert {feature_of(table.name): table.num_embeddings for table in configs} == sizes
    assert {"item_id", "action"} < {table.name for table in configs}  # plain names stay as they are
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=[*sizes], values=torch.arange(len(sizes)) % 3, lengths=torch.ones(len(sizes), dtype=torch.int64)
    )
    found = EmbeddingCollection(tables=configs)(features)
    assert found.keys() == sizes.keys()
    assert all(jagged.values().shape == (1, 4) for jagged in found.values())
