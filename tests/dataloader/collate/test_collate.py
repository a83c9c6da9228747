from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, SequenceBatch
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import StoreRows, group_by_store
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.batch_helpers import rows_of
from tests.dataloader.collate.stores import ITEMS, STORE


def _collate(rows: list[int], **options: Any) -> SequenceBatch:
    ids = np.array(rows, dtype=np.int64)
    collate = Collate.create(LoaderConfig(batch_size=1, **options), STORE.manifest)
    batch: SequenceBatch
    (batch,) = collate(group_by_store([STORE], ids), ids, batch_size=len(rows))
    return batch


@pytest.mark.parametrize("user_id", [False, True])
def test_rows_come_in_the_requested_order(user_id: bool) -> None:
    batch = _collate([2, 0, 1], user_id=user_id)
    assert batch.features.keys() == ["user_id"] * user_id + ["sex", "age", "item_id", "action"]
    if user_id:
        assert rows_of(batch.features, "user_id") == [[3], [1], [2]]
    assert rows_of(batch.features, "sex") == [[2], [1], [0]]
    assert rows_of(batch.features, "age") == [[9], [7], [8]]
    assert rows_of(batch.features, "item_id") == [[30, 31, 32, 33, 34, 35], [10, 11, 12], []]
    assert rows_of(batch.features, "action") == [[0, 1, 2, 3, 4, 5], [0, 1, 2], []]
    assert batch.features.values().dtype == torch.int64
    assert batch.labels is None
    assert batch.loss_tokens == 5 + 2 + 0  # the first item of a history has none to be predicted from
    assert batch.sample_ids.tolist() == [2, 0, 1]
    assert (batch.batch_size, batch.num_real) == (3, 3)
    lengths_per_key = [3] * user_id + [3, 3, 9, 9]
    assert batch.features._length_per_key == lengths_per_key
    assert batch.features._offset_per_key == [0, *np.cumsum(lengths_per_key)]
    assert batch.features._stride == 3
    assert list((batch.max_lengths or {}).values()) == [1] * user_id + [1, 1, 6, 6]


def test_the_newest_history_is_kept_and_the_last_events_are_candidates() -> None:
    batch = _collate([0, 2], max_history_length=2, max_num_candidates=2)
    assert rows_of(batch.features, "item_id") == [[10, 11, 12], [32, 33, 34, 35]]
    assert rows_of(batch.features, "action") == [[0], [2, 3]]
    assert rows_of(batch.labels, "label") == [[1, 2], [4, 5]]
    assert batch.num_candidates.tolist() == [2, 2]
    assert batch.loss_tokens == 4
    with_actions = _collate([2], max_history_length=2, max_num_candidates=2, candidate_actions=True)
    assert rows_of(with_actions.features, "action") == [[2, 3, 4, 5]]
    without_history = _collate([2], max_history_length=0, max_num_candidates=1)
    assert rows_of(without_history.features, "item_id") == [[35]]
    assert rows_of(without_history.features, "action") == [[]]
    empty = _collate([], max_num_candidates=1)
    assert (empty.batch_size, empty.num_real, empty.loss_tokens) == (0, 0, 0)
    assert empty.features.values().tolist() == []
    with pytest.raises(IndexError, match="fewer events than 4 candidates"):
        _collate([2, 0], max_num_candidates=4)


def test_labels_are_those_of_the_candidates_or_of_the_history_and_keep_the_low_bits_of_several_tasks() -> None:
    batch = _collate([2, 1], max_history_length=2, num_tasks=1)
    assert rows_of(batch.features, "item_id") == [[34, 35], []]
    assert rows_of(batch.labels, "label") == [[4, 5], []]
    assert batch.loss_tokens == 2
    assert rows_of(_collate([2], max_num_candidates=3, num_tasks=2).labels, "label") == [[3, 4 & 3, 5 & 3]]
    assert rows_of(_collate([2], max_num_candidates=3, num_tasks=1).labels, "label") == [[3, 4, 5]]


def test_extra_events_become_features() -> None:
    columns = {**STORE.columns, "timestamp_ms": ITEMS * 100, "play_time_ms": ITEMS * 1000}
    manifest = replace(STORE.manifest, extra_events={"play_time_ms": "int64"})
    store = replace(STORE, columns=columns, manifest=manifest)
    config = LoaderConfig(
        batch_size=1, max_history_length=2, max_num_candidates=1, extra_events=("timestamp_ms", "play_time_ms")
    )
    collate = Collate.create(config, manifest)
    (batch,) = collate([StoreRows(store, np.array([2]), np.array([0]))], np.array([2]), batch_size=1)
    # The time at which a candidate is shown is known in advance; for how long it is then played is not.
    assert rows_of(batch.features, "timestamp_ms") == [[3300, 3400, 3500]]
    assert rows_of(batch.features, "play_time_ms") == [[33000, 34000]]
    assert batch.features.keys()[-2:] == ["timestamp_ms", "play_time_ms"]
    with pytest.raises(ConfigError, match="no extra events 'play_time_ms'; known: timestamp_ms"):
        collate.of(STORE.manifest)


def test_batches_made_together_equal_batches_made_one_by_one() -> None:
    ids = np.array([2, 0, 1, 2, 2])
    collate = Collate.create(LoaderConfig(batch_size=2, max_history_length=4, num_tasks=1), STORE.manifest)
    batches = collate(group_by_store([STORE], ids), ids, batch_size=2, num_batches=4)
    assert [batch.num_real for batch in batches] == [2, 2, 1, 0]
    for number, batch in enumerate(batches):
        rows = ids[2 * number : 2 * number + 2]
        (alone,) = collate(group_by_store([STORE], rows), rows, batch_size=2)
        assert bits_of(batch) == bits_of(alone)


@pytest.mark.parametrize("rows", [[3], [-1], [0, 2, 1 << 40]])
def test_rows_out_of_range_are_refused(rows: list[int]) -> None:
    with pytest.raises(IndexError, match="rows must be between 0 and 2, got"):
        _collate(rows)
