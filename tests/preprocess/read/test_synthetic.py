from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.datasets import open_store
from evenrank.datasets.distributions import Histogram, Uniform, Zipf
from evenrank.datasets.schema import user_hash
from evenrank.datasets.store import SequenceStore
from evenrank.preprocess import Drift, PreprocessConfig, SyntheticConfig, preprocess


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
    assert set(store.columns["item_id"].tolist()) == set(range(31))
    assert set(store.columns["action"].tolist()) == {2, 3}
    assert set(store.columns["country"].tolist()) == {0, 1, 2, 3}
    assert set(store.columns["device"].tolist()) == {1, 2, 3, 4, 5}
    assert list(manifest.contextual.items()) == [("country", "int64"), ("device", "int64")]
    assert manifest.vocabulary_sizes == {"user_id": 401, "item_id": 31, "action": 4, "country": 4, "device": 6}
    assert manifest.context_labels["country"] == (None, "country 1", "country 2", "country 3")
    assert "observations=3" in manifest.options["lengths"]


def test_a_mistake_names_the_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no feature can be called 'length'"):
        SyntheticConfig(contextual={"length": Uniform()})
    with pytest.raises(ConfigError, match="num_users must be at least 1 and at most 1000000000, got 0"):
        SyntheticConfig(num_users=0)
    synthetic = SyntheticConfig(num_users=10, lengths=Uniform(low=2**62, high=2**62))
    message = "users 1 to 10 have 46,116,860,184,273,879,040 events, more than 1,073,741,824"
    with pytest.raises(ConfigError, match=message):
        preprocess(PreprocessConfig(dataset="synthetic", out=tmp_path / "out", synthetic=synthetic))
    assert list(tmp_path.iterdir()) == []


def _written(out: Path, *, seed: int = 0, **options: Any) -> SequenceStore:
    sizes: dict[str, Any] = {"num_users": 2000, "lengths": Uniform(low=0, high=300)}
    synthetic = SyntheticConfig(**sizes | options)
    preprocess(PreprocessConfig(dataset="synthetic", out=out, split="none", synthetic=synthetic, seed=seed))
    return open_store(out)


def _days(store: SequenceStore) -> NDArray[np.int64]:
    """Return the day of each event, from 0; all histories start before day 30."""
    return (store.columns["timestamp_ms"] - 1_600_000_000_000) // 86_400_000


def test_without_drift_the_draws_are_those_of_one_generator_per_block_in_this_order(tmp_path: Path) -> None:
    store = _written(tmp_path / "out", seed=5)
    rng = np.random.default_rng((5, 1, 0))
    lengths = Uniform(low=0, high=300).sample(rng, 2000)
    rng.exponential(3_600_000, lengths.sum())
    rng.integers(0, 30 * 86_400_000, 2000)
    items, actions = (
        SyntheticConfig().items.sample(rng, lengths.sum()),
        rng.integers(0, 4, lengths.sum(), endpoint=True),
    )
    ends = np.cumsum(lengths)
    for row, user in enumerate(store.columns["user_id"].tolist()):
        drawn = slice(ends[user - 1] - lengths[user - 1], ends[user - 1])
        of_row = slice(store.offsets[row], store.offsets[row + 1])
        assert store.columns["item_id"][of_row].tolist() == items[drawn].tolist()
        assert store.columns["action"][of_row].tolist() == actions[drawn].tolist()
    assert len(store) == np.count_nonzero(lengths)
    assert "category" not in store.columns
    assert "drift" not in store.manifest.options


