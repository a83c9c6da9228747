"""Negatives of loaders: their distribution, what they exclude, and that they depend on the sample and epoch alone."""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError, DataError, RankError
from evenrank.dataloader import (
    LoaderConfig,
    Mixture,
    Negatives,
    RandomBatches,
    SequenceBatch,
    StreamConfig,
    build_loader,
    build_stream_loader,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.ranks.agree import check_settings
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.dataloader.collate.negatives import NegativeSampler
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import open_store
from evenrank.datasets.distributions import Lognormal, Zipf
from evenrank.datasets.schema import IdSummary
from evenrank.datasets.store import SequenceStore
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess
from tests.conftest import make_small_dataset
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.collate.stores import STORE
from tests.ranks import RankPool

DENSE = IdSummary(rule="dense", kind="int64")
POPULAR = Negatives(count=5, by="popularity")
KEY_MAP = KeyMap(num_embeddings=603, world_size=2, mode="hash_roundrobin")


def _store(rows: list[list[int]], *, size: int, rule: str = "dense") -> SequenceStore:
    items = np.array([item for row in rows for item in row], dtype=np.int64)
    ids = {"item_id": dataclasses.replace(DENSE, rule=rule)}
    return dataclasses.replace(
        STORE,
        manifest=dataclasses.replace(STORE.manifest, vocabulary_sizes={"item_id": size}, ids=ids),
        offsets=np.cumsum([0, *map(len, rows)]),
        columns={
            **{name: np.zeros(len(rows), dtype=np.int64) for name in ("user_id", "sex", "age")},
            "item_id": items,
            "action": (items * 0).astype(np.int32),
            "timestamp_ms": items * 0,
        },
    )


def _batch(
    store: SequenceStore, negatives: Negatives, *, seed: int = 0, epoch: int = 0, first: int = 0, **options: Any
) -> Any:
    """Return one batch of all rows from `first` on, and two rows of padding."""
    collate = Collate.create(LoaderConfig(batch_size=1, negatives=negatives, **options), store.manifest, [store])
    ids = np.arange(first, len(store))
    groups = group_by_store([store.remapped(options.get("key_maps", {}))], ids)
    (batch,) = collate(groups, ids, batch_size=len(ids) + 2, seed=seed, epoch=epoch)
    return batch


def _chi_square(drawn: Iterable[int], probabilities: dict[int, float]) -> float:
    """Return the statistic in standard deviations from its mean: with d degrees of freedom, (x - d) / sqrt(2 d)."""
    counts = Counter(drawn)
    assert counts.keys() <= probabilities.keys()
    total = counts.total()
    statistic = sum((counts[item] - total * p) ** 2 / (total * p) for item, p in probabilities.items())
    degrees = len(probabilities) - 1
    return float((statistic - degrees) / np.sqrt(2 * degrees))


# Item i has i events; 0 and 31 have none. The rows of the samples that are drawn for are empty.
COUNTED = [[item] * item for item in range(1, 31)] + [[]] * 400


@pytest.mark.parametrize("key_maps", [{}, {"item_id": KeyMap(num_embeddings=40, world_size=3, mode="roundrobin")}])
@pytest.mark.parametrize(
    ("by", "rule", "weights"),
    [
        ("uniform", "dense", np.r_[0, np.ones(31)]),
        ("uniform", "keep", np.r_[0, np.ones(30), 0]),
        ("popularity", "dense", np.r_[np.arange(31) ** 0.5, 0]),
        ("popularity", "keep", np.r_[np.arange(31) ** 0.5, 0]),
    ],
)
def test_draws_have_the_distribution_of_which_log_q_is_the_logarithm(
    by: Any, rule: str, weights: Any, key_maps: dict[str, KeyMap]
) -> None:
    store = _store(COUNTED, size=32, rule=rule)
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
    store = _store([[]] * 2000, size=5)
    drawn = [
        np.array(rows_of(_batch(store, Negatives(count=2), **at).negatives, "item_id")[:-2]).T
        for at in ({}, {"epoch": 1}, {"seed": 1})
    ]
    (first, second), (other_epoch, _), (other_seed, _) = drawn
    for other in (second, np.roll(first, 1), other_epoch, other_seed):
        pairs = (first * 5 + other).tolist()
        assert abs(_chi_square(pairs, {a * 5 + b: 1 / 16 for a in range(1, 5) for b in range(1, 5)})) < 3


@given(
    rows=st.lists(st.lists(st.integers(1, 19), max_size=60), min_size=1, max_size=6),
    by=st.sampled_from(["uniform", "popularity"]),
    num_hard=st.integers(0, 3),
)
def test_negatives_are_none_of_the_users_items_and_equally_many(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], by: Any, num_hard: int
) -> None:
    hard = tmp_path_factory.getbasetemp() / "hard.parquet"
    _write_hard(hard, {item: [item % 19 + 1, (item + 5) % 19 + 1, item] for item in range(1, 20)})
    store = _store([*rows, [1, 1, 1, 2]], size=20)
    batch = _batch(store, Negatives(count=7, by=by, hard=hard if num_hard else None, num_hard=num_hard))
    drawable = {item for row in [*rows, [1, 2]] for item in row} if by == "popularity" else {*range(1, 20)}
    of_rows = rows_of(batch.negatives, "item_id")
    assert of_rows[-2:] == rows_of(batch.log_q, "negative")[-2:] == [[], []]
    for own, drawn in zip([*rows, [1, 1, 1, 2]], of_rows, strict=False):
        assert len(drawn) == 7 + num_hard
        if drawable - {*own}:
            assert {*drawn}.isdisjoint(own)
        else:
            assert {*drawn[:7]} <= drawable


