from pathlib import Path

import item_codes
import numpy as np
import pytest

from evenrank.datasets import open_store


def write_log(folder: Path, last: int) -> Path:
    """Write a log of 30 users whose last events are of an item."""
    rng = np.random.default_rng(0)
    rows = [f"{event // 20},{rng.integers(100)},1,{1_500_000_000 + event}" for event in range(600)]
    rows[19::20] = [f"{user},{last},1,{1_500_000_019 + 20 * user}" for user in range(30)]
    (folder / "ml-20m").mkdir(parents=True)
    (folder / "ml-20m" / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "\n".join(rows))
    return folder


def test_vectors_are_of_training_events_and_tables_differ_in_their_codes_alone(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    first, second = (
        item_codes.make_dataset(write_log(tmp_path / str(last), last), tmp_path / str(last)) for last in (3, 4)
    )
    products = []
    for folder in (first.parent, second.parent):
        order = np.argsort(np.load(folder / "vectors.ids.npy"))  # ids are in the order of all events
        vectors = np.load(folder / "vectors.npy")[order]
        products.append(vectors @ vectors.T)  # the same whatever the signs of singular vectors are
    assert np.allclose(products[0], products[1], atol=1e-3)
    assert 0.05 < np.abs(np.triu(products[0], 1)).mean() < 0.5
    last = [open_store(data, "eval").columns["item_id"][-1] for data in (first, second)]
    assert last[0] != last[1]
    tables = dict(item_codes.code_tables(first, tmp_path, seed=0))
    assert [*tables] == ["residual-kmeans", "balanced", "popularity", "random"]
    has_code = tables["random"].codes[:, 0] >= 0
    for table in tables.values():
        assert table.codebook_sizes == (32, 32, 32)
        assert np.array_equal(table.codes[:, 0] >= 0, has_code)
        assert len(np.unique(table.codes[has_code], axis=0)) == has_code.sum()
    events = np.bincount(open_store(first, "train").columns["item_id"], minlength=len(has_code))
    assert np.array_equal(tables["popularity"].codes[events.argmax()], [0, 0, 0])
    assert not np.array_equal(tables["popularity"].codes, tables["random"].codes)
