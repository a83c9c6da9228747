"""Negatives known at the time of their sample, and popularity as it was before a window, against plain Python."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader import LoaderConfig, Negatives, Pools, TimeWindows, build_loader
from evenrank.dataloader.balance import BalanceConfig
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import open_store
from evenrank.datasets.store import SequenceStore
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.collate.stores import store_of_items
from tests.dataloader.collate.test_negatives import _chi_square, _write_hard

Log = list[list[tuple[int, int]]]
"""Of each user, the events: time and item."""
SIZE = 12
KEY_MAP = KeyMap(num_embeddings=13, world_size=3, mode="hash_roundrobin")


def _store(log: Log, rule: str = "dense") -> SequenceStore:
    store = store_of_items([[item for _, item in row] for row in log], size=SIZE, rule=rule)
    times = np.array([time for row in log for time, _ in row], dtype=np.int64)
    actions = (store.columns["item_id"] % 6).astype(np.int32)
    return replace(store, columns={**store.columns, "timestamp_ms": times, "action": actions})


def _batch(stores: list[SequenceStore], negatives: Negatives, **options: Any) -> Any:
    collate = Collate.create(LoaderConfig(batch_size=1, negatives=negatives, **options), stores[0].manifest, stores)
    ids = np.arange(sum(map(len, stores)))
    groups = group_by_store([store.remapped(options.get("key_maps", {})) for store in stores], ids)
    (batch,) = collate(groups, ids, batch_size=len(ids) + 1)
    return batch


EVENTS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, SIZE - 2)), max_size=6).map(sorted)
SETTINGS = st.fixed_dictionaries(
    {
        "by": st.sampled_from(["uniform", "popularity"]),
        "alpha": st.sampled_from([1.0, 0.5]),
        "num_hard": st.integers(0, 2),
        "exclude_own": st.booleans(),
    }
)


@settings(max_examples=80)
@given(
    st.lists(EVENTS, min_size=2, max_size=7),
    SETTINGS,
    st.integers(0, 2),
    st.sampled_from(["dense", "keep"]),
    st.booleans(),
    st.sampled_from([None, Pools(values=(2, 3, 5), each=False)]),
)
def test_no_negative_is_drawn_before_its_first_event(
    tmp_path_factory: pytest.TempPathFactory,
    log: Log,
    options: dict[str, Any],
    most: int,
    rule: str,
    is_mapped: bool,
    pools: Pools | None,
) -> None:
    """Whatever a sample's last targets are, `log_q` is that of its first one's time, and adds up to 1."""
    hard, num_hard = tmp_path_factory.getbasetemp() / "hard-in-time.parquet", options["num_hard"]
    if not hard.exists():
        _write_hard(hard, {item: [*range(1, SIZE)] for item in range(1, SIZE)})
    log = [row for row in log if len(row) >= most] + [[(9, 1), (14, 2), (30, 3)]]
    stores = [_store(part, rule) for part in (log[:1], log[1:]) if part]
    negatives = Negatives(count=6, known_at=True, hard=hard if num_hard else None, **options)
    key_maps = {"item_id": KEY_MAP} if is_mapped else {}
    batch = _batch(stores, negatives, max_num_candidates=most, key_maps=key_maps, pools=pools)
    events = [event for row in log for event in row]
    counts = Counter(item for _, item in events)
    firsts = {item: min(time for time, other in events if other == item) for item in counts}
    weights = {item: counts[item] ** options["alpha"] if options["by"] == "popularity" else 1 for item in counts}
    rows = [rows_of(batch.negatives, "item_id"), *(rows_of(batch.log_q, key) for key in ("negative", "positive"))]
    assert [of_key[-1] for of_key in rows] == [[], [], []]
    for events_of_row, drawn, log_q, of_positives in zip(log, *rows, strict=False):
        if is_mapped:
            drawn = KEY_MAP.inverse(np.array(drawn)).tolist()
        own = {item for _, item in events_of_row}
        history = [event for event in events_of_row if pools is None or event[1] % 6 in pools.values]
        targets = events_of_row[len(events_of_row) - most :] if most else history[1:]
        time = targets[0][0] if targets else min(firsts.values())
        known = {item for item in firsts if firsts[item] <= time} or {
            min(firsts, key=lambda item: (firsts[item], item))
        }
        total = sum(weights[item] for item in known)
        q = {item: math.log(weights[item] / total) for item in weights}
        assert sum(math.exp(q[item]) for item in known) == pytest.approx(1)
        assert {*drawn} <= known
        drawable = known - own if options["exclude_own"] else known
        for item, of_item in zip(drawn, log_q, strict=True):
            is_hard = of_item == 0 and len(known) > 1
            assert is_hard or of_item == pytest.approx(q[item], abs=1e-5)
            assert item in drawable or not drawable or (is_hard and item not in {target for _, target in targets})
        assert of_positives == pytest.approx([q[item] for _, item in targets], abs=1e-5)


@pytest.mark.parametrize("by", ["uniform", "popularity"])
def test_draws_among_known_items_have_the_distribution_of_their_logarithms(by: Any) -> None:
    """Item i has i events, the first at time i; samples of two times are drawn for."""
    log: Log = [[(item, item)] * item for item in range(1, 11)]
    samples: Log = [[(4, 4)]] * 300 + [[(8, 8)]] * 300
    batch = _batch(
        [_store(log + samples)],
        Negatives(count=40, by=by, alpha=0.5, known_at=True, exclude_own=False),
        max_num_candidates=1,
    )
    drawn = rows_of(batch.negatives, "item_id")
    for last, of_time in ((4, drawn[10:310]), (8, drawn[310:610])):
        weights = {
            item: (item + 300 * (item in (4, 8))) ** 0.5 if by == "popularity" else 1 for item in range(1, last + 1)
        }
        p = {item: weight / sum(weights.values()) for item, weight in weights.items()}
        assert abs(_chi_square([item for row in of_time for item in row], p)) < 3


WEEKS: dict[str, Any] = {"order": TimeWindows(every="1w"), "max_num_candidates": 2, "batch_size": 8, "seed": 5}


def _loader(data: Any, *, rank: int = 0, world_size: int = 1, balance: Any = None, **options: Any) -> Any:
    negatives = Negatives(count=5, by="popularity", alpha=0.75, counted="before", **options.pop("known", {}))
    config = LoaderConfig(**{**WEEKS, "negatives": negatives, **options})
    return build_loader(data, config, rank=rank, world_size=world_size, balance=balance)


def _samples(batches: Any) -> dict[int, Any]:
    samples: dict[int, Any] = {}
    for batch in batches:
        rows = [rows_of(batch.negatives, "item_id"), *(rows_of(batch.log_q, key) for key in ("negative", "positive"))]
        samples |= dict(zip(ids_of(batch), zip(*rows, strict=True), strict=False))
    return samples


@pytest.mark.parametrize("known", [{}, {"known_at": True}])
def test_popularity_is_that_of_the_events_before_each_window(small_dataset: Path, known: dict[str, Any]) -> None:
    """On any ranks, balanced and resumed, and the first window draws uniformly."""
    store, loader = open_store(small_dataset), _loader(small_dataset, known=known)
    items, times = store.columns["item_id"], store.columns["timestamp_ms"]
    assert loader.num_windows > 3
    for epoch in range(loader.num_windows):
        begin = loader.window(epoch)[0].timestamp() * 1000
        before = items[times < begin] if epoch else np.unique(items)
        weights = {item: count**0.75 for item, count in Counter(before.tolist()).items()}
        total, (first, *_) = sum(weights.values()), [loader]
        of_epoch = _samples(iter(first))
        assert len(of_epoch) > 20
        for drawn, log_q, _ in of_epoch.values():
            assert {*drawn} <= weights.keys()
            if epoch:
                assert log_q == pytest.approx([math.log(weights[item] / total) for item in drawn], abs=1e-4)
        if epoch == 2:
            ranks = [
                _loader(small_dataset, known=known, rank=rank, world_size=3, num_workers=rank) for rank in range(3)
            ]
            ranks += [
                _loader(small_dataset, known=known, rank=r, world_size=2, balance=BalanceConfig(cost=COST, window=2))
                for r in range(2)
            ]
            for loaders in (ranks[:3], ranks[3:]):
                for each in loaders:
                    each.begin_at(epoch)
                assert {sample: row for each in loaders for sample, row in _samples(each).items()} == of_epoch
            cut, resumed = (
                _loader(small_dataset, known=known),
                _loader(small_dataset, known=known, batch_size=3, seed=9),
            )
            cut.begin_at(epoch)
            iterator = iter(cut)
            done = [next(iterator), next(iterator)]
            resumed.load_state_dict(cut.state_dict(after=done[-1]))
            assert _samples(done) | _samples(resumed) == of_epoch
            assert _samples([cut.collate(done[1].sample_ids.numpy(), epoch=epoch)]) == _samples(done[1:])
