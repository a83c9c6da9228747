from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.dataloader import (
    JaggedBatch,
    JaggedCollate,
    LoaderConfig,
    RandomBatches,
    RandomData,
    RandomFeature,
    jagged,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost
from evenrank.dataloader.batches.padding import empty_batch, pad_batch
from evenrank.dataloader.batches.schema import check_contents, lengths_of, schema_of
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import StoreRows
from evenrank.datasets import SequenceStore
from evenrank.datasets.distributions import Uniform
from tests.dataloader.collate.stores import STORE
from tests.ranks import RankPool

CODES = random_codes(50, levels=3, codebook_size=8)
HISTORY = st.integers(0, 6)
SEQUENCES = st.builds(
    LoaderConfig,
    batch_size=st.integers(1, 4),
    max_history_length=HISTORY,
    max_num_candidates=st.integers(0, 4),
    num_tasks=st.integers(0, 1),
    candidate_actions=st.booleans(),
    extra_events=st.sampled_from([(), ("timestamp_ms",), ("play_time_ms",), ("price", "timestamp_ms")]),
    label=st.sampled_from([None, "price", "play_time_ms", ("action", "price")]),
    weight=st.sampled_from([None, "price", "share"]),
    user_id=st.booleans(),
)
SEMANTIC_IDS = st.builds(
    LoaderConfig,
    batch_size=st.integers(1, 4),
    codes=st.just(CODES),
    max_history_length=HISTORY,
    label_offsets=st.booleans(),
    history_labels=st.booleans(),
    candidate_feature=st.booleans(),
    user_id=st.booleans(),
)


def _store(num_events: Sequence[int], num_tags: Sequence[int], num_targets: Sequence[int] | None) -> SequenceStore:
    """Return a store with a contextual feature of one value, and one of up to 5 values."""
    offsets, tag_offsets = (np.concatenate([[0], np.cumsum(counts)]) for counts in (num_events, num_tags))
    events = np.arange(offsets[-1])
    of_items = {"item_id": events % 50, "action": (events % 4).astype(np.int32)}
    rows = np.arange(len(num_events))
    return replace(
        STORE,
        manifest=replace(
            STORE.manifest,
            contextual={"age": "int64", "tags": "list<int64>", "share": "float32"},
            extra_events={"play_time_ms": "int64", "price": "float32"},
        ),
        offsets=offsets,
        columns={
            "user_id": rows,
            "age": rows,
            "tags": np.arange(tag_offsets[-1]),
            "share": rows / np.float32(4),
            **of_items,
            "timestamp_ms": events,
            "play_time_ms": events,
            "price": events / np.float32(2),
        },
        list_offsets={"tags": tag_offsets},
        list_limits={"tags": 5},
        num_targets=None if num_targets is None else np.array(num_targets, dtype=np.int32),
    )


def _batches(config: LoaderConfig, store: SequenceStore) -> list[JaggedBatch]:
    collate = Collate.create(config, store.manifest)
    left_out = np.concatenate([[], *collate.unusable(store).values()])
    rows = np.setdiff1d(np.arange(len(store)), left_out).astype(np.int64)
    groups = [StoreRows(store, rows, np.arange(len(rows)))]
    num_batches = len(rows) // config.batch_size + 1
    return list(collate(groups, rows, batch_size=config.batch_size, num_batches=num_batches))


@given(
    config=st.one_of(SEQUENCES, SEMANTIC_IDS),
    users=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=12),
    has_targets=st.booleans(),
)
def test_rows_keep_their_limits(config: LoaderConfig, users: list[tuple[int, int, int]], has_targets: bool) -> None:
    num_events, num_tags, num_targets = zip(*users, strict=True)
    targets = [min(pair) for pair in zip(num_events, num_targets, strict=True)] if has_targets else None
    batches = _batches(config, _store(num_events, num_tags, targets))
    for batch in batches:
        check_contents(batch, schema_of(batch))
        schema = schema_of(batch)
        assert dict(schema.length_limits) == batch.length_limits
        longest = dict(zip(schema.key_names, lengths_of(batch).max(axis=1, initial=0), strict=True))
        assert longest.keys() == batch.length_limits.keys()
        assert all(longest[key] <= limit for key, limit in batch.length_limits.items())
    assert len({schema_of(batch) for batch in batches}) == 1


