"""Negatives: their distribution, what they exclude, and that they depend on seed, epoch and sample alone."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import DataError, RankError
from evenrank.dataloader import (
    LoaderConfig,
    Negatives,
    Pools,
    StochasticLength,
    StreamConfig,
    build_loader,
    build_stream_loader,
)
from evenrank.dataloader.balance import BalanceConfig
from evenrank.dataloader.balance.ranks.agree import check_settings
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets.distributions import Lognormal, Zipf
from evenrank.datasets.store import SequenceStore
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.collate.stores import store_of_items

POPULAR = Negatives(count=5, by="popularity")
KEY_MAP = KeyMap(num_embeddings=603, world_size=2, mode="hash_roundrobin")


def _batch(data: Any, negatives: Negatives, *, first: int = 0, seed: int = 0, epoch: int = 0, **options: Any) -> Any:
    """Return one batch of the rows of a store or several, from one on, and two rows of padding."""
    stores: list[SequenceStore] = data if isinstance(data, list) else [data]
    collate = Collate.create(LoaderConfig(batch_size=1, negatives=negatives, **options), stores[0].manifest, stores)
    ids = np.arange(first, sum(map(len, stores)))
    groups = group_by_store([store.remapped(options.get("key_maps", {})) for store in stores], ids)
    (batch,) = collate(groups, ids, batch_size=len(ids) + 2, seed=seed, epoch=epoch)
    return batch


def _chi_square(drawn: Iterable[int], probabilities: dict[int, float]) -> float:
    """Return the statistic in standard deviations from its mean: with d degrees of freedom, (x - d) / sqrt(2 d)."""
    counts = Counter(drawn)
    assert counts.keys() <= probabilities.keys()
    total, degrees = counts.total(), len(probabilities) - 1
    statistic = sum((counts[item] - total * p) ** 2 / (total * p) for item, p in probabilities.items())
    return float((statistic - degrees) / np.sqrt(2 * degrees))


# Item i has i events; 0 and 31 have none. The rows of the samples that are drawn for are empty.
COUNTED = [[item] * item for item in range(1, 31)] + [[]] * 400


DRAWS: list[tuple[Any, str, Any]] = [
    ("uniform", "dense", np.r_[0, np.ones(31)]),
    ("uniform", "keep", np.r_[0, np.ones(30), 0]),
    ("popularity", "dense", np.r_[np.arange(31) ** 0.5, 0]),
    ("popularity", "keep", np.r_[np.arange(31) ** 0.5, 0]),
]


@pytest.mark.parametrize("key_maps", [{}, {"item_id": KeyMap(num_embeddings=40, world_size=3, mode="roundrobin")}])
@pytest.mark.parametrize(("by", "rule", "weights"), DRAWS)
def test_draws_have_the_distribution_of_which_log_q_is_the_logarithm(
    by: Any, rule: str, weights: Any, key_maps: dict[str, KeyMap]
) -> None:
    store = store_of_items(COUNTED, size=32, rule=rule)
    negatives = Negatives(count=50, by=by, alpha=0.5, exclude_own=False)
    batch = _batch(store, negatives, seed=3, epoch=2, key_maps=key_maps)
    rows = np.arange(32) if not key_maps else key_maps["item_id"](np.arange(32))
    p = weights / weights.sum()
    assert abs(_chi_square(batch.negatives.values().tolist(), {rows[i]: p[i] for i in np.flatnonzero(p)})) < 3
    expected = np.full(40, np.float32(-np.log(weights.sum())))  # of items that are never drawn: that of one event
    expected[rows[p > 0]] = np.log(p[p > 0]).astype(np.float32)
    negative, positive = (batch.log_q[key].values().numpy() for key in ("negative", "positive"))
    assert (negative == expected[batch.negatives.values()]).all()
    assert (positive == expected[rows[[item for row in COUNTED for item in row[1:]]]]).all()


def test_draws_of_a_sample_are_independent_of_its_other_draws_and_of_other_samples_and_epochs() -> None:
    store = store_of_items([[]] * 2000, size=5)
    drawn = [
        np.array(rows_of(_batch(store, Negatives(count=2), **at).negatives, "item_id")[:-2]).T
        for at in ({}, {"epoch": 1}, {"seed": 1})
    ]
    (first, second), (other_epoch, _), (other_seed, _) = drawn
    for other in (second, np.roll(first, 1), other_epoch, other_seed):
        pairs = (first * 5 + other).tolist()
        assert abs(_chi_square(pairs, {a * 5 + b: 1 / 16 for a in range(1, 5) for b in range(1, 5)})) < 3


def _write_hard(path: Path, lists: dict[int, list[int]]) -> Path:
    items, negatives = pa.array(lists, pa.int64()), pa.array(lists.values(), pa.list_(pa.int64()))
    pq.write_table(pa.table({"item_id": items, "negatives": negatives}), path)
    return path


SETTINGS = st.fixed_dictionaries(
    {
        "by": st.sampled_from(["uniform", "popularity"]),
        "num_hard": st.integers(0, 3),
        "exclude_own": st.booleans(),
    }
)
POOLS = Pools(values=(3, 5, 11), column="item_id", each=False)
DRAWN = StochasticLength(alpha=1.3)
SELECTED: list[dict[str, Any]] = [
    {},
    {"pools": POOLS},
    {"stochastic_length": DRAWN, "max_history_length": 9},
    {"pools": POOLS, "stochastic_length": DRAWN, "max_history_length": 9},
]


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(1, 19), max_size=60), min_size=1, max_size=6),
    SETTINGS,
    st.integers(0, 3),
    st.sampled_from(SELECTED),
)
def test_negatives_are_no_items_of_the_user_or_no_targets_and_equally_many(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[list[int]],
    options: dict[str, Any],
    num_candidates: int,
    selected: dict[str, Any],
) -> None:
    """Hard ones, of the last item that is shown, come last; they have the logarithm 0."""
    hard, num_hard = tmp_path_factory.getbasetemp() / "hard.parquet", options["num_hard"]
    lists = {item: [item, item % 19 + 1, (item + 5) % 19 + 1, item % 5 + 1] for item in range(1, 20)}
    if not hard.exists():
        _write_hard(hard, lists)
    rows = [row for row in rows if len(row) >= num_candidates] + [[1, 1, 1, 2]]
    stores = [store_of_items(part, size=20) for part in (rows[:1], rows[1:]) if part]
    negatives = Negatives(count=7, hard=hard if num_hard else None, **options)
    batch = _batch(stores, negatives, max_num_candidates=num_candidates, **selected)
    shown_rows, of_positives = rows_of(batch.features, "item_id"), rows_of(batch.log_q, "positive")
    drawable = {item for row in rows for item in row} if negatives.by == "popularity" else {*range(1, 20)}
    of_rows, log_q = rows_of(batch.negatives, "item_id"), rows_of(batch.log_q, "negative")
    assert of_rows[-2:] == log_q[-2:] == [[], []]
    for row, shown, drawn, q, positive in zip(rows, shown_rows, of_rows, log_q, of_positives, strict=False):
        assert len(drawn) == 7 + num_hard
        targets = shown[len(shown) - num_candidates :] if num_candidates else shown[1:]
        assert len(positive) == len(targets)
        kept = {*(row if negatives.exclude_own else targets)}
        allowed = [item for item in (lists[shown[-1]] if shown else []) if item not in kept]
        is_hard = [value == 0 for value in q]
        assert sum(is_hard) == min(num_hard, len(allowed))
        assert is_hard == sorted(is_hard)
        assert not Counter(np.array(drawn)[is_hard].tolist()) - Counter(allowed)
        others = {*np.array(drawn)[~np.array(is_hard)].tolist()}
        assert others <= drawable
        assert others.isdisjoint(row) or not negatives.exclude_own or not drawable - {*row}


def test_hard_negatives_are_consecutive_in_the_order_of_the_file_from_any_one_on(tmp_path: Path) -> None:
    negatives = Negatives(count=1, hard=_write_hard(tmp_path / "hard", {3: [5, 6, 7, 1], 9: [5, 6]}), num_hard=2)
    for key_maps in ({}, {"item_id": KEY_MAP}):
        key_of: Any = KEY_MAP.inverse if key_maps else np.array
        pairs = set()
        for epoch in range(20):
            batch = _batch(store_of_items([[1, 2, 3], [6, 1, 9]], size=600), negatives, epoch=epoch, key_maps=key_maps)
            first, second = (key_of(np.array(row)) for row in rows_of(batch.negatives, "item_id")[:2])
            pairs.add(tuple(sorted(first[1:].tolist())))
            assert second[2] == 5  # the user has 6
        assert pairs == {(5, 6), (6, 7), (5, 7)}  # never 1, which the user has


def test_a_long_history_and_one_rare_drawable_item_are_excluded_and_found() -> None:
    for size in (3000, 400_000):  # of the larger, no test of all its items for each draw would end
        own = [*range(2, size)]
        store = store_of_items([[], own, [1], own * 2, [1, *own]], size=size)
        for by in ("uniform", "popularity"):
            of_rows = rows_of(_batch(store, Negatives(count=20, by=by), first=1).negatives, "item_id")
            assert of_rows[0] == of_rows[2] == [1] * 20
            assert 0 not in of_rows[3]
        assert of_rows[1].count(1) == 0


def _samples(batches: Iterable[Any]) -> dict[int, Any]:
    """Return each sample's negatives and logarithms, and check that padding has none."""
    samples: dict[int, Any] = {}
    for batch in batches:
        rows = [rows_of(batch.negatives, "item_id"), *(rows_of(batch.log_q, key) for key in ("negative", "positive"))]
        assert all(row == [] for of_key in rows for row in of_key[batch.num_real :])
        samples |= dict(zip(ids_of(batch), zip(*rows, strict=True), strict=False))
    return samples


