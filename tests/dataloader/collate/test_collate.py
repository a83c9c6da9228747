"""Batches of stores, with columns of every kind and with semantic ids, compared with a plain collation of lists."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader import LoaderConfig
from evenrank.dataloader.batches.schema import check_contents, schema_of
from evenrank.dataloader.codes import CodeTable
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import DrawKey, group_by_store
from evenrank.datasets import SequenceStore
from tests.dataloader.batch_helpers import rows_of
from tests.dataloader.collate.stores import STORE

INTEGERS = {"item_id": "int64", "action": "int32", "timestamp_ms": "int64", "dwell": "int32"}
EVENTS = {**INTEGERS, "price": "float32", "bid": "float32"}
# Item i has the codes (i % 8, i // 8), and 0 to 2 further ones.
OWN, NUM_CODES = np.stack([np.arange(50) % 8, np.arange(50) // 8], axis=1), 1 + np.arange(50) % 3
BOOKS = np.where(np.arange(3)[:, None] < NUM_CODES[:, None, None], OWN[:, None] + 10 * np.arange(3)[:, None], -1)
CODES = CodeTable(
    codes=BOOKS[:, 0].astype(np.int32), codebook_sizes=(30, 28), alternatives=BOOKS[:, 1:].astype(np.int32)
)
FLAGS = ("user_id", "label_offsets", "history_labels", "candidate_feature", "draw_alternatives")
SHAPES: dict[str, Any] = {
    "batch_size": st.integers(1, 4),
    "max_history_length": st.integers(0, 6),
    "seed": st.integers(-1, 1),
    "context": st.none() | st.lists(st.sampled_from(["age", "tags", "share"]), unique=True).map(tuple),
}
SEQUENCES = st.builds(
    LoaderConfig,
    **SHAPES,
    user_id=st.booleans(),
    max_num_candidates=st.integers(0, 3),
    num_tasks=st.integers(0, 1),
    candidate_actions=st.booleans(),
    extra_events=st.lists(st.sampled_from(["timestamp_ms", "dwell", "price"]), unique=True).map(tuple),
    label=st.sampled_from([None, "action", "dwell", "price", "bid", ("dwell", "price"), ("bid", "action")]),
    weight=st.sampled_from([None, "action", "bid", "share"]),
)
SEMANTIC_IDS = st.builds(LoaderConfig, **SHAPES, codes=st.just(CODES), **dict.fromkeys(FLAGS, st.booleans()))
ROWS = st.lists(st.tuples(st.integers(3, 12), st.integers(0, 5), st.integers(1, 3)), max_size=5)
LONG = (20, 5, 3)  # reaches every limit


def _store(rows: Sequence[tuple[int, int, int]], first: int, has_targets: bool) -> SequenceStore:
    """Return a store of rows with so many events, tags and targets, in which nearly all values differ."""
    num_events, num_tags, num_targets = (np.array(numbers) for numbers in zip(*rows, LONG, strict=True))
    offsets, tag_offsets = (np.concatenate([[0], np.cumsum(counts)]) for counts in (num_events, num_tags))
    ids, events = np.arange(first, first + len(num_events)), np.arange(first, first + offsets[-1])
    columns = {name: (events * (i + 1) + i).astype(dtype) for i, (name, dtype) in enumerate(EVENTS.items())}
    columns["item_id"] %= 50
    columns["price"][: offsets[-2]][events[: offsets[-2]] % 3 == 0] = np.nan  # but of the long row
    events_of = {"dwell": "int32", "price": "float32?", "bid": "float32"}
    context = {"age": "int64", "share": "float32", "tags": "list<int64>"}
    columns |= {"user_id": ids, "age": ids + 7, "share": ids / np.float32(8), "tags": np.arange(tag_offsets[-1])}
    return replace(
        STORE,
        manifest=replace(STORE.manifest, contextual=context, extra_events=events_of),
        offsets=offsets,
        columns=columns,
        list_offsets={"tags": tag_offsets},
        list_limits={"tags": 5},
        num_targets=num_targets.astype(np.int32) if has_targets else None,
    )


def _mix(word: int) -> int:
    """Return the hash of a word: SplitMix64's finalizer."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        word = (word ^ word >> shift) * factor & (1 << 64) - 1 if factor > 1 else word ^ word >> shift
    return word


def _codes_of(items: Sequence[int], *, config: LoaderConfig, epoch: int, sample: int) -> list[list[int]]:
    """Return the codes of each of the last events of a sample: which of its item's is a hash of its place."""
    word = _mix(_mix(_mix(config.seed & (1 << 64) - 1) ^ epoch) ^ _mix(sample))
    books = [
        _mix(word ^ place) % int(NUM_CODES[item]) if config.draw_alternatives else 0
        for place, item in zip(range(len(items), 0, -1), items, strict=True)
    ]
    return [(OWN[item] + 10 * book).tolist() for item, book in zip(items, books, strict=True)]