@pytest.mark.parametrize("size", [3000, 400_000])  # of the larger, no test of all its items for each draw would end
def test_a_long_history_and_one_rare_drawable_item_are_excluded_and_found(size: int) -> None:
    own = [*range(2, size)]
    store = _store([own, [1], own * 2, [1, *own]], size=size)
    for by in ("uniform", "popularity"):
        of_rows = rows_of(_batch(store, Negatives(count=20, by=by)).negatives, "item_id")
        assert of_rows[0] == of_rows[2] == [1] * 20
        assert 0 not in of_rows[3]
        assert rows_of(_batch(store, Negatives(count=20, by=by), first=2).negatives, "item_id")[:2] == of_rows[2:4]
    assert of_rows[1].count(1) == 0


def _write_hard(path: Path, lists: dict[int, list[int]]) -> Path:
    table = pa.table(
        {"item_id": pa.array(lists, pa.int64()), "negatives": pa.array(lists.values(), pa.list_(pa.int64()))}
    )
    pq.write_table(table, path)
    return path


@pytest.mark.parametrize("key_maps", [{}, {"item_id": KEY_MAP}])
def test_hard_negatives_are_of_the_last_item_and_come_last(tmp_path: Path, key_maps: dict[str, KeyMap]) -> None:
    hard = _write_hard(tmp_path / "hard.parquet", {3: [5, 6, 7, 1], 4: [8], 9: [5, 6]})
    store = _store([[1, 2, 3], [3, 4], [4, 2], [], [6, 1, 9]], size=600)
    negatives = Negatives(count=2, hard=hard, num_hard=2)
    seen = set()
    for epoch in range(20):
        batch = _batch(store, negatives, epoch=epoch, key_maps=key_maps)
        values, log_q = batch.negatives, rows_of(batch.log_q, "negative")
        key_of = KEY_MAP.inverse if key_maps else np.array
        of_rows = [key_of(np.array(row, dtype=np.int64)).tolist() for row in rows_of(values, "item_id")]
        assert {*of_rows[0][2:]} < {5, 6, 7}  # not 1, which the user has
        assert (of_rows[1][3], of_rows[4][3]) == (8, 5)
        assert [[value == 0 for value in row] for row in log_q[:5]] == [
            [False, False, True, True],
            [False, False, False, True],
            [False] * 4,  # an item without hard negatives, and a user without items
            [False] * 4,
            [False, False, False, True],
        ]
        seen.add(tuple(of_rows[0][2:]))
    assert len(seen) == 3  # consecutive ones in the file's order, from any on