def test_drift_changes_the_items_of_events_and_nothing_else(tmp_path: Path) -> None:
    plain, drifting = _written(tmp_path / "plain"), _written(tmp_path / "drift", drift=Drift())
    assert (plain.offsets == drifting.offsets).all()
    for column in ("timestamp_ms", "action"):
        assert (plain.columns[column] == drifting.columns[column]).all()
    items, moved = plain.columns["item_id"] - 1, drifting.columns["item_id"] - 1
    assert 0 <= moved.min() <= moved.max() < 50_000
    assert drifting.columns["category"].tolist() == (moved % 20 + 1).tolist()
    assert drifting.manifest.vocabulary_sizes["category"] == 21
    assert drifting.manifest.options["drift"] == "Drift(categories=20, days=7.0, share=0.8, new_items=0.3)"
    # 30 % of the items are missing at the start, and a user's events have other items of the same group, or, where that
    # is missing, of an earlier one.
    same_group = (moved // 20 == items // 20).mean()
    assert 0.85 < same_group < 1
    assert (moved // 20 <= items // 20).all()


def test_most_events_of_a_user_are_of_one_category_until_it_changes(tmp_path: Path) -> None:
    def follows(name: str, **drift: Any) -> float:
        """Return the fraction of events with the category of the event before, of the same user."""
        store = _written(
            tmp_path / name, drift=Drift(categories=50, new_items=0, **drift), items=Zipf(exponent=0, high=5000)
        )
        is_later = np.ones(len(store.columns["item_id"]), dtype=bool)
        is_later[store.offsets[:-1]] = False
        return float((np.diff(store.columns["category"], prepend=0) == 0)[is_later].mean())

    for share in (0.0, 0.6, 1.0):
        # Both events are of the interest, or one of two others is the same by chance.
        expected = share**2 + (1 - share**2) / 50
        assert follows(f"share {share}", share=share, days=1e6) == pytest.approx(expected, abs=0.01)
    # Gaps of an hour on average: an interest of a day lasts for 24 of them, and the next one is another with 49 of 50.
    assert follows("a day", share=1, days=1) == pytest.approx(1 - 1 / 25 * 49 / 50, abs=0.005)


def test_the_next_day_is_like_the_last_one_and_less_like_older_ones(tmp_path: Path) -> None:
    store = _written(tmp_path / "out", drift=Drift(days=5))
    days, categories = _days(store), store.columns["category"]
    shares = np.stack([np.bincount(categories[days == day], minlength=21) / (days == day).sum() for day in range(35)])

    def distance(days_apart: int) -> float:
        """Return the mean total variation between the categories of days that are so far apart."""
        return float(np.abs(shares[5 + days_apart :] - shares[5:-days_apart]).sum(axis=1).mean() / 2)

    assert distance(1) < 0.08 < 0.15 < distance(15)
    # An item model that counts yesterday's events predicts today's better than one that counts those of two weeks ago.
    counts = np.stack([np.bincount(store.columns["item_id"][days == day], minlength=50_001) + 0.1 for day in range(35)])
    loss = {
        ago: np.mean(
            [
                -(counts[d] * np.log(counts[d - ago] / counts[d - ago].sum())).sum() / counts[d].sum()
                for d in range(20, 30)
            ]
        )
        for ago in (1, 14)
    }
    assert loss[1] < loss[14] - 0.1


def test_items_appear_during_the_first_30_days_and_have_no_event_before(tmp_path: Path) -> None:
    drift = Drift(new_items=0.5, share=0)
    store = _written(tmp_path / "out", drift=drift, items=Zipf(exponent=0, high=1000))
    items, times = store.columns["item_id"], store.columns["timestamp_ms"] - 1_600_000_000_000
    firsts = np.full(1001, 2**62)
    np.minimum.at(firsts, items, times)
    born = 30 * 86_400_000 * (1 - user_hash(np.arange(1000), salt=2) * 2.0**-64 / 0.5)  # with seed 0
    born[:20] = 0
    assert (firsts[1:] >= born).all()
    assert (firsts[1:] < np.maximum(born, 0) + 2 * 86_400_000 + 3 * 86_400_000 * (born < 3 * 86_400_000)).all()
    # About half of the items are new, and evenly many on each day.
    days = _days(store)
    known = [len(np.unique(items[days < day])) for day in (6, 15, 24, 34)]
    assert known == pytest.approx([600, 750, 900, 1000], abs=45)


@pytest.mark.parametrize("exponent", [0.7, 1.3])
def test_groups_of_items_are_as_popular_as_without_drift(tmp_path: Path, exponent: float) -> None:
    drift = Drift(categories=4, new_items=0)
    store = _written(tmp_path / "out", drift=drift, items=Zipf(exponent=exponent, high=4000))
    groups = np.bincount((store.columns["item_id"] - 1) // 4, minlength=1000)
    masses = (np.arange(1, 4001.0) ** -exponent).reshape(1000, 4).sum(axis=1)
    expected = masses / masses.sum() * groups.sum()
    assert np.abs(groups - expected)[:50].max() < 5 * np.sqrt(expected[:50]).max()
    # The exponent as one would measure it: the slope of popularity by rank.
    slope = np.polyfit(np.log(np.arange(2, 100)), np.log(groups[1:99]), 1)[0]
    assert slope == pytest.approx(-exponent, abs=0.1)


def test_drifting_data_do_not_depend_on_the_number_of_threads_but_on_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = {}
    for seed, count in ((0, 1), (0, 4), (1, 4)):
        monkeypatch.setattr("evenrank.preprocess.run.num_cores", lambda count=count: count)
        hashes[seed, count] = _written(
            tmp_path / f"{seed} {count}",
            seed=seed,
            drift=Drift(),
            num_users=40_000,
            lengths=Uniform(low=0, high=9),
        ).manifest.content_hash
    assert hashes[0, 1] == hashes[0, 4] != hashes[1, 4]


def test_mistakes_of_drift_name_the_value() -> None:
    for name, value, rule in (
        ("categories", 0, "1 and at most 100000000, got 0"),
        ("days", 0, "0.01 and at most 1000000.0, got 0"),
        ("share", 1.5, "0 and at most 1, got 1.5"),
        ("new_items", float("nan"), "0 and at most 0.9, got nan"),
    ):
        with pytest.raises(ConfigError, match=f"Drift: {name} must be at least {rule}"):
            Drift(**dict[str, Any]({name: value}))
    for items in (Uniform(), Zipf(high=None), Zipf(high=19)):
        with pytest.raises(ConfigError, match=r"drift needs Zipf-distributed items, 20 \(one per category\) to"):
            SyntheticConfig(items=items, drift=Drift())
    with pytest.raises(ConfigError, match="the names 'category' and 'category' differ at most by case"):
        SyntheticConfig(contextual={"category": Uniform()}, drift=Drift())