@given(config=st.one_of(SEQUENCES, SEMANTIC_IDS))
def test_long_histories_reach_every_limit_in_one_sample(config: LoaderConfig) -> None:
    # So the limits of several keys may be added up to that of an interleaved sequence.
    batch = _batches(config, _store([20], [5], None))[0]
    assert batch.max_lengths == batch.length_limits
    cost = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=True, contextual=("age", "tags"))
    if config.codes is None and not config.candidate_actions:
        limits = {key: np.array([limit]) for key, limit in (batch.length_limits or {}).items()}
        assert cost.tokens(limits).tolist() == [2 * config.max_history_length + config.max_num_candidates + 1 + 5]


def test_limits_are_kept_by_everything_that_makes_a_batch_of_another() -> None:
    config = LoaderConfig(batch_size=2, max_history_length=10)
    batch = _batches(config, _store([30, 2], [5, 1], None))[0]
    schema = schema_of(batch)
    limits = {"age": 1, "tags": 5, "item_id": 10, "action": 10, "share": 1}
    others = (pad_batch(batch, 5), batch.slice(1, 2), batch.to("cpu"), batch.replace(step=3), empty_batch(schema))
    for other in (batch, *others):
        assert other.length_limits == limits
        check_contents(other, schema_of(other))
    longer = replace(schema, length_limits=tuple(sorted((limits | {"item_id": 11, "action": 11}).items())))
    assert schema.differences(longer) == ["length limit of action: 10 and 11", "length limit of item_id: 10 and 11"]
    unlimited = replace(schema, length_limits=())
    assert "length limit of age: 1 and None" in schema.differences(unlimited)
    assert empty_batch(unlimited).length_limits is None


def test_a_transform_that_makes_rows_longer_is_refused_until_it_raises_the_limit() -> None:
    batch = _batches(LoaderConfig(batch_size=1, max_history_length=9), _store([9], [0], None))[0]
    lower = batch.replace(length_limits={"item_id": 8})
    with pytest.raises(ValueError, match="item_id has a row of 9 values, more than its limit, 8; a transform"):
        check_contents(lower, schema_of(lower))
    limits: list[dict[str, int] | None] = [{"item_id": 9, "action": 20}, None]
    for raised in (lower.replace(length_limits=limit) for limit in limits):
        check_contents(raised, schema_of(raised))
        with pytest.raises(ValueError, match=r"^a batch differs from the first one: length limit of "):
            check_contents(raised, schema_of(lower))


def test_the_values_of_anyones_samples_can_have_limits() -> None:
    declared = {"item_id": jagged(max_length=3), "tags": jagged(field="more"), "user": jagged(max_length=1)}
    collate = JaggedCollate(declared)
    batch = collate([{"item_id": [1, 2, 3], "tags": [4] * 9, "user": [5]}])
    assert batch.length_limits == {"item_id": 3, "user": 1}
    check_contents(batch, schema_of(batch))
    with pytest.raises(DataError, match="sample 1 of a batch has 4 values of 'item_id', more than its max_length, 3"):
        collate([{"item_id": [], "tags": [], "user": [5]}, {"item_id": [1] * 4, "tags": [], "user": [5]}])
    assert JaggedCollate({"item_id": jagged()})([{"item_id": [1]}]).length_limits is None


TAGS = RandomFeature(values=Uniform(low=0, high=9), lengths=Uniform(low=0, high=9), max_length=4)
DATA = RandomData(lengths=Uniform(low=0, high=20), items=Uniform(low=0, high=49), contextual={"tags": TAGS})


def _balanced(rank: int, world_size: int, max_history_length: int) -> list[tuple[Any, Any, list[int]]]:
    config = LoaderConfig(batch_size=4, codes=CODES, max_history_length=max_history_length, user_id=True)
    # The last rank runs out of batches first, and gets empty ones from then on.
    batches = RandomBatches(config, DATA, num_batches=3 if rank == world_size - 1 else 6)
    cost = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False, history_key="semantic_id")
    with Balancer(list(batches), BalanceConfig(cost=cost)) as balancer:
        steps = [(batch, lengths_of(batch).max(axis=1, initial=0).tolist()) for batch in balancer]
    return [(batch.length_limits, batch.max_lengths, longest) for batch, longest in steps]


def test_limits_are_the_same_on_all_ranks_and_hold_after_balancing(ranks: RankPool) -> None:
    balanced = ranks.run(3, _balanced, 7)
    assert [len(steps) for steps in balanced] == [6, 6, 6]
    for limits, max_lengths, longest in (step for steps in balanced for step in steps):
        assert limits == {"user_id": 1, "tags": 4, "semantic_id": 21, "label": 3}
        assert list(max_lengths.values()) == longest
        assert all(max_lengths[key] <= limit for key, limit in limits.items())
