from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.datasets import open_store
from evenrank.datasets.distributions import Histogram, Uniform, Zipf
from evenrank.datasets.schema import user_hash
from evenrank.datasets.store import SequenceStore
from evenrank.preprocess import Drift, PreprocessConfig, SyntheticConfig, job, preprocess
from evenrank.preprocess.read import synthetic as synthetic_data
from evenrank.preprocess.read import text as text_files
from evenrank.preprocess.run import open_source

DAY = 86_400_000


def _drawn(out: Path, *, seed: int = 0, **options: Any) -> SequenceStore:
    given: dict[str, Any] = {"num_users": 2000, "lengths": Uniform(low=0, high=300), **options}
    preprocess(
        PreprocessConfig(dataset="synthetic", out=out, split="none", synthetic=SyntheticConfig(**given), seed=seed)
    )
    return open_store(out)


def test_every_feature_follows_its_distribution(tmp_path: Path) -> None:
    store = _drawn(
        tmp_path / "out",
        num_users=400,
        lengths=Histogram.of(np.array([3, 3, 8])),
        items=Zipf(low=0, high=30, shift=1),
        actions=Uniform(low=2, high=3),
        contextual={"country": Uniform(low=0, high=3), "device": Zipf(high=5)},
    )
    values = {name: {*column.tolist()} for name, column in store.columns.items()} | {"length": {*store.lengths}}
    of_users = {"country": {0, 1, 2, 3}, "device": {1, 2, 3, 4, 5}}
    expected = {"length": {3, 8}, "item_id": {*range(31)}, "action": {2, 3}, **of_users}
    assert {name: values[name] for name in expected} == expected
    manifest = store.manifest
    assert list(manifest.contextual.items()) == [("country", "int64"), ("device", "int64")]
    assert manifest.vocabulary_sizes == {"user_id": 401, "item_id": 31, "action": 4, "country": 4, "device": 6}
    assert manifest.context_labels["country"] == (None, "country 1", "country 2", "country 3")
    assert "observations=3" in manifest.options["lengths"]


def test_without_drift_the_draws_are_those_of_one_generator_per_block_in_this_order(tmp_path: Path) -> None:
    store, rng = _drawn(tmp_path / "out", seed=5), np.random.default_rng((5, 1, 0))
    lengths = Uniform(low=0, high=300).sample(rng, 2000)
    rng.exponential(3_600_000, lengths.sum())
    rng.integers(0, 30 * DAY, 2000)
    drawn = {"item_id": SyntheticConfig().items.sample(rng, lengths.sum())}
    drawn["action"] = rng.integers(0, 4, lengths.sum(), endpoint=True)
    users = store.columns["user_id"]
    assert store.lengths.tolist() == lengths[users - 1].tolist()
    for name, values in drawn.items():
        of_users = np.split(values, np.cumsum(lengths)[:-1])
        assert store.columns[name].tolist() == np.concatenate([of_users[user - 1] for user in users]).tolist()
    assert len(store) == np.count_nonzero(lengths)
    assert "category" not in store.columns


def test_drift_changes_the_items_of_events_and_nothing_else(tmp_path: Path) -> None:
    plain, drifting = _drawn(tmp_path / "plain"), _drawn(tmp_path / "drift", drift=Drift())
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
        store = _drawn(tmp_path / name, num_users=800, drift=of_categories, items=Zipf(exponent=0, high=5000))
        is_same = np.diff(store.columns["category"], prepend=0) == 0
        return float(np.delete(is_same, store.offsets[:-1]).mean())

    # Both events are of the interest, or one of two others is the same by chance.
    assert follows("share", share=0.6, days=1e6) == pytest.approx(0.36 + 0.64 / 50, abs=0.015)
    # Gaps of an hour on average: an interest of a day lasts for 24 of them, and the next one is another with 49 of 50.
    assert follows("a day", share=1, days=1) == pytest.approx(1 - 1 / 25 * 49 / 50, abs=0.008)


