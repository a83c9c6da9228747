from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig
from evenrank.dataloader.collate.sequences import SequenceCollate
from evenrank.dataloader.collate.spans import Pick, pick_rows
from evenrank.datasets.schema import Manifest
from evenrank.datasets.store import SequenceStore

# Users with 3, 0 and 6 events; item ids 10.., 20.., 30.., actions are the item's last digit.
ITEMS = np.array([10, 11, 12, 30, 31, 32, 33, 34, 35])
STORE = SequenceStore(
    manifest=Manifest(
        schema_version=1,
        dataset="test",
        sources=(),
        options={},
        splits={},
        contextual=("sex", "age"),
        extra_events={},
        vocabulary_sizes={},
        context_labels={},
        content_hash="",
    ),
    split="train",
    offsets=np.array([0, 3, 3, 9]),
    events={"item_id": ITEMS, "action": (ITEMS % 10).astype(np.int32), "timestamp_ms": ITEMS * 0},
    rows={"user_id": np.array([1, 2, 3]), "sex": np.array([1, 0, 2]), "age": np.array([7, 8, 9])},
)


def _collate(rows: list[int], **options: object) -> "object":
    settings = {
        "max_history_length": 100,
        "max_num_candidates": 0,
        "num_tasks": 0,
        "candidate_actions": False,
        "extra_events": (),
        **options,
    }
    ids = np.array(rows, dtype=np.int64)
    collate = SequenceCollate(**settings)  # type: ignore[arg-type]
    (batch,) = collate(pick_rows([STORE], ids), ids, batch_size=len(rows))
    return batch


def _rows(batch: "object", field: str, key: str) -> list[list[int]]:
    jagged = getattr(batch, field)[key]
    return [row.tolist() for row in torch.split(jagged.values(), jagged.lengths().tolist())]


def test_rows_come_in_the_order_asked_for() -> None:
    batch = _collate([2, 0, 1])
    assert batch.features.keys() == ["sex", "age", "item_id", "action"]
    assert _rows(batch, "features", "sex") == [[2], [1], [0]]
    assert _rows(batch, "features", "age") == [[9], [7], [8]]
    assert _rows(batch, "features", "item_id") == [[30, 31, 32, 33, 34, 35], [10, 11, 12], []]
    assert _rows(batch, "features", "action") == [[0, 1, 2, 3, 4, 5], [0, 1, 2], []]
    assert batch.features.values().dtype == torch.int64
    assert batch.labels is None
    assert batch.loss_tokens == 9
    assert batch.sample_ids.tolist() == [2, 0, 1]
    assert (batch.batch_size, batch.num_real) == (3, 3)


def test_the_newest_history_is_kept_and_the_last_events_are_candidates() -> None:
    batch = _collate([0, 2], max_history_length=2, max_num_candidates=2)
    assert _rows(batch, "features", "item_id") == [[10, 11, 12], [32, 33, 34, 35]]
    assert _rows(batch, "features", "action") == [[0], [2, 3]]
    assert _rows(batch, "labels", "label") == [[1, 2], [4, 5]]
    assert batch.num_candidates.tolist() == [2, 2]
    assert batch.loss_tokens == 4


def test_candidates_can_have_their_actions_as_features() -> None:
    batch = _collate([2], max_history_length=1, max_num_candidates=2, candidate_actions=True)
    assert _rows(batch, "features", "item_id") == [[33, 34, 35]]
    assert _rows(batch, "features", "action") == [[3, 4, 5]]


def test_without_candidates_the_history_can_be_the_labels() -> None:
    batch = _collate([2, 1], max_history_length=2, num_tasks=1)
    assert _rows(batch, "features", "item_id") == [[34, 35], []]
    assert _rows(batch, "labels", "label") == [[4, 5], []]
    assert batch.loss_tokens == 2


def test_of_several_tasks_a_label_keeps_the_low_bits() -> None:
    batch = _collate([2], max_num_candidates=3, num_tasks=2)
    assert _rows(batch, "labels", "label") == [[3, 4 & 3, 5 & 3]]
    assert _rows(_collate([2], max_num_candidates=3, num_tasks=1), "labels", "label") == [[3, 4, 5]]


