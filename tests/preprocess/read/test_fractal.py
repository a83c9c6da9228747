from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.datasets import Manifest, open_store
from evenrank.preprocess import PreprocessConfig, job, preprocess
from evenrank.preprocess.read import fractal
from evenrank.preprocess.read import text as text_files
from evenrank.preprocess.run import open_source

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
    monkeypatch.setattr(fractal, "_EVENTS_AT_ONCE", 50)
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 700)
    monkeypatch.setattr(job, "EVENTS_PER_BUCKET", 300)
    _, in_pieces = _expand(tmp_path / "raw", tmp_path / "c", "ml-20m:3x4", seed=1)
    assert in_pieces.content_hash == manifest.content_hash


def test_events_are_drawn_in_pieces_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = _write_ratings(tmp_path / "raw")
    monkeypatch.setattr(fractal, "_EVENTS_AT_ONCE", 200)
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