def test_items_appear_during_the_first_30_days_and_have_no_event_before(tmp_path: Path) -> None:
    store = _drawn(tmp_path / "out", drift=Drift(new_items=0.5, share=0), items=Zipf(exponent=0, high=1000))
    items, times = store.columns["item_id"], store.columns["timestamp_ms"] - 1_600_000_000_000
    firsts = np.full(1001, 2**62)
    np.minimum.at(firsts, items, times)
    born = 30 * DAY * (1 - user_hash(np.arange(1000), salt=2) * 2.0**-64 / 0.5)  # with seed 0
    born[:20] = 0
    assert (firsts[1:] >= born).all()
    assert (firsts[1:] < np.maximum(born, 0) + 2 * DAY + 3 * DAY * (born < 3 * DAY)).all()
    # About half of the items are new, and evenly many on each day.
    known = [len(np.unique(items[times // DAY < day])) for day in (6, 15, 24, 34)]
    assert known == pytest.approx([600, 750, 900, 1000], abs=45)


def test_drifting_data_depend_on_the_seed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for seed, num_threads in ((0, 1), (0, 4), (1, 4)):
        monkeypatch.setattr(job, "num_cores", lambda count=num_threads: count)
        store = _drawn(tmp_path, seed=seed, drift=Drift(), num_users=40_000, lengths=Uniform(low=0, high=3))
        hashes.append(store.manifest.content_hash)
    assert hashes[0] == hashes[1] != hashes[2]


Events = NDArray[np.int64]  # [events, 4]: user, item, action, time
NAMES = ("user_id", "item_id", "action", "timestamp_ms")


def _write_ratings(raw: Path, num_users: int = 50, num_items: int = 70) -> Events:
    """Write a dataset in the layout of ml-1m, whose popularity is skewed, and return its events."""
    rng = np.random.default_rng(3)
    likes = rng.random((num_users, 1)) * rng.random((1, num_items)) ** 3
    users, items = np.nonzero(rng.random(likes.shape) < 0.1 + likes)
    events = np.stack([users + 1, items * 5, rng.integers(0, 5, len(users)), rng.permutation(len(users))], axis=1)
    (raw / "ml-1m").mkdir(parents=True)
    ratings = [f"{user}::{item}::{action + 1}::{time}\n" for user, item, action, time in events.tolist()]
    (raw / "ml-1m/ratings.dat").write_text("".join(ratings))
    (raw / "ml-1m/users.dat").write_text("".join(f"{user}::F::1::10::{user}\n" for user in range(1, num_users + 1)))
    return events


def _expand(folder: Path, expand: str, **options: Any) -> tuple[Events, SequenceStore]:
    of_raw: dict[str, Any] = {"expand": expand, "raw_dir": folder / "raw", "split": "none", "allow_empty": True}
    preprocess(PreprocessConfig(dataset="synthetic", out=folder / "out", **of_raw, **options))
    store = open_store(folder / "out")
    columns = [np.repeat(store.columns["user_id"], store.lengths), *(store.columns[name] for name in NAMES[1:])]
    return np.stack(columns, axis=1) // [1, 1, 1, 1000], store


@pytest.mark.parametrize(("suffix", "rate"), [("", 1), (":.25", 0.25)])
def test_marginals_are_products_of_those_of_the_base_and_of_the_reduced_matrix(
    tmp_path: Path, suffix: str, rate: float
) -> None:
    base = _write_ratings(tmp_path / "raw")
    expanded, store = _expand(tmp_path, f"ml-1m:3x4{suffix}", ids="keep")
    expected = store.manifest.options["expected_events"]
    assert abs(len(expanded) - expected) < 5 * np.sqrt(expected)
    # Each event is one of the base, and no cell has it twice.
    assert {*map(tuple, (expanded // [3, 4, 1, 1]).tolist())} <= {*map(tuple, base.tolist())}
    assert len(np.unique(expanded, axis=0)) == len(expanded)
    in_cells = np.zeros((3, 4))
    np.add.at(in_cells, (expanded[:, 0] % 3, expanded[:, 1] % 4), 1)
    chances = in_cells / len(base)
    assert chances.min() <= 0.001  # of the cell whose value was the least
    assert chances.max() == pytest.approx(rate, abs=5 * np.sqrt(rate * (1 - rate) / len(base)))
    for column, factor, per_copy in ((0, 3, chances.sum(1)), (1, 4, chances.sum(0))):
        of_base, of_expanded = Counter(base[:, column].tolist()), Counter(expanded[:, column].tolist())
        means = {id_ * factor + copy: n * per_copy[copy] for id_, n in of_base.items() for copy in range(factor)}
        assert of_expanded.keys() <= means.keys()
        assert len(of_expanded) > 0.8 * len(means) * rate
        assert all(abs(of_expanded[id_] - mean) <= 5 * np.sqrt(mean) + 1 for id_, mean in means.items())
    labels = np.array(store.manifest.context_labels["zip_code"])  # copies of users have their features
    assert (labels[store.columns["zip_code"]] == (store.columns["user_id"] // 3).astype(str)).all()


@pytest.mark.parametrize(
    ("num_users", "num_items", "to_users", "to_items", "rate"),
    [(9, 70, 3, 4, 1), (300, 400, 16, 32, 0.02)],  # the latter with singular values that hardly decrease
)
def test_the_reduced_matrix_is_that_of_the_paper(
    tmp_path: Path, num_users: int, num_items: int, to_users: int, to_items: int, rate: float
) -> None:
    base = _write_ratings(tmp_path / "raw", num_users, num_items)
    matrix = np.zeros((num_users, num_items))
    matrix[base[:, 0] - 1, base[:, 1] // 5] = base[:, 2] + 1
    left, scales, right = np.linalg.svd(matrix[:, matrix.any(0)], full_matrices=False)
    rank = min(to_users, to_items)

    def resize(vectors: NDArray[np.float64], size: int) -> NDArray[np.float64]:
        ends = [(group * len(vectors) // size, -(-(group + 1) * len(vectors) // size)) for group in range(size)]
        averaged = np.stack([vectors[first:end].mean(axis=0) for first, end in ends])
        values, vectors = np.linalg.eigh(averaged.T @ averaged)
        return averaged @ vectors @ np.diag(values**-0.5) @ vectors.T

    reduced = resize(left[:, :rank], to_users) @ np.diag(scales[:rank]) @ resize(right[:rank].T, to_items).T
    chances = (reduced - reduced.min()) / (reduced.max() - reduced.min())
    expanded, store = _expand(tmp_path, f"ml-1m:{to_users}x{to_items}" + f":{rate}" * (rate < 1))
    assert store.manifest.options["expected_events"] == pytest.approx(chances.sum() * len(base) * rate, 1e-4, 1)
    # Unlike the ids of draws, those of copies are numbered, because those of MovieLens have gaps.
    assert store.manifest.vocabulary_sizes["item_id"] == len(np.unique(expanded[:, 1])) + 1


def test_the_expansion_depends_on_the_seed_and_not_on_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = _write_ratings(tmp_path / "raw", 4, 5)  # of which there are more copies
    first, store = _expand(tmp_path, "ml-1m:7x9", seed=1)
    assert not np.array_equal(first, _expand(tmp_path, "ml-1m:7x9", seed=2)[0])
    for module, name, size in (
        (synthetic_data, "_EVENTS_AT_ONCE", 50),
        (text_files, "_BLOCK_BYTES", 40),
        (job, "EVENTS_PER_BUCKET", 30),
    ):
        monkeypatch.setattr(module, name, size)
    assert _expand(tmp_path, "ml-1m:7x9", seed=1)[1].manifest.content_hash == store.manifest.content_hash
    config = PreprocessConfig(dataset="synthetic", out="out", expand="ml-1m:7x9", raw_dir=tmp_path / "raw")
    (part,) = open_source(config, rules={"user_id": "keep", "item_id": "keep"}).parts
    pieces = part.expand({name: base[:, index] for index, name in enumerate(NAMES)})
    assert 0 < len(next(iter(pieces))["user_id"]) <= 2 * 7 * 9  # at most the copies of two events