def _expected(config: LoaderConfig, store: SequenceStore, row: int, epoch: int, sample: int) -> dict[str, Any]:
    """Return the values of a row of a store by field and key, fields in their order, and its number of candidates."""
    values = {name: store.columns[name][store.offsets[row] : store.offsets[row + 1]].tolist() for name in EVENTS}
    num_candidates = config.max_num_candidates
    if store.num_targets is not None:
        num_candidates = min(num_candidates, int(store.num_targets[row]))
    split = len(values["item_id"]) - num_candidates
    begin = max(split - config.max_history_length, 0)
    tags = store.list_offsets["tags"]
    context = {name: store.columns[name][row : row + 1].tolist() for name in ("age", "share")}
    context["tags"] = store.columns["tags"][tags[row] : tags[row + 1]].tolist()
    features = {"user_id": [int(store.columns["user_id"][row])]} if config.user_id else {}
    features |= {name: context[name] for name in (config.context if config.context is not None else context)}
    fields: dict[str, Any] = {"features": features, "float_features": {}, "labels": {}, "float_labels": {}}
    follows = slice(min(begin + 1, split), None)
    if config.codes is not None:
        codes = _codes_of(values["item_id"], config=config, epoch=epoch, sample=sample)
        tokens = [[code + offset for code, offset in zip(of_event, (0, 30), strict=True)] for of_event in codes]
        features["semantic_id"] = [*itertools.chain(*tokens[begin:split])]
        if config.candidate_feature:
            features["candidate_id"] = tokens[-1]
        of_labels = (tokens if config.label_offsets else codes)[follows if config.history_labels else slice(-1, None)]
        fields["labels"]["label"] = [*itertools.chain(*of_labels)]
    else:
        for name in ("item_id", "action", *config.extra_events):
            is_known = name in ("item_id", "timestamp_ms") or config.candidate_actions
            features[name] = values[name][begin:] if is_known else values[name][begin:split]
        predicted = slice(split if num_candidates else begin, None) if config.labels else follows
        for name in config.labels:
            fields["float_labels" if EVENTS[name] == "float32" else "labels"]["label"] = values[name][predicted]
        if config.weight:
            of_row = context["share"] * len(values["bid"][predicted])
            weights = of_row if config.weight == "share" else values[config.weight][predicted]
            fields["weights"] = {"weight": weights}
        if "price" in config.labels:
            is_known = ~np.isnan(fields["float_labels"]["label"])
            fields["known"] = {"known": np.flatnonzero(is_known).tolist()}
            if config.weight:
                fields["weights"]["weight"] = (np.array(fields["weights"]["weight"]) * is_known).tolist()
        fields["num_candidates"] = num_candidates
    for name in [name for name in features if name in ("share", "price", "bid")]:
        fields["float_features"][name] = features.pop(name)
    return fields


def _limits(config: LoaderConfig) -> dict[str, int]:
    """Return the most values that each key can have."""
    history, candidates = config.max_history_length, config.max_num_candidates
    limits = dict.fromkeys(("user_id", "age", "share"), 1) | {"tags": 5}
    limits |= dict.fromkeys(("item_id", "timestamp_ms"), history + candidates)
    limits |= dict.fromkeys(("action", "dwell", "price"), history + candidates * config.candidate_actions)
    if config.history_labels or not (candidates or config.labels):
        predicted = max(history - 1, 0) + candidates
    else:
        predicted = candidates or history
    limits |= dict.fromkeys(("label", "float_labels.label", "weight", "known"), predicted)
    if config.codes is not None:
        limits |= {"semantic_id": 2 * history, "candidate_id": 2, "label": 2 * predicted}
    return limits


STORES = st.lists(ROWS, min_size=1, max_size=3)


