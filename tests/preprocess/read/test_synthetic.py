from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.datasets import Manifest, open_store
from evenrank.datasets.distributions import Histogram, Uniform, Zipf
from evenrank.datasets.schema import user_hash
from evenrank.datasets.store import SequenceStore
from evenrank.preprocess import Drift, PreprocessConfig, SyntheticConfig, job, preprocess
from evenrank.preprocess.read import synthetic as synthetic_data
from evenrank.preprocess.read import text as text_files
from evenrank.preprocess.run import open_source


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
        monkeypatch.setattr("evenrank.preprocess.job.num_cores", lambda count=count: count)
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


USERS, ITEMS = 3, 4
Events = NDArray[np.int64]  # [events, 4]: user, item, action, time


def _write_ratings(raw: Path, *, num_users: int = 50, num_items: int = 70) -> Events:
    """Write a dataset in the layout of ml-20m, whose popularity is skewed, and return its events."""
    rng = np.random.default_rng(3)
    likes = rng.random((num_users, 1)) * rng.random((1, num_items)) ** 3
    users, items = np.nonzero(rng.random(likes.shape) < 0.1 + likes)
    events = np.stack([users + 1, items * 5, rng.integers(0, 10, len(users)), rng.permutation(len(users))], axis=1)
    lines = [f"{user},{item},{(action + 1) / 2},{time}" for user, item, action, time in events.tolist()]
    (raw / "ml-20m").mkdir(parents=True)
    (raw / "ml-20m/ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *lines, ""]))
    return events


def _expand(raw: Path, out: Path, expand: str, **options: Any) -> tuple[Events, Manifest]:
    config = PreprocessConfig(
        dataset="synthetic", expand=expand, raw_dir=raw, out=out, split="none", allow_empty=True, **options
    )
    manifest = preprocess(config)
    store = open_store(out)
    names = ("item_id", "action", "timestamp_ms")
    columns = [np.repeat(store.columns["user_id"], store.lengths), *(store.columns[name] for name in names)]
    return np.stack(columns, axis=1) // [1, 1, 1, 1000], manifest


@pytest.mark.parametrize(("suffix", "rate"), [("", 1), (":.25", 0.25)])
def test_marginals_are_products_of_those_of_the_base_and_of_the_reduced_matrix(
    tmp_path: Path, suffix: str, rate: float
) -> None:
    base = _write_ratings(tmp_path / "raw")
    expanded, manifest = _expand(tmp_path / "raw", tmp_path / "out", f"ml-20m:3x4{suffix}", ids="keep")
    expected = manifest.options["expected_events"]
    assert abs(len(expanded) - expected) < 5 * np.sqrt(expected)
    # Each event is one of the base, and no cell has it twice.
    origins = expanded // [USERS, ITEMS, 1, 1]
    assert set(map(tuple, origins.tolist())) <= set(map(tuple, base.tolist()))
    assert len(np.unique(expanded, axis=0)) == len(expanded)
    in_cells = np.zeros((USERS, ITEMS))
    np.add.at(in_cells, (expanded[:, 0] % USERS, expanded[:, 1] % ITEMS), 1)
    chances = in_cells / len(base)
    assert chances.min() <= 0.001  # of the cell whose value was the least
    assert chances.max() == pytest.approx(rate, abs=5 * np.sqrt(rate * (1 - rate) / len(base)))
    for column, factor, per_copy in ((0, USERS, chances.sum(1)), (1, ITEMS, chances.sum(0))):
        of_base, of_expanded = Counter(base[:, column].tolist()), Counter(expanded[:, column].tolist())
        assert set(of_expanded) <= {id_ * factor + copy for id_ in of_base for copy in range(factor)}
        assert len(of_expanded) > 0.8 * len(of_base) * factor * rate
        for id_, count in of_base.items():
            for copy in range(factor):
                mean = count * per_copy[copy]
                assert abs(of_expanded[id_ * factor + copy] - mean) <= 5 * np.sqrt(mean) + 1


@pytest.mark.parametrize(
    ("num_users", "num_items", "to_users", "to_items", "rate"),
    [(9, 70, USERS, ITEMS, 1), (300, 400, 16, 32, 0.02)],  # the latter with singular values that hardly decrease
)
def test_the_reduced_matrix_is_that_of_the_paper(
    tmp_path: Path, num_users: int, num_items: int, to_users: int, to_items: int, rate: float
) -> None:
    base = _write_ratings(tmp_path / "raw", num_users=num_users, num_items=num_items)
    matrix = np.zeros((num_users, num_items))
    matrix[base[:, 0] - 1, base[:, 1] // 5] = base[:, 2] + 1
    matrix = matrix[:, matrix.any(0)]
    rank = min(to_users, to_items)
    left, scales, right = np.linalg.svd(matrix, full_matrices=False)

    def resize(vectors: NDArray[np.float64], size: int) -> NDArray[np.float64]:
        means = []
        for group in range(size):
            first, end = group * len(vectors) // size, -(-(group + 1) * len(vectors) // size)
            means.append(vectors[first:end].mean(axis=0))
        averaged = np.stack(means)
        values, vectors = np.linalg.eigh(averaged.T @ averaged)
        return averaged @ vectors @ np.diag(values**-0.5) @ vectors.T

    reduced = resize(left[:, :rank], to_users) @ np.diag(scales[:rank]) @ resize(right[:rank].T, to_items).T
    chances = (reduced - reduced.min()) / (reduced.max() - reduced.min())
    expanded, manifest = _expand(
        tmp_path / "raw", tmp_path / "out", f"ml-20m:{to_users}x{to_items}" + f":{rate}" * (rate < 1)
    )
    assert manifest.options["expected_events"] == pytest.approx(chances.sum() * len(base) * rate, 1e-4, 1)
    # Unlike the ids of draws, those of copies are numbered, because those of MovieLens have gaps.
    assert manifest.vocabulary_sizes["item_id"] == len(np.unique(expanded[:, 1])) + 1


def test_more_copies_than_there_are_users_and_items(tmp_path: Path) -> None:
    _write_ratings(tmp_path / "raw", num_users=4, num_items=5)
    expanded, manifest = _expand(tmp_path / "raw", tmp_path / "out", "ml-20m:7x9")
    expected = manifest.options["expected_events"]
    assert abs(len(expanded) - expected) < 5 * np.sqrt(expected)


def test_the_expansion_depends_on_the_seed_and_not_on_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_ratings(tmp_path / "raw")
    first, manifest = _expand(tmp_path / "raw", tmp_path / "a", "ml-20m:3x4", seed=1)
    other, _ = _expand(tmp_path / "raw", tmp_path / "b", "ml-20m:3x4", seed=2)
    assert not np.array_equal(first, other)
    monkeypatch.setattr(synthetic_data, "_EVENTS_AT_ONCE", 50)
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 700)
    monkeypatch.setattr(job, "EVENTS_PER_BUCKET", 300)
    _, in_pieces = _expand(tmp_path / "raw", tmp_path / "c", "ml-20m:3x4", seed=1)
    assert in_pieces.content_hash == manifest.content_hash


def test_events_are_drawn_in_pieces_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = _write_ratings(tmp_path / "raw")
    monkeypatch.setattr(synthetic_data, "_EVENTS_AT_ONCE", 200)
    config = PreprocessConfig(
        dataset="synthetic", expand="ml-20m:16x32", raw_dir=tmp_path / "raw", out=tmp_path / "out"
    )
    (part,) = open_source(config, rules={"user_id": "keep", "item_id": "keep"}).parts
    columns = {name: base[:, index] for index, name in enumerate(("user_id", "item_id", "action", "timestamp_ms"))}
    pieces = iter(part.expand(columns))
    assert 0 < len(next(pieces)["user_id"]) <= 600  # at most the copies of two events
    assert part.num_events == int(part.name.split("about ")[1].split(" ")[0].replace(",", ""))


def test_copies_of_users_have_their_features(tmp_path: Path) -> None:
    (tmp_path / "raw/ml-1m").mkdir(parents=True)
    ratings = [f"{user}::{item}::{1 + user * item % 5}::{item}" for user in (1, 2, 3) for item in range(1, 30)]
    (tmp_path / "raw/ml-1m/ratings.dat").write_text("\n".join([*ratings, ""]))
    users = ["1::F::1::10::48067", "2::M::56::16::70072", "3::M::25::15::55117"]
    (tmp_path / "raw/ml-1m/users.dat").write_text("\n".join([*users, ""]))
    config = PreprocessConfig(
        dataset="synthetic",
        expand="ml-1m:2x3",
        raw_dir=tmp_path / "raw",
        out=tmp_path / "out",
        split="none",
        ids="keep",
        allow_empty=True,
    )
    manifest = preprocess(config)
    store = open_store(tmp_path / "out")
    labels = manifest.context_labels["zip_code"]
    zip_codes = {
        int(user): labels[code] for user, code in zip(store.columns["user_id"], store.columns["zip_code"], strict=True)
    }
    known = {copy: line[-5:] for user, line in enumerate(users, 1) for copy in (2 * user, 2 * user + 1)}
    assert len(zip_codes) >= 3
    assert zip_codes.items() <= known.items()


@pytest.mark.parametrize("text", ["ml-20m", "ml-20m:1x2", "ml-20m:2x2:0.0", "ml-20m:2x2:2", "kuairand-1k:2x2", ":2x2"])
def test_a_mistake_shows_how_to_write_an_expansion(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^'{text}' is no expansion of MovieLens; write it like ml-20m:16x32"):
        PreprocessConfig(dataset="synthetic", expand=text, out=tmp_path)
