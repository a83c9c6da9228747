"""Columns of every kind in batches, compared with a plain collation of Python lists."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, LossKey, SequenceBatch
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import StoreRows
from evenrank.datasets import SequenceStore
from tests.dataloader.batch_helpers import rows_of
from tests.dataloader.collate.stores import STORE

EVENTS = ("item_id", "action", "timestamp_ms", "dwell", "price")
CONFIGS = st.builds(
    LoaderConfig,
    batch_size=st.integers(1, 4),
    max_history_length=st.integers(0, 6),
    max_num_candidates=st.integers(0, 3),
    num_tasks=st.integers(0, 1),
    candidate_actions=st.booleans(),
    extra_events=st.lists(st.sampled_from(["timestamp_ms", "dwell", "price"]), unique=True).map(tuple),
    context=st.one_of(st.none(), st.lists(st.sampled_from(["age", "tags", "share"]), unique=True).map(tuple)),
    label=st.sampled_from([None, "action", "dwell", "timestamp_ms", "price", ("dwell", "price"), ("price", "action")]),
    weight=st.sampled_from([None, "action", "price", "share"]),
)


def _store(users: list[tuple[int, int]], first: int = 0) -> SequenceStore:
    """Return a store of users with so many events and tags, in which all values differ."""
    offsets, tag_offsets = (np.cumsum([0, *counts]) for counts in zip(*users, strict=True))
    events = np.arange(first, first + offsets[-1])
    rows = np.arange(first, first + len(users))
    context = {"age": "int64", "share": "float32", "tags": "list<int64>"}
    dtypes = ("int64", "int32", "int64", "int32", "float32")
    return replace(
        STORE,
        manifest=replace(STORE.manifest, contextual=context, extra_events={"dwell": "int32", "price": "float32"}),
        offsets=offsets,
        columns={
            **{name: (events * (i + 2) + i / 4).astype(dtypes[i]) for i, name in enumerate(EVENTS)},
            "user_id": rows,
            "age": rows + 7,
            "share": rows / np.float32(8),
            "tags": np.arange(tag_offsets[-1]),
        },
        list_offsets={"tags": tag_offsets},
    )


def _expected(config: LoaderConfig, store: SequenceStore, row: int) -> dict[str, dict[str, list[float]]]:
    """Return the values of a row of a store by field and key."""
    events = {name: store.columns[name][store.offsets[row] : store.offsets[row + 1]].tolist() for name in EVENTS}
    split = len(events["item_id"]) - config.max_num_candidates
    begin = max(split - config.max_history_length, 0)
    tags = store.list_offsets["tags"]
    context = {name: store.columns[name][row : row + 1].tolist() for name in ("age", "share")}
    context["tags"] = store.columns["tags"][tags[row] : tags[row + 1]].tolist()
    values = {name: context[name] for name in (store.manifest.contextual if config.context is None else config.context)}
    for name in ("item_id", "action", *config.extra_events):
        is_known = name in ("item_id", "timestamp_ms") or config.candidate_actions
        values[name] = events[name][begin:] if is_known else events[name][begin:split]
    fields: dict[str, dict[str, list[float]]] = {"features": {}, "float_features": {}}
    for name, of_key in values.items():
        fields["float_features" if name in ("share", "price") else "features"][name] = of_key
    if config.labels:
        predicted = slice(split if config.max_num_candidates else begin, None)
    else:
        predicted = slice(begin + 1, None)
    of_label = {name == "price": {"label": events[name][predicted]} for name in config.labels}
    fields |= {"labels": of_label.get(False, {}), "float_labels": of_label.get(True, {})}
    of_sample = [context["share"][0]] * len(events["item_id"][predicted])
    weights = of_sample if config.weight == "share" else events[config.weight][predicted] if config.weight else []
    fields["weights"] = {"weight": weights} if config.weight else {}
    return fields


@given(
    config=CONFIGS,
    stores=st.lists(
        st.lists(st.tuples(st.integers(3, 9), st.integers(0, 3)), min_size=1, max_size=5), min_size=1, max_size=2
    ),
    seed=st.integers(0, 99),
)
def test_batches_equal_a_plain_collation(config: LoaderConfig, stores: list[Any], seed: int) -> None:
    opened = [_store(users, 100 * index) for index, users in enumerate(stores)]
    collate = Collate.create(config, opened[0].manifest)
    samples = [(store, row) for store in opened for row in range(len(store))]
    order = np.random.default_rng(seed).permutation(len(samples))
    groups = []
    for store in opened:
        indices = np.array([place for place, i in enumerate(order) if samples[i][0] is store], dtype=np.int64)
        groups.append(StoreRows(store, np.array([samples[order[i]][1] for i in indices], dtype=np.int64), indices))
    num_batches = len(samples) // config.batch_size + 1
    batches = collate(groups, np.arange(len(samples)), batch_size=config.batch_size, num_batches=num_batches)
    expected = [_expected(config, *samples[i]) for i in order]
    lengths = collate.lengths(groups, len(samples)).of_keys
    for number, batch in enumerate(batches):
        first = number * config.batch_size
        rows = expected[first : first + config.batch_size]
        for field, dtype in (("features", "int64"), ("float_features", "float32"), ("labels", "int64")):
            value = getattr(batch, field)
            assert value is None or str(value.values().dtype) == f"torch.{dtype}"
        keys = [(field, key) for field, of_keys in expected[0].items() for key in of_keys]
        assert list(lengths) == keys
        jagged: list[tuple[str, Any]] = [
            (name, value) for name, value in batch.tensors() if name in expected[0] and value is not None
        ]
        assert [(name, key) for name, value in jagged for key in (value.keys() if value is not None else ())] == keys
        for name, key in keys:
            padding: list[list[float]] = [[]] * (config.batch_size - len(rows))
            assert rows_of(getattr(batch, name), key) == [row[name][key] for row in rows] + padding
            of_batch = lengths[name, key][first : first + config.batch_size].tolist()
            assert of_batch == [len(row[name][key]) for row in rows]
        loss = batch.loss_key() or LossKey("", "")
        counted = [max(len(row[loss.field][loss.key]) - loss.skip, 0) for row in rows]
        assert batch.loss_tokens == sum(counted)
        assert batch.weights is None or batch.weights["weight"].lengths().tolist()[: len(rows)] == counted


def test_the_loss_tokens_are_those_of_floats_where_there_are_no_integers() -> None:
    def loss_key(**options: Any) -> LossKey | None:
        store = _store([(4, 0)])
        collate = Collate.create(LoaderConfig(batch_size=1, **options), store.manifest)
        batch: SequenceBatch
        (batch,) = collate([StoreRows(store, np.array([0]), np.array([0]))], np.array([0]), batch_size=1)
        assert batch.loss_tokens == 4 - (batch.labels is None and batch.float_labels is None)
        return batch.loss_key()

    assert loss_key(weight="price") == LossKey("features", "item_id", skip=1)
    assert loss_key(label="price", weight="share") == LossKey("float_labels", "label")
    assert loss_key(label=("price", "dwell")) == loss_key(label=("action", "price"), num_tasks=2)
    assert loss_key(num_tasks=2) == loss_key(label="dwell") == LossKey("labels", "label")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"context": ("age", "sex")},
            "no contextual feature 'sex'; known: age, share, tags; preprocess the log with --context-columns sex$",
        ),
        (
            {"extra_events": ("share",)},
            "no extra events 'share'; known: timestamp_ms, dwell, price; preprocess .* --event-columns",
        ),
        (
            {"label": ("dwell", "cost")},
            "^the dataset has no column of events for label 'cost'; known: action, timestamp_ms, dwell, price; "
            "preprocess the log with --label cost$",
        ),
        (
            {"label": ("dwell", "action")},
            r"^label can be one column of integers and one of floats, got \('dwell', 'action'\), of which none are "
            "floats; leave one out, or preprocess the log with one as NAME:int or NAME:float$",
        ),
        (
            {"label": ("price", "action", "price")},
            r"got \('price', 'action', 'price'\), of which price, price are floats",
        ),
        (
            {"weight": "age"},
            "no events or float feature for weight 'age'; known: action, .*, price, share; preprocess .* --weight age$",
        ),
        ({"label": "dwell", "num_tasks": 2}, "num_tasks above 1 are bits of actions, got label 'dwell'; use num_tasks"),
    ],
)
def test_a_column_that_the_dataset_lacks_is_named_with_those_it_has(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Collate.create(LoaderConfig(batch_size=1, **options), _store([(4, 0)]).manifest)


def test_a_weight_that_may_be_missing_is_refused() -> None:
    manifest = replace(_store([(4, 0)]).manifest, extra_events={"price": "float32?"})
    Collate.create(LoaderConfig(batch_size=1, label="price", extra_events=("price",)), manifest)
    with pytest.raises(ConfigError, match="weight 'price' may be missing in the dataset; declare it with =FILL or"):
        Collate.create(LoaderConfig(batch_size=1, weight="price"), manifest)


def test_floats_that_are_missing_are_no_loss_tokens_and_have_no_weight() -> None:
    # Of users of 4 and 3 events, of which the newest 3 are labels.
    nan, store = float("nan"), _store([(4, 0), (3, 0)], first=8)
    manifest = replace(store.manifest, extra_events={"price": "float32?"})
    price = np.array([0, nan, 2, nan, 4, nan, 6], dtype=np.float32)
    store = replace(store, manifest=manifest, columns={**store.columns, "price": price})
    config = LoaderConfig(batch_size=2, label="price", weight="share", max_history_length=3)
    collate, groups = Collate.create(config, manifest), [StoreRows(store, np.arange(2), np.arange(2))]
    batch: SequenceBatch
    (batch,) = collate(groups, np.arange(2), batch_size=2)
    assert rows_of(batch.known, "known") == [[1], [0, 2]]
    assert np.isnan(rows_of(batch.float_labels, "label")).tolist() == [[True, False, True], [False, True, False]]
    assert rows_of(batch.weights, "weight") == [[0, 1, 0], [1.125, 0, 1.125]]
    assert batch.loss_tokens == 3
    assert collate.lengths(groups, 2).of_keys["known", "known"].tolist() == [1, 2]