@pytest.mark.parametrize("max_num_candidates", [0, 1, 3])
def test_a_target_is_never_its_own_hard_negative(tmp_path: Path, max_num_candidates: int) -> None:
    """A file of nearest neighbors lists each item itself; the user's items before the targets may be drawn."""
    hard = _write_hard(tmp_path / "hard.parquet", {item: list(range(1, 9)) for item in range(1, 9)})
    store = _store([[1, 2, 3, 4, 5], [8, 7, 6]], size=9)
    negatives = Negatives(count=1, exclude_own=False, hard=hard, num_hard=8)
    batch = _batch(store, negatives, max_num_candidates=max_num_candidates)
    for items, drawn, log_q in zip(
        rows_of(batch.features, "item_id"),
        rows_of(batch.negatives, "item_id"),
        rows_of(batch.log_q, "negative"),
        strict=True,
    ):
        is_target = {*items[len(items) - max_num_candidates :]} if max_num_candidates else {*items[1:]}
        assert {item for item, q in zip(drawn, log_q, strict=True) if q == 0} == {*range(1, 9)} - is_target or not items


def _samples(batches: Iterable[SequenceBatch]) -> dict[int, Any]:
    """Return each sample's negatives and logarithms, and check that padding has none."""
    samples: dict[int, Any] = {}
    for batch in batches:
        assert batch.negatives is not None
        rows = [rows_of(batch.negatives, "item_id"), *(rows_of(batch.log_q, key) for key in ("negative", "positive"))]
        assert all(row == [] for of_key in rows for row in of_key[batch.num_real :])
        samples |= dict(zip(ids_of(batch), zip(*rows, strict=True), strict=False))
    return samples


def _config(**options: Any) -> LoaderConfig:
    settings: dict[str, Any] = {"batch_size": 8, "max_num_candidates": 1, "negatives": POPULAR, "seed": 5}
    return LoaderConfig(**settings | options)


def _all(path: Any, world_size: int, **options: Any) -> dict[int, Any]:
    balance = options.pop("balance", None)
    loaders = [
        build_loader(path, _config(**options), rank=rank, world_size=world_size, balance=balance)
        for rank in range(world_size)
    ]
    return {key: row for loader in loaders for key, row in _samples(loader).items()}


def test_a_sample_has_the_same_negatives_on_any_number_of_ranks_and_others_in_the_next_epoch(
    small_dataset: Path,
) -> None:
    loader = build_loader(small_dataset, _config(), rank=0, world_size=1)
    first, second = _samples(loader), _samples(loader)
    assert len(first) > 150
    assert first.keys() == second.keys()
    assert sum(first[key][0] == second[key][0] for key in first) < 3
    assert _all(small_dataset, 2, batch_size=5) == _all(small_dataset, 3, num_workers=2, prefetch=3) == first
    for balance in (BalanceConfig(cost=COST), BalanceConfig(cost=COST, window=3)):
        assert _all(small_dataset, 2, balance=balance) == first
    other_seed = _all(small_dataset, 1, seed=6)
    assert sum(first[key][0] == other_seed[key][0] for key in first) < 3

    for stop in (1, 7, 20):
        iterator = iter(loader)
        done = [next(iterator) for _ in range(stop)]
        resumed = build_loader(small_dataset, _config(batch_size=11, seed=9), rank=0, world_size=1)
        resumed.load_state_dict(loader.state_dict(after=done[-1]))
        assert _samples(done) | _samples(resumed) == _samples(done) | _samples(iterator)
    batch = next(iter(loader))
    again = loader.collate(batch.sample_ids.numpy(), epoch=batch.epoch)
    assert _samples([again]) == _samples([batch])