def test_further_events_become_features() -> None:
    events = {**STORE.events, "timestamp_ms": ITEMS * 100, "play_time_ms": ITEMS * 1000}
    store = replace(STORE, events=events)
    config = LoaderConfig(
        batch_size=1, max_history_length=2, max_num_candidates=1, extra_events=("timestamp_ms", "play_time_ms")
    )
    collate = config.make_collate()
    collate.check(store)
    (batch,) = collate([Pick(store, np.array([2]), np.array([0]))], np.array([2]), batch_size=1)
    # When a candidate is shown is known; for how long it is then played is not.
    assert _rows(batch, "features", "timestamp_ms") == [[3300, 3400, 3500]]
    assert _rows(batch, "features", "play_time_ms") == [[33000, 34000]]
    assert batch.features.keys()[-2:] == ["timestamp_ms", "play_time_ms"]
    with pytest.raises(ConfigError, match="no extra events 'play_time_ms'; it has timestamp_ms"):
        collate.check(STORE)


def test_several_batches_at_once_are_those_made_one_by_one() -> None:
    ids = np.array([2, 0, 1, 2, 2])
    collate = LoaderConfig(batch_size=2, max_history_length=4, num_tasks=1).make_collate()
    batches = collate(pick_rows([STORE], ids), ids, batch_size=2, num_batches=4)
    assert [batch.num_real for batch in batches] == [2, 2, 1, 0]
    for number, batch in enumerate(batches):
        rows = ids[2 * number : 2 * number + 2]
        (alone,) = collate(pick_rows([STORE], rows), rows, batch_size=2)
        for field in ("features", "labels"):
            one, other = getattr(batch, field), getattr(alone, field)
            assert one.values().tolist() == other.values().tolist()
            assert one.lengths().tolist() == other.lengths().tolist()
            assert one._offset_per_key == other._offset_per_key
        assert batch.sample_ids.tolist() == alone.sample_ids.tolist()
        assert (batch.loss_tokens, batch.max_lengths) == (alone.loss_tokens, alone.max_lengths)


@pytest.mark.parametrize("rows", [[3], [-1], [0, 2, 1 << 40]])
def test_rows_that_are_not_there_are_refused(rows: list[int]) -> None:
    with pytest.raises(IndexError, match=r"rows must lie in 0\.\.2"):
        _collate(rows)


def test_rows_with_too_few_events_are_refused() -> None:
    with pytest.raises(IndexError, match="fewer events than 4 candidates"):
        _collate([2, 0], max_num_candidates=4)


def test_no_history_leaves_the_candidates() -> None:
    batch = _collate([2], max_history_length=0, max_num_candidates=1)
    assert _rows(batch, "features", "item_id") == [[35]]
    assert _rows(batch, "features", "action") == [[]]


def test_no_rows_make_an_empty_batch() -> None:
    batch = _collate([], max_num_candidates=1)
    assert (batch.batch_size, batch.num_real, batch.loss_tokens) == (0, 0, 0)
    assert batch.features.values().tolist() == []


def test_host_side_caches_are_there_before_anybody_asks() -> None:
    features = _collate([0, 2]).features
    assert features._length_per_key == [2, 2, 9, 9]
    assert features._offset_per_key == [0, 2, 4, 13, 22]
    assert features._stride == 2


@pytest.mark.parametrize("seed", range(3))
def test_batches_equal_slices_of_the_store(small_dataset: Path, seed: int) -> None:
    from evenrank.datasets.store import open_store

    store = open_store(small_dataset)
    rows = np.random.default_rng(seed).integers(0, len(store), 40)
    collate = LoaderConfig(batch_size=1, max_history_length=5).make_collate()
    expected = [store.events["item_id"][store.offsets[r] : store.offsets[r + 1]][-5:].tolist() for r in rows]
    (batch,) = collate(pick_rows([store], rows), rows, batch_size=40)
    assert _rows(batch, "features", "item_id") == expected
