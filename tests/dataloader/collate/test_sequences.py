from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, SequenceBatch
from evenrank.dataloader.collate.gather import StoreRows, group_by_store
from evenrank.dataloader.collate.sequences import SequenceCollate
from evenrank.datasets import open_store
from tests.dataloader.batch_helpers import rows_of
from tests.dataloader.collate.stores import ITEMS, STORE


def _collate(rows: list[int], **options: Any) -> SequenceBatch:
    defaults = {
        "max_history_length": 100,
        "max_num_candidates": 0,
        "user_id": False,
        "num_tasks": 0,
        "candidate_actions": False,
        "extra_events": (),
    }
    ids = np.array(rows, dtype=np.int64)
    collate = SequenceCollate(**{**defaults, **options})
    (batch,) = collate(group_by_store([STORE], ids), ids, batch_size=len(rows))
    return batch


def test_rows_come_in_the_requested_order() -> None:
    batch = _collate([2, 0, 1])
    assert batch.features.keys() == ["sex", "age", "item_id", "action"]
    assert rows_of(batch.features, "sex") == [[2], [1], [0]]
    assert rows_of(batch.features, "age") == [[9], [7], [8]]
    assert rows_of(batch.features, "item_id") == [[30, 31, 32, 33, 34, 35], [10, 11, 12], []]
    assert rows_of(batch.features, "action") == [[0, 1, 2, 3, 4, 5], [0, 1, 2], []]
    assert batch.features.values().dtype == torch.int64
    assert batch.labels is None
    assert batch.loss_tokens == 5 + 2 + 0  # the first item of a history has none to be predicted from
    assert batch.sample_ids.tolist() == [2, 0, 1]
    assert (batch.batch_size, batch.num_real) == (3, 3)


def test_user_ids_can_be_a_feature() -> None:
    batch = _collate([2, 0], user_id=True)
    assert batch.features.keys() == ["user_id", "sex", "age", "item_id", "action"]
    assert rows_of(batch.features, "user_id") == [[3], [1]]
    assert rows_of(batch.features, "sex") == [[2], [1]]
    assert batch.loss_tokens == 5 + 2
    assert batch.max_lengths is not None
    assert batch.max_lengths["user_id"] == 1


def test_the_newest_history_is_kept_and_the_last_events_are_candidates() -> None:
    batch = _collate([0, 2], max_history_length=2, max_num_candidates=2)
    assert rows_of(batch.features, "item_id") == [[10, 11, 12], [32, 33, 34, 35]]
    assert rows_of(batch.features, "action") == [[0], [2, 3]]
    assert rows_of(batch.labels, "label") == [[1, 2], [4, 5]]
    with_actions = _collate([2], max_history_length=2, max_num_candidates=2, candidate_actions=True)
    assert rows_of(with_actions.features, "action") == [[2, 3, 4, 5]]
    assert batch.num_candidates.tolist() == [2, 2]
    assert batch.loss_tokens == 4


def test_without_candidates_the_history_can_have_the_labels() -> None:
    batch = _collate([2, 1], max_history_length=2, num_tasks=1)
    assert rows_of(batch.features, "item_id") == [[34, 35], []]
    assert rows_of(batch.labels, "label") == [[4, 5], []]
    assert batch.loss_tokens == 2


def test_with_several_tasks_labels_keep_their_low_bits() -> None:
    batch = _collate([2], max_num_candidates=3, num_tasks=2)
    assert rows_of(batch.labels, "label") == [[3, 4 & 3, 5 & 3]]
    assert rows_of(_collate([2], max_num_candidates=3, num_tasks=1).labels, "label") == [[3, 4, 5]]


def test_extra_events_become_features() -> None:
    events = {**STORE.events, "timestamp_ms": ITEMS * 100, "play_time_ms": ITEMS * 1000}
    store = replace(STORE, events=events)
    config = LoaderConfig(
        batch_size=1, max_history_length=2, max_num_candidates=1, extra_events=("timestamp_ms", "play_time_ms")
    )
    collate = config.make_collate()
    collate.check(store)
    (batch,) = collate([StoreRows(store, np.array([2]), np.array([0]))], np.array([2]), batch_size=1)
    # The time at which a candidate is shown is known in advance; for how long it is then played is not.
    assert rows_of(batch.features, "timestamp_ms") == [[3300, 3400, 3500]]
    assert rows_of(batch.features, "play_time_ms") == [[33000, 34000]]
    assert batch.features.keys()[-2:] == ["timestamp_ms", "play_time_ms"]
    with pytest.raises(ConfigError, match="no extra events 'play_time_ms'; known: timestamp_ms"):
        collate.check(STORE)


def test_batches_made_together_equal_batches_made_one_by_one() -> None:
    ids = np.array([2, 0, 1, 2, 2])
    collate = LoaderConfig(batch_size=2, max_history_length=4, num_tasks=1).make_collate()
    batches = collate(group_by_store([STORE], ids), ids, batch_size=2, num_batches=4)
    assert [batch.num_real for batch in batches] == [2, 2, 1, 0]
    for number, batch in enumerate(batches):
        rows = ids[2 * number : 2 * number + 2]
        (alone,) = collate(group_by_store([STORE], rows), rows, batch_size=2)
        for field in ("features", "labels"):
            jagged, expected = getattr(batch, field), getattr(alone, field)
            assert jagged.values().tolist() == expected.values().tolist()
            assert jagged.lengths().tolist() == expected.lengths().tolist()
            assert jagged._offset_per_key == expected._offset_per_key
        assert batch.sample_ids.tolist() == alone.sample_ids.tolist()
        assert (batch.loss_tokens, batch.max_lengths) == (alone.loss_tokens, alone.max_lengths)


@pytest.mark.parametrize("rows", [[3], [-1], [0, 2, 1 << 40]])
def test_rows_out_of_range_are_refused(rows: list[int]) -> None:
    with pytest.raises(IndexError, match="rows must be between 0 and 2, got"):
        _collate(rows)


def test_rows_with_too_few_events_are_refused() -> None:
    with pytest.raises(IndexError, match="fewer events than 4 candidates"):
        _collate([2, 0], max_num_candidates=4)


def test_a_history_length_of_zero_leaves_the_candidates() -> None:
    batch = _collate([2], max_history_length=0, max_num_candidates=1)
    assert rows_of(batch.features, "item_id") == [[35]]
    assert rows_of(batch.features, "action") == [[]]


def test_no_rows_make_an_empty_batch() -> None:
    batch = _collate([], max_num_candidates=1)
    assert (batch.batch_size, batch.num_real, batch.loss_tokens) == (0, 0, 0)
    assert batch.features.values().tolist() == []


def test_host_side_caches_are_filled() -> None:
    features = _collate([0, 2]).features
    assert features._length_per_key == [2, 2, 9, 9]
    assert features._offset_per_key == [0, 2, 4, 13, 22]
    assert features._stride == 2


def test_batches_equal_slices_of_the_store(small_dataset: Path) -> None:
    store = open_store(small_dataset)
    rows = np.random.default_rng(0).integers(0, len(store), 40)
    collate = LoaderConfig(batch_size=1, max_history_length=5).make_collate()
    expected = [store.events["item_id"][store.offsets[r] : store.offsets[r + 1]][-5:].tolist() for r in rows]
    (batch,) = collate(group_by_store([store], rows), rows, batch_size=40)
    assert rows_of(batch.features, "item_id") == expected
