"""Histories of which a random part is trained, compared with a plain reading, and their lengths with the formula."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader import (
    LoaderConfig,
    Negatives,
    Pools,
    StochasticLength,
    build_loader,
    build_stream_loader,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig, StepMetrics
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import DrawKey, group_by_store
from tests.dataloader.balance.costs import item_tokens
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.collate.stores import store_of_items
from tests.dataloader.stochastic import kept_events

NUM_ITEMS = 50


def _store(lengths: list[int], seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    store = store_of_items([rng.integers(1, NUM_ITEMS, length).tolist() for length in lengths], size=NUM_ITEMS)
    num_events = int(store.offsets[-1])
    of_events: dict[str, Any] = {
        "action": rng.integers(0, 3, num_events).astype(np.int32),
        "timestamp_ms": np.arange(num_events),
    }
    return replace(store, columns={**store.columns, **of_events})


DRAWN = st.builds(StochasticLength, alpha=st.sampled_from([1, 1.2, 1.6, 1.9, 2]), newest=st.integers(0, 3))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_tasks": 1, "weight": "timestamp_ms"},  # labels of histories
    {"max_num_candidates": 2, "negatives": Negatives(count=3)},
    {"max_num_candidates": 1, "pools": Pools(values=(2, 1), each=False)},
    {"negatives": Negatives(count=3), "pools": Pools(values=(2, 1))},
    {"codes": random_codes(NUM_ITEMS, levels=2, codebook_size=8), "history_labels": True},
]


def _row(store: Any, sample: int, config: LoaderConfig, seed: int, epoch: int) -> dict[tuple[str, str], list[int]]:
    """Return what a batch has of a sample, read plainly."""
    columns, (begin, end), limit = store.columns, store.offsets[sample:][:2].tolist(), config.max_history_length
    history, targets = [*range(begin, end - config.max_num_candidates)], [*range(end - config.max_num_candidates, end)]
    if config.pools is not None:
        of_kinds = [[event for event in history if columns["action"][event] == kind] for kind in (1, 2)]
        share = limit // 2 if config.pools.each else limit
        history = sorted(event for events in of_kinds for event in events[-share:])[-limit:]
    assert config.stochastic_length is not None
    drawn_by = {"seed": seed, "epoch": epoch, "sample_id": sample}
    history = [history[k] for k in kept_events(len(history), limit, config.stochastic_length, **drawn_by)]
    shown, labelled = history + targets, targets or history
    items, actions = columns["item_id"].tolist(), columns["action"].tolist()
    if (table := config.codes) is not None:
        assert not isinstance(table, str | Path)
        codes = [table.codes[items[event]].tolist() for event in shown]
        tokens = [(np.array(of_event) + table.level_offsets).tolist() for of_event in codes[:-1]]
        labels = codes[min(len(history), 1) :]
        return {("features", "semantic_id"): [*chain(*tokens)], ("labels", "label"): [*chain(*labels)]}
    row = {
        ("features", "item_id"): [items[event] for event in shown],
        ("features", "action"): [actions[event] for event in history],
    }
    if config.labels:
        row["labels", "label"] = [actions[event] for event in labelled]
    if config.weight:
        row["weights", "weight"] = [columns["timestamp_ms"][event] for event in labelled]
    return row


@settings(max_examples=150)
@given(
    st.lists(st.integers(3, 40), min_size=1, max_size=6),
    st.sampled_from([9, 16, 30]),
    DRAWN,
    st.sampled_from(OPTIONS),
    st.integers(-1, 3),
    st.integers(0, 3),
)
def test_batches_have_the_events_that_are_drawn_and_all_candidates(
    lengths: list[int], longest: int, drawn: StochasticLength, options: dict[str, Any], seed: int, epoch: int
) -> None:
    store = _store(lengths)
    config = LoaderConfig(
        batch_size=len(lengths), max_history_length=longest, stochastic_length=drawn, context=(), **options
    )
    collate, ids = Collate.create(config, store.manifest, [store]), np.arange(len(lengths))[::-1]
    groups = group_by_store([store], ids)
    (batch,) = collate(groups, ids, batch_size=len(ids), seed=seed, epoch=epoch)
    fields = ("features", "labels", "weights")
    of_fields = {name: batch.__dict__.get(name) for name in fields}
    found = {
        (name, key): rows_of(keyed, key)
        for name, keyed in of_fields.items()
        if keyed is not None
        for key in list(keyed.keys())
    }
    for row, sample in enumerate(ids.tolist()):
        expected = _row(store, sample, config, seed, epoch)
        assert {key: rows[row] for key, rows in found.items()} == expected
        if config.negatives is not None:
            items = rows_of(batch.negatives, "item_id")[row]
            assert len(items) == 3
            assert not {*items} & {*store.columns["item_id"][slice(*store.offsets[sample:][:2])]}
    known = collate.lengths(groups, DrawKey(seed, epoch, ids)).of_keys
    assert {key: known[key].tolist() for key in found} == {key: [*map(len, rows)] for key, rows in found.items()}


@pytest.mark.parametrize("newest", [0, 5])
def test_lengths_have_the_mean_of_the_formula_and_events_equal_chances(newest: int) -> None:
    """Of 4,000 histories of 40 events, of which at most 16 are drawn."""
    count, length, longest = 4000, 40, 64
    settings = StochasticLength(alpha=4 / 3, newest=newest)
    config = LoaderConfig(batch_size=count, max_history_length=longest, stochastic_length=settings, context=())
    store, ids = _store([length] * count), np.arange(count)
    store.columns["action"][:] = np.tile(np.arange(length), count)
    collate = Collate.create(config, store.manifest)
    for epoch in (0, 1):
        (batch,) = collate(group_by_store([store], ids), ids, batch_size=count, seed=7, epoch=epoch)
        kept = rows_of(batch.features, "action")
        cut = [row for row in kept if len(row) < length]
        assert {*map(len, cut)} == {16}
        share = (16 / length) ** 2  # of whole histories
        assert abs(len(cut) / count - (1 - share)) < 3 * np.sqrt(share * (1 - share) / count)
        times_kept = np.bincount(np.concatenate(cut), minlength=length)
        assert (times_kept[length - newest :] == len(cut)).all()
        chance = (16 - newest) / (length - newest)
        spread = np.sqrt(len(cut) * chance * (1 - chance))
        assert (abs(times_kept[: length - newest] - len(cut) * chance) < 4 * spread).all()


ONE: Any = {"rank": 0, "world_size": 1}
LOADED = LoaderConfig(
    batch_size=8,
    max_history_length=40,
    max_num_candidates=1,
    stochastic_length=StochasticLength(alpha=1.4, newest=2),
    seed=5,
    num_workers=2,
)


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"pack": True, "max_tokens_per_rank": 200}])
def test_steps_are_planned_with_the_lengths_that_are_drawn(small_dataset: Path, options: dict[str, Any]) -> None:
    """Loads of plans are what the batches of their ranks cost, in each epoch, also after a state is loaded."""
    planned: list[StepMetrics] = []
    balance = BalanceConfig(cost=item_tokens, **options)
    loaders = [
        build_loader(
            small_dataset,
            LOADED,
            rank=rank,
            world_size=2,
            balance=replace(balance, on_step=None if rank else planned.append),
        )
        for rank in range(2)
    ]

    def loads() -> list[list[int]]:
        planned.clear()
        steps = [[int(b.features["item_id"].lengths().sum()) for b in step] for step in zip(*loaders, strict=True)]
        assert [metrics.after.tolist() for metrics in planned] == steps
        return steps

    first, second = loads(), loads()
    assert sum(map(sum, first)) != sum(map(sum, second))
    for loader in loaders:
        loader.begin_at(0)
    assert loads() == first


@pytest.mark.parametrize(("batch_size", "window"), [(8, 1), (2, 24)])
def test_steps_are_even_by_the_lengths_that_are_drawn_and_not_by_those_of_whole_histories(
    batch_size: int, window: int
) -> None:
    """Of 2 ranks: the sum of the heaviest loads of an epoch, over that of equal ones."""
    store = _store([*np.random.default_rng(0).integers(4, 200, 96).tolist()])
    config = replace(LOADED, batch_size=batch_size, max_history_length=200)
    balance, collate = BalanceConfig(cost=item_tokens, window=window), build_loader(store, config, **ONE).collate

    def heaviest(planned: LoaderConfig) -> float:
        loaders = [build_loader(store, planned, rank=rank, world_size=2, balance=balance) for rank in range(2)]
        for loader in loaders:
            loader.begin_at(3)
        steps = [[collate(np.array(ids_of(b)), epoch=3) for b in step] for step in zip(*loaders, strict=True)]
        loads = np.array([[int(b.features["item_id"].lengths().sum()) for b in step] for step in steps])
        return float(loads.max(axis=1).sum() / loads.sum() * 2)

    assert heaviest(config) < 1.02 < 1.05 < heaviest(replace(config, stochastic_length=None))


def test_a_stream_draws_what_other_loaders_draw(small_dataset: Path) -> None:
    def samples(loader: Any) -> dict[int, list[int]]:
        return {i: row for b in loader for i, row in zip(ids_of(b), rows_of(b.features, "item_id"), strict=False)}

    stored = build_loader(small_dataset, LOADED, **ONE)
    stream = build_stream_loader(small_dataset, LOADED, **ONE)
    assert samples(stored) == samples(stream)
    assert samples(stored) == samples(stream)  # of the next epoch


def test_powers_that_floats_miss_are_whole() -> None:
    assert StochasticLength(alpha=1.4).limit(1024) == 128
