from pathlib import Path

import numpy as np
import pytest

from evenrank.core.errors import ConfigError
from evenrank.datasets import open_store
from evenrank.datasets.distributions import Histogram, Uniform, Zipf
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess


def test_every_feature_follows_its_distribution(tmp_path: Path) -> None:
    synthetic = SyntheticConfig(
        num_users=400,
        lengths=Histogram.of(np.array([3, 3, 8])),
        items=Zipf(low=0, high=30, shift=1),
        actions=Uniform(low=2, high=3),
        contextual={"country": Uniform(low=0, high=3), "device": Zipf(high=5)},
    )
    out = tmp_path / "out"
    manifest = preprocess(PreprocessConfig(dataset="synthetic", out=out, split="none", synthetic=synthetic))
    store = open_store(out)
    assert set(store.lengths.tolist()) == {3, 8}
    assert set(store.events["item_id"].tolist()) == set(range(31))
    assert set(store.events["action"].tolist()) == {2, 3}
    assert set(store.rows["country"].tolist()) == {0, 1, 2, 3}
    assert set(store.rows["device"].tolist()) == {1, 2, 3, 4, 5}
    assert list(manifest.contextual.items()) == [("country", "int64"), ("device", "int64")]
    assert manifest.vocabulary_sizes == {"user_id": 401, "item_id": 31, "action": 4, "country": 4, "device": 6}
    assert manifest.context_labels["country"] == (None, "country 1", "country 2", "country 3")
    assert "observations=3" in manifest.options["lengths"]


def test_a_mistake_names_the_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no feature can be called 'length'"):
        SyntheticConfig(contextual={"length": Uniform()})
    with pytest.raises(ConfigError, match="num_users must be between 1 and 1,000,000,000, got 0"):
        SyntheticConfig(num_users=0)
    synthetic = SyntheticConfig(num_users=10, lengths=Uniform(low=2**62, high=2**62))
    message = "users 1 to 10 have 46,116,860,184,273,879,040 events, more than 1,073,741,824"
    with pytest.raises(ConfigError, match=message):
        preprocess(PreprocessConfig(dataset="synthetic", out=tmp_path / "out", synthetic=synthetic))
    assert list(tmp_path.iterdir()) == []