def test_negatives_are_the_same_in_every_epoch_if_they_are_fixed_or_it_is_begun_again(small_dataset: Path) -> None:
    """As evaluation needs them: the metrics of a model that is not trained in between are equal."""
    config = _config(split="eval", negatives=Negatives(count=8, by="popularity", fixed=True))
    loader = build_loader(small_dataset, config, rank=0, world_size=1)
    first, again = _samples(loader), _samples(loader)
    assert (loader.epoch, first) == (2, again)
    anew = build_loader(small_dataset, _config(split="eval", negatives=POPULAR), rank=0, world_size=1)
    first, again = _samples(anew), _samples(anew)
    assert all(first[sample] != again[sample] for sample in first)
    anew.begin_at(0)
    assert _samples(anew) == first


def _balanced(rank: int, world_size: int, path: Path) -> tuple[dict[int, Any], list[int]]:
    loader = build_loader(path, _config(), rank=rank, world_size=world_size)
    own = [key for batch in build_loader(path, _config(), rank=rank, world_size=world_size) for key in ids_of(batch)]
    with Balancer(loader, BalanceConfig(cost=COST)) as balancer:
        return _samples(balancer), own


def test_negatives_are_exchanged_with_their_samples(ranks: RankPool, small_dataset: Path) -> None:
    (first, own), (second, _) = ranks.run(2, _balanced, small_dataset)
    assert {*first} != {*own}
    assert first | second == _all(small_dataset, 1)


@pytest.mark.parametrize("negatives", [Negatives(count=5), POPULAR])
def test_rows_of_a_table_are_the_mapped_negatives(small_dataset: Path, negatives: Negatives) -> None:
    plain = _all(small_dataset, 1, negatives=negatives)
    mapped = _all(small_dataset, 1, negatives=negatives, key_maps={"item_id": KEY_MAP})
    for key, (items, *log_q) in plain.items():
        assert mapped[key] == (KEY_MAP(np.array(items)).tolist(), *log_q)


