from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.datasets import Manifest, open_store
from evenrank.datasets.distributions import Histogram, Uniform, Zipf
from evenrank.datasets.schema import user_hash
from evenrank.datasets.store import SequenceStore
from evenrank.preprocess import Drift, PreprocessConfig, SyntheticConfig, job, preprocess
from evenrank.preprocess.read import synthetic as synthetic_data
from evenrank.preprocess.read import text as text_files
from evenrank.preprocess.run import open_source


def _written(out: Path, *, seed: int = 0, **options: Any) -> SequenceStore:
    sizes: dict[str, Any] = {"num_users": 2000, "lengths": Uniform(low=0, high=300)}
    synthetic = SyntheticConfig(**sizes | options)
    preprocess(PreprocessConfig(dataset="synthetic", out=out, split="none", synthetic=synthetic, seed=seed))
    return open_store(out)


def test_every_feature_follows_its_distribution(tmp_path: Path) -> None:
    store = _written(
        tmp_path / "out",
        num_users=400,
        lengths=Histogram.of(np.array([3, 3, 8])),
        items=Zipf(low=0, high=30, shift=1),
        actions=Uniform(low=2, high=3),
        contextual={"country": Uniform(low=0, high=3), "device": Zipf(high=5)},
    )
    values = {name: set(column.tolist()) for name, column in store.columns.items()} | {"length": {*store.lengths}}
    expected = {"length": {3, 8}, "item_id": {*range(31)}, "action": {2, 3}, "country": {0, 1, 2, 3}}
    assert {name: values[name] for name in expected} == expected
    assert values["device"] == {1, 2, 3, 4, 5}
    manifest = store.manifest
    assert list(manifest.contextual.items()) == [("country", "int64"), ("device", "int64")]
    assert manifest.vocabulary_sizes == {"user_id": 401, "item_id": 31, "action": 4, "country": 4, "device": 6}
    assert manifest.context_labels["country"] == (None, "country 1", "country 2", "country 3")
    assert "observations=3" in manifest.options["lengths"]