def _loader(path: Any, *, rank: int = 0, world_size: int = 1, balance: Any = None, **options: Any) -> Any:
    defaults = {"batch_size": 8, "max_num_candidates": 1, "negatives": POPULAR, "seed": 5}
    return build_loader(
        path, LoaderConfig(**{**defaults, **options}), rank=rank, world_size=world_size, balance=balance
    )


def _all(path: Any, world_size: int = 1, **options: Any) -> dict[int, Any]:
    loaders = [_loader(path, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    return {key: row for loader in loaders for key, row in _samples(loader).items()}


def test_a_sample_has_the_same_negatives_on_any_ranks_and_others_in_the_next_epoch(small_dataset: Path) -> None:
    loader = _loader(small_dataset)
    first, second = _samples(loader), _samples(loader)
    assert len(first) > 150
    assert first.keys() == second.keys()
    for others in (second, _all(small_dataset, seed=6)):
        assert sum(first[key][0] == others[key][0] for key in first) < 3
    assert _all(small_dataset, 3, num_workers=2, prefetch=3) == first
    assert _all(small_dataset, 2, balance=BalanceConfig(cost=COST, window=3)) == first
    iterator = iter(loader)
    done = [next(iterator) for _ in range(7)]
    resumed = _loader(small_dataset, batch_size=11, seed=9)
    resumed.load_state_dict(loader.state_dict(after=done[-1]))
    assert _samples(resumed) == _samples(iterator)
    again = loader.collate(done[3].sample_ids.numpy(), epoch=done[3].epoch)
    assert _samples([again]) == _samples(done[3:4])
    mapped = _all(small_dataset, key_maps={"item_id": KEY_MAP})
    assert mapped == {key: (KEY_MAP(np.array(items)).tolist(), *log_q) for key, (items, *log_q) in first.items()}
    # As evaluation needs them: the metrics of a model that is not trained in between are equal.
    held_out = _loader(small_dataset, split="eval", negatives=replace(POPULAR, fixed=True))
    assert _samples(held_out) == _samples(held_out) != {}


def test_streams_draw_the_same_negatives_with_popularity_from_the_vocabulary(tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
    from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

    lengths, items, data = Lognormal(mean=12, std=14, low=0, high=60), Zipf(exponent=1.05, high=500), tmp_path / "data"
    synthetic = SyntheticConfig(num_users=100, lengths=lengths, items=items)
    # Without an eval split, train has all events of the log.
    preprocess(PreprocessConfig(dataset="synthetic", out=data, ids="item=dense", synthetic=synthetic, split="user:0"))

    def stream(negatives: Negatives) -> Any:
        config = LoaderConfig(batch_size=8, max_num_candidates=1, negatives=negatives, seed=5)
        return build_stream_loader(data, config, StreamConfig(lanes=4, window_rows=20), rank=0, world_size=1)

    for negatives in (Negatives(count=5), POPULAR):
        assert _samples(stream(negatives)) == _all(data, negatives=negatives)
    (data / "vocabulary_item_id.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"vocabulary_item_id.parquet cannot be read as Parquet"):
        stream(POPULAR)


def test_ranks_compare_what_is_drawn_and_files_by_their_contents(small_dataset: Path, tmp_path: Path) -> None:
    here, there, other = (_write_hard(tmp_path / str(n), {3: [item]}) for n, item in enumerate((5, 5, 6)))

    def invariants(rank: int, path: Path, **options: Any) -> Any:
        negatives = Negatives(count=2, num_hard=1, hard=path, **options)
        return _loader(small_dataset, negatives=negatives, rank=rank, world_size=2).rank_invariants()

    check_settings([invariants(0, here), invariants(1, there)])
    for different in (invariants(1, other), invariants(1, here, exclude_own=False)):
        with pytest.raises(RankError, match=r"^negatives differs between ranks: "):
            check_settings([invariants(0, here), different])