@pytest.fixture(scope="module")
def dense_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset with a vocabulary of items."""
    out, lengths = tmp_path_factory.mktemp("dense") / "data", Lognormal(mean=12, std=14, low=0, high=60)
    synthetic = SyntheticConfig(num_users=300, lengths=lengths, items=Zipf(exponent=1.05, high=500))
    preprocess(PreprocessConfig(dataset="synthetic", out=out, ids="item=dense", synthetic=synthetic, split="user:0"))
    return out


def test_streams_draw_the_same_negatives_with_popularity_from_the_vocabulary(dense_dataset: Path) -> None:
    for negatives in (Negatives(count=5), POPULAR):  # without an eval split, train has all events of the log
        stream = build_stream_loader(
            dense_dataset,
            _config(negatives=negatives),
            StreamConfig(lanes=4, window_rows=20),
            rank=0,
            world_size=1,
        )
        assert _samples(stream) == _all(dense_dataset, 1, negatives=negatives)
    (dense_dataset / "vocabulary_item_id.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"vocabulary_item_id.parquet cannot be read as Parquet"):
        build_stream_loader(dense_dataset, _config(), rank=0, world_size=1)


def test_streams_of_kept_ids_do_not_guess_which_items_there_are(small_dataset: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rule 'keep', whose events a stream cannot count .* --ids item=dense, or use"
    ):
        build_stream_loader(small_dataset, _config(negatives=Negatives(count=1)), rank=0, world_size=1)


def test_samples_of_a_mixture_have_negatives_that_are_not_their_own(small_dataset: Path, tmp_path: Path) -> None:
    other = make_small_dataset(tmp_path / "other", seed=8)
    stores = [open_store(path) for path in (small_dataset, other)]
    mixed = _all(Mixture(weights={small_dataset: 2.0, other: 1.0}), 2)
    drawable = {item for store in stores for item in store.columns["item_id"].tolist()}
    num_rows = [0, 0]
    for key, (items, *_) in mixed.items():
        index = int(key >= len(stores[0]))
        store, row = stores[index], key - index * len(stores[0])
        own = store.columns["item_id"][store.offsets[row] : store.offsets[row + 1]].tolist()
        assert {*items} <= drawable - {*own}
        num_rows[index] += 1
    assert min(num_rows) > 50


def test_an_eval_split_is_drawn_for_by_the_counts_of_train(small_dataset: Path) -> None:
    train, held_out = (
        build_loader(small_dataset, _config(split=split), rank=0, world_size=1)._collate.describe()["negatives"]
        for split in ("train", "eval")
    )
    assert train == held_out is not None


def test_ranks_compare_what_is_drawn_and_files_by_their_contents(small_dataset: Path, tmp_path: Path) -> None:
    here, there, other = (tmp_path / name for name in ("here", "there", "other"))
    for path, lists in ((here, {3: [5]}), (there, {3: [5]}), (other, {3: [6]})):
        _write_hard(path, lists)

    def invariants(rank: int, path: Path, **options: Any) -> Any:
        negatives = Negatives(count=2, num_hard=1, hard=path, **options)
        return build_loader(small_dataset, _config(negatives=negatives), rank=rank, world_size=2).rank_invariants()

    check_settings([invariants(0, here), invariants(1, there)])
    for different in (invariants(1, other), invariants(1, here, exclude_own=False)):
        with pytest.raises(RankError, match=r"^negatives differs between ranks: "):
            check_settings([invariants(0, here), different])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "Negatives: count must be at least 1, got 0"),
        (
            {"count": 1, "by": "events"},
            "Negatives: by must be one of uniform, popularity, got 'events'",
        ),
        ({"count": 1, "alpha": -1}, "Negatives: alpha must be at least 0 and at most 8, got -1"),
        ({"count": 1, "num_hard": 2}, "Negatives: num_hard=2 has no effect without hard; give both, or leave it out"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        Negatives(**options)


def test_loaders_that_cannot_draw_negatives_say_so(small_dataset: Path) -> None:
    with pytest.raises(ConfigError, match=r"^LoaderConfig: negatives must be of type Negatives \| None, got 5$"):
        _config(negatives=5)
    with pytest.raises(ConfigError, match="set max_num_candidates to 1"):
        _config(max_num_candidates=0, num_tasks=1)
    with pytest.raises(ConfigError, match="leave negatives out"):
        RandomBatches(_config(), num_batches=1)
    mapped = open_store(small_dataset).remapped({"item_id": KEY_MAP})
    with pytest.raises(ConfigError, match="pass key_maps, and a store without them"):
        build_loader(mapped, _config(), rank=0, world_size=1)
    with pytest.raises(ConfigError, match="the split 'train', which has none"):
        NegativeSampler.create(POPULAR, [_store([[]], size=3)], None)
    with pytest.raises(ConfigError, match="need tables of all 4,611,686,018,427,387,904 ids of items; preprocess with"):
        NegativeSampler.create(POPULAR, [_store([[]], size=2**62, rule="hash:4611686018427387904")], None)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"item_id": [1]}, "write item_id int64 and negatives list<int64>, without nulls"),
        ({"item_id": [1], "negatives": [[None]]}, "write item_id int64 and negatives list<int64>, without nulls"),
        ({"item_id": [1, 1], "negatives": [[2], [3]]}, "has an item in more than one row; join their lists"),
        ({"item_id": [1], "negatives": [[9]]}, "has items 9 to 9, the dataset 0 to 8; use its ids"),
        ({"item_id": [-1], "negatives": [[2]]}, "has items -1 to -1, the dataset 0 to 8; use its ids"),
        (None, "is no Parquet file of hard negatives"),
    ],
)
def test_a_malformed_file_of_hard_negatives_is_refused(tmp_path: Path, table: Any, message: str) -> None:
    path = tmp_path / "hard.parquet"
    path.write_bytes(b"PAR1")
    if table:
        pq.write_table(pa.table(table), path)
    with pytest.raises(DataError, match=message) as raised:
        NegativeSampler.create(Negatives(count=1, hard=path, num_hard=1), [_store([[1]], size=9)], None)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