def test_without_drift_the_draws_are_those_of_one_generator_per_block_in_this_order(tmp_path: Path) -> None:
    store = _written(tmp_path / "out", seed=5)
    rng = np.random.default_rng((5, 1, 0))
    lengths = Uniform(low=0, high=300).sample(rng, 2000)
    rng.exponential(3_600_000, lengths.sum())
    rng.integers(0, 30 * 86_400_000, 2000)
    items = SyntheticConfig().items.sample(rng, lengths.sum())
    actions = rng.integers(0, 4, lengths.sum(), endpoint=True)
    ends = np.cumsum(lengths)
    for row, user in enumerate(store.columns["user_id"].tolist()):
        drawn = slice(ends[user - 1] - lengths[user - 1], ends[user - 1])
        of_row = slice(store.offsets[row], store.offsets[row + 1])
        assert store.columns["item_id"][of_row].tolist() == items[drawn].tolist()
        assert store.columns["action"][of_row].tolist() == actions[drawn].tolist()
    assert len(store) == np.count_nonzero(lengths)
    assert "category" not in store.columns


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
    assert 0.85 < (moved // 20 == items // 20).mean() < 1
    assert (moved // 20 <= items // 20).all()


def test_most_events_of_a_user_are_of_one_category_until_it_changes(tmp_path: Path) -> None:
    def follows(name: str, **drift: Any) -> float:
        """Return the fraction of events with the category of the event before, of the same user."""
        of_categories = Drift(categories=50, new_items=0, **drift)
        store = _written(tmp_path / name, num_users=800, drift=of_categories, items=Zipf(exponent=0, high=5000))
        is_later = np.ones(len(store.columns["item_id"]), dtype=bool)
        is_later[store.offsets[:-1]] = False
        return float((np.diff(store.columns["category"], prepend=0) == 0)[is_later].mean())

    # Both events are of the interest, or one of two others is the same by chance.
    assert follows("share", share=0.6, days=1e6) == pytest.approx(0.36 + 0.64 / 50, abs=0.015)
    # Gaps of an hour on average: an interest of a day lasts for 24 of them, and the next one is another with 49 of 50.
    assert follows("a day", share=1, days=1) == pytest.approx(1 - 1 / 25 * 49 / 50, abs=0.008)


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
    known = [len(np.unique(items[times // 86_400_000 < day])) for day in (6, 15, 24, 34)]
    assert known == pytest.approx([600, 750, 900, 1000], abs=45)


def test_drifting_data_do_not_depend_on_the_number_of_threads_but_on_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = {}
    sizes: dict[str, Any] = {"drift": Drift(), "num_users": 40_000, "lengths": Uniform(low=0, high=3)}
    for seed, count in ((0, 1), (0, 4), (1, 4)):
        monkeypatch.setattr("evenrank.preprocess.job.num_cores", lambda count=count: count)
        hashes[seed, count] = _written(tmp_path / f"{seed} {count}", seed=seed, **sizes).manifest.content_hash
    assert hashes[0, 1] == hashes[0, 4] != hashes[1, 4]


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


def _expand(folder: Path, expand: str, *, out: str = "out", **options: Any) -> tuple[Events, Manifest]:
    of_raw: dict[str, Any] = {"expand": expand, "raw_dir": folder / "raw", "split": "none", "allow_empty": True}
    manifest = preprocess(PreprocessConfig(dataset="synthetic", out=folder / out, **of_raw, **options))
    store = open_store(folder / out)
    names = ("item_id", "action", "timestamp_ms")
    columns = [np.repeat(store.columns["user_id"], store.lengths), *(store.columns[name] for name in names)]
    return np.stack(columns, axis=1) // [1, 1, 1, 1000], manifest


@pytest.mark.parametrize(("suffix", "rate"), [("", 1), (":.25", 0.25)])
def test_marginals_are_products_of_those_of_the_base_and_of_the_reduced_matrix(
    tmp_path: Path, suffix: str, rate: float
) -> None:
    base = _write_ratings(tmp_path / "raw")
    expanded, manifest = _expand(tmp_path, f"ml-20m:3x4{suffix}", ids="keep")
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
    expanded, manifest = _expand(tmp_path, f"ml-20m:{to_users}x{to_items}" + f":{rate}" * (rate < 1))
    assert manifest.options["expected_events"] == pytest.approx(chances.sum() * len(base) * rate, 1e-4, 1)
    # Unlike the ids of draws, those of copies are numbered, because those of MovieLens have gaps.
    assert manifest.vocabulary_sizes["item_id"] == len(np.unique(expanded[:, 1])) + 1


def test_the_expansion_depends_on_the_seed_and_not_on_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = _write_ratings(tmp_path / "raw", num_users=4, num_items=5)  # of which there are more copies
    first, manifest = _expand(tmp_path, "ml-20m:7x9", seed=1)
    other, _ = _expand(tmp_path, "ml-20m:7x9", seed=2)
    assert not np.array_equal(first, other)
    expected = manifest.options["expected_events"]
    assert abs(len(first) - expected) < 5 * np.sqrt(expected)
    monkeypatch.setattr(synthetic_data, "_EVENTS_AT_ONCE", 50)
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 40)
    monkeypatch.setattr(job, "EVENTS_PER_BUCKET", 30)
    _, in_pieces = _expand(tmp_path, "ml-20m:7x9", seed=1)
    assert in_pieces.content_hash == manifest.content_hash
    options: dict[str, Any] = {"expand": "ml-20m:7x9", "raw_dir": tmp_path / "raw", "out": tmp_path / "out"}
    config = PreprocessConfig(dataset="synthetic", **options)
    (part,) = open_source(config, rules={"user_id": "keep", "item_id": "keep"}).parts
    columns = {name: base[:, index] for index, name in enumerate(("user_id", "item_id", "action", "timestamp_ms"))}
    assert 0 < len(next(iter(part.expand(columns)))["user_id"]) <= 2 * 7 * 9  # at most the copies of two events


def test_copies_of_users_have_their_features(tmp_path: Path) -> None:
    (tmp_path / "raw/ml-1m").mkdir(parents=True)
    ratings = [f"{user}::{item}::{1 + user * item % 5}::{item}" for user in (1, 2, 3) for item in range(1, 30)]
    (tmp_path / "raw/ml-1m/ratings.dat").write_text("\n".join([*ratings, ""]))
    users = ["1::F::1::10::48067", "2::M::56::16::70072", "3::M::25::15::55117"]
    (tmp_path / "raw/ml-1m/users.dat").write_text("\n".join([*users, ""]))
    _, manifest = _expand(tmp_path, "ml-1m:2x3", ids="keep")
    store = open_store(tmp_path / "out")
    labels = manifest.context_labels["zip_code"]
    pairs = zip(store.columns["user_id"].tolist(), store.columns["zip_code"].tolist(), strict=True)
    zip_codes = {user: labels[code] for user, code in pairs}
    known = {copy: line[-5:] for user, line in enumerate(users, 1) for copy in (2 * user, 2 * user + 1)}
    assert len(zip_codes) >= 3
    assert zip_codes.items() <= known.items()