@settings(max_examples=150)
@given(st.one_of(SEQUENCES, SEMANTIC_IDS), STORES, st.booleans(), st.integers(0, 1), st.data())
def test_batches_equal_a_plain_collation(
    config: LoaderConfig, stores: list[Any], has_targets: bool, epoch: int, data: st.DataObject
) -> None:
    opened = [_store(rows, 100 * number, has_targets) for number, rows in enumerate(stores)]
    collate = Collate.create(config, opened[0].manifest)
    rows = [(store, row) for store in opened for row in range(len(store))]
    order = data.draw(st.permutations(range(len(rows))))
    ids = np.array(order[: data.draw(st.integers(0, len(rows)))], dtype=np.int64)
    groups, num_batches = group_by_store(opened, ids), len(ids) // config.batch_size + 1
    of_batches: dict[str, Any] = {"batch_size": config.batch_size, "num_batches": num_batches}
    batches = collate(groups, ids, **of_batches, seed=config.seed, epoch=epoch)
    expected = [_expected(config, rows[sample][0], rows[sample][1], epoch, sample) for sample in ids.tolist()]
    keys = list(collate.lengths(groups, DrawKey(0, 0, ids)).of_keys)
    of_keys = np.stack(list(collate.lengths(groups, DrawKey(0, 0, ids)).of_keys.values()))
    for number, batch in enumerate(batches):
        schema, first = schema_of(batch), number * config.batch_size
        check_contents(batch, schema)
        assert schema == schema_of(batches[0])
        assert [*schema.jagged_keys] == keys
        shown = expected[first : first + config.batch_size]
        padding = config.batch_size - len(shown)
        assert batch.num_real == len(shown)
        assert batch.sample_ids.tolist() == [*ids[first:][: len(shown)], *[-1] * padding]
        for row in shown:
            assert keys == [(name, key) for name in row if name != "num_candidates" for key in row[name]]
        for (name, key), lengths in zip(keys, of_keys, strict=True):
            is_float = name in ("float_features", "float_labels", "weights")
            assert getattr(batch, name).values().dtype == (torch.float32 if is_float else torch.int64)
            wanted = [row[name][key] for row in shown]
            found = rows_of(getattr(batch, name), key)
            np.testing.assert_equal(found, [*wanted, *[[]] * padding])  # NaN is NaN
            assert lengths[first : first + config.batch_size].tolist() == [*map(len, wanted)]
        loss_key: Any = batch.loss_key()
        assert batch.loss_tokens == sum(max(len(row[loss_key.field][loss_key.key]) - loss_key.skip, 0) for row in shown)
        if config.codes is None:
            counts = [row["num_candidates"] for row in shown]
            assert batch.num_candidates.tolist() == [*counts, *[0] * padding]
        limits = {name: limit for name, limit in _limits(config).items() if name in schema.key_names}
        assert batch.length_limits == limits
        if any(rows[sample][1] == len(rows[sample][0]) - 1 for sample in ids[first:][: len(shown)].tolist()):
            assert batch.max_lengths == limits


def test_the_newest_history_and_the_last_events_come_with_counts_on_the_host() -> None:
    """Of users of the items 10 to 12, none, and 30 to 35."""

    def collate(rows: list[int], **options: Any) -> Any:
        ids = np.array(rows, dtype=np.int64)
        made = Collate.create(LoaderConfig(batch_size=1, **options), STORE.manifest)
        (batch,) = made(group_by_store([STORE], ids), ids, batch_size=len(rows))
        return batch

    batch = collate([2, 0, 1])
    assert rows_of(batch.features, "item_id") == [[30, 31, 32, 33, 34, 35], [10, 11, 12], []]
    assert (batch.labels, batch.loss_tokens) == (None, 5 + 2 + 0)  # nothing predicts the first item of a history
    assert batch.features._length_per_key == [3, 3, 9, 9]  # so that no model synchronizes to count
    assert (batch.features._offset_per_key, batch.features._stride) == ([0, 3, 6, 15, 24], 3)
    batch = collate([0, 2], max_history_length=2, max_num_candidates=2, num_tasks=2)
    assert rows_of(batch.features, "item_id") == [[10, 11, 12], [32, 33, 34, 35]]
    assert rows_of(batch.features, "action") == [[0], [2, 3]]
    assert rows_of(batch.labels, "label") == [[1, 2], [4 & 3, 5 & 3]]  # the bits of two tasks
    codes = CodeTable(codes=OWN[:12].astype(np.int32), codebook_sizes=(8, 7))
    wrong: list[tuple[list[int], dict[str, Any], str]] = [
        ([3], {}, "rows must be between 0 and 2, got 3 to 3"),
        ([0, -1], {}, "rows must be between 0 and 2, got -1 to 0"),
        ([2, 0], {"max_num_candidates": 4}, "a row has fewer events than 4 candidates; it is not a sample"),
        ([0], {"codes": codes}, "has an item without a code"),
    ]
    for rows, options, message in wrong:
        with pytest.raises(IndexError, match=message):
            collate(rows, **options)


def test_an_item_without_a_code_counts_from_the_first_event_that_is_shown_to_the_last() -> None:
    """The first user has the items 10..12, the third 30..35, of which 33..35 are shown."""
    cases: dict[tuple[int, ...], list[int]] = {(): [], (10,): [0], (12,): [0], (30, 32): [], (33,): [2], (35,): [2]}
    for without_code, left_out in (cases | {(10, 35): [0, 2]}).items():
        codes = np.zeros((40, 1), dtype=np.int32)
        codes[list(without_code)] = -1
        config = LoaderConfig(batch_size=3, codes=CodeTable(codes=codes, codebook_sizes=(1,)), max_history_length=2)
        unusable = Collate.create(config, STORE.manifest).unusable(STORE)
        found = {reason: rows.tolist() for reason, rows in unusable.items()}
        assert found == {"no event to predict": [1], "an item without a code": left_out}
