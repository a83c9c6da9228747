import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from evenrank.core.errors import ConfigError, DataError, StateError
from evenrank.dataloader import (
    Loader,
    LoaderConfig,
    Mixture,
    SequenceBatch,
    build_loader,
    build_stream_loader,
)
from evenrank.dataloader.codes import CodeTable
from evenrank.datasets import open_store
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.collate.stores import STORE
from tests.datasets.crafted import add_targets, change_table, copy_dataset, set_columns, update_manifest


def _loaders(path: Path | Mixture, world_size: int, **options: object) -> list[Loader[SequenceBatch]]:
    config = LoaderConfig(**{"batch_size": 8, **options})  # type: ignore[arg-type]
    return [build_loader(path, config, rank=rank, world_size=world_size) for rank in range(world_size)]


def test_batches_contain_the_events_of_their_users(small_dataset: Path, tmp_path: Path) -> None:
    with_targets = copy_dataset(small_dataset, tmp_path / "data")
    change_table(with_targets, lambda table: add_targets(table, np.minimum(table["length"].to_numpy(), 2)))
    store = open_store(small_dataset)
    # A row has no more candidates than targets; without their numbers, users with fewer events are left out.
    for path, fewest, options in (
        (small_dataset, 3, {"max_num_candidates": 3}),
        (with_targets, 0, {"max_num_candidates": 5}),
    ):
        (loader,) = _loaders(path, 1, max_history_length=10, extra_events=("timestamp_ms",), **options)
        seen = []
        for batch in loader:
            assert batch.labels is not None
            jagged = {**batch.features.to_dict(), **batch.labels.to_dict()}
            assert batch.max_lengths == {key: int(value.lengths().max()) for key, value in jagged.items()}
            items, labels = rows_of(batch.features, "item_id"), rows_of(batch.labels, "label")
            for row, sample in enumerate(ids_of(batch)):
                span = slice(store.offsets[sample], store.offsets[sample + 1])
                num_candidates = fewest or min(2, int(store.lengths[sample]))
                assert batch.num_candidates[row] == num_candidates
                assert items[row] == store.columns["item_id"][span][-10 - num_candidates :].tolist()
                assert labels[row] == store.columns["action"][span].tolist()[store.lengths[sample] - num_candidates :]
                seen.append(sample)
        assert sorted(seen) == np.flatnonzero(store.lengths >= fewest).tolist()
        assert loader.num_dropped == np.count_nonzero(store.lengths < fewest)
    batches = list(build_loader(STORE, LoaderConfig(batch_size=2), rank=0, world_size=1))
    assert STORE.lengths.tolist() == [3, 0, 6]  # an empty history is a sample
    assert sorted(sample for batch in batches for sample in ids_of(batch)) == [0, 1, 2]
    assert [batch.num_real for batch in batches] == [2, 1]


def test_a_state_is_that_after_the_last_batch_by_default_and_not_of_other_data_or_filters(small_dataset: Path) -> None:
    (loader,) = _loaders(small_dataset, 1)
    length = len(loader)
    batches = list(itertools.islice(loader, 5))
    state = loader.state_dict()
    assert state == loader.state_dict(after=batches[-1])
    assert state["position"] == 40
    (resumed,) = _loaders(small_dataset, 1)
    resumed.load_state_dict(state)
    assert (len(resumed), resumed.remaining_batches()) == (length, length - 5)
    assert len(list(resumed)) == length - 5
    assert (len(resumed), resumed.remaining_batches()) == (length, length)
    (other,) = _loaders(small_dataset, 1, max_num_candidates=3)
    with pytest.raises(StateError, match="is of other data, codes or filters"):
        other.load_state_dict(state)
    with pytest.raises(StateError, match="version 2, expected 6; load it with the version of evenrank that saved it"):
        loader.load_state_dict({**state, "version": 2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_num_candidates": -1}, "max_num_candidates must be at least 0, got -1"),
        ({"order": "random"}, "LoaderConfig: order must be one of rows, shuffle, got 'random'"),
        ({"order": 5}, r"LoaderConfig: order must be of type str \| Order, got 5"),
        ({"num_tasks": 32}, "LoaderConfig: num_tasks must be at least 0 and at most 31, got 32"),
        ({"context": "age"}, r"LoaderConfig: context must be of type tuple\[str, \.\.\.\] \| None, got 'age'"),
        ({"extra_events": "price"}, r"extra_events must be of type tuple\[str, \.\.\.\], got 'price'"),
        ({"prefetch": 0}, "prefetch must be at least 1, got 0"),
        *(
            ({"seed": seed}, rf"LoaderConfig: seed must be {expected}, got {seed}")
            for seed, expected in (
                (1 << 63, r"at least -2\^63 and below 2\^63"),
                *((wrong, "of type int") for wrong in (0.5, True, None)),
            )
        ),
        ({}, "rank must be between 0 and world_size - 1, got rank 2 of 2"),
    ],
)
def test_invalid_settings_are_refused(small_dataset: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_loader(small_dataset, LoaderConfig(**{"batch_size": 8, **options}), rank=2, world_size=2)


def test_the_order_by_row_is_ascending_in_every_epoch(small_dataset: Path) -> None:
    (loader,) = _loaders(small_dataset, 1, order="rows")
    for _ in range(2):
        assert [sample for batch in loader for sample in ids_of(batch)] == list(range(loader.num_samples))


def test_a_mixture_numbers_the_rows_of_its_datasets_consecutively(small_dataset: Path) -> None:
    store = open_store(small_dataset)
    mixture = Mixture(weights={small_dataset: 1, str(small_dataset): 3}, num_samples=200)
    config = LoaderConfig(batch_size=16, max_history_length=9, user_id=True)
    loader = build_loader(mixture, config, rank=0, world_size=1)
    seen = []
    for batch in loader:
        items = rows_of(batch.features, "item_id")
        users, segments = (batch.features[key].values().tolist() for key in ("user_id", "segment"))
        assert max(users) < store.manifest.vocabulary_sizes["user_id"]
        for row, sample in enumerate(ids_of(batch)):
            span = slice(store.offsets[sample % len(store)], store.offsets[sample % len(store) + 1])
            assert items[row] == store.columns["item_id"][span][-9:].tolist()
            assert segments[row] == store.columns["segment"][sample % len(store)]
            assert users[row] == store.columns["user_id"][sample % len(store)]
        seen += ids_of(batch)
    assert (len(seen), sum(sample < len(store) for sample in seen)) == (200, 50)


def test_mixtures_with_unequal_features_or_another_order_are_refused(small_dataset: Path, tmp_path: Path) -> None:
    other = copy_dataset(small_dataset, tmp_path / "other")
    update_manifest(other, contextual={})
    with pytest.raises(
        DataError,
        match=r"other and .*data differ in length limit of segment: None and 1; features: .*action and .*segment, item",
    ):
        _loaders(Mixture(weights={small_dataset: 1, other: 1}), 1)
    with pytest.raises(ConfigError, match="mixtures are always shuffled; order must be 'shuffle', got 'rows'"):
        _loaders(Mixture(weights={small_dataset: 1}), 1, order="rows")
    with pytest.raises(
        ConfigError, match=r"Mixture: weights must be of at least one dataset, as \{folder: weight\}, got \{\}"
    ):
        Mixture(weights={})


def test_an_open_loader_keeps_its_data_when_the_folder_is_replaced(small_dataset: Path, tmp_path: Path) -> None:
    out = copy_dataset(small_dataset, tmp_path / "data")
    (loader,) = _loaders(out, 1, order="rows")
    before = [batch.features["item_id"].values().tolist() for batch in loader]
    pickled = pickle.dumps(loader)
    out.rename(tmp_path / "old")
    ones = pa.array([1] * len(open_store(small_dataset)))
    change_table(copy_dataset(small_dataset, out), set_columns({"segment": ones}))
    assert [batch.features["item_id"].values().tolist() for batch in loader] == before
    with pytest.raises(DataError, match=r"data was replaced by other data after it was opened; open it again"):
        pickle.loads(pickled)
    with pytest.raises(StateError, match="is of other data"):
        _loaders(out, 1, order="rows")[0].load_state_dict(loader.state_dict())


@pytest.mark.gpu
def test_every_tensor_is_pinned_with_pin_memory() -> None:
    config = LoaderConfig(batch_size=2, max_num_candidates=1, pin_memory=True, num_workers=1)
    for batch in build_loader(STORE, config, rank=0, world_size=1):
        for jagged in (batch.features, batch.labels):
            assert jagged is not None
            assert jagged.values().is_pinned()
            assert jagged.lengths().is_pinned()
        assert batch.sample_ids.is_pinned()
        assert batch.num_candidates.is_pinned()


def test_negative_user_ids_cannot_be_a_feature(small_dataset: Path, tmp_path: Path) -> None:
    dataset = copy_dataset(small_dataset, tmp_path / "data")
    ids = -1 - np.arange(len(open_store(small_dataset)))
    change_table(dataset, set_columns({"user_id": pa.array(ids)}))
    codes = CodeTable(codes=np.zeros((501, 2), dtype=np.int32), codebook_sizes=(1, 1))
    configs: list[Any] = [
        LoaderConfig(batch_size=4, user_id=True),
        LoaderConfig(batch_size=4, codes=codes, user_id=True),
    ]
    for config in configs:
        with pytest.raises(DataError, match=rf"data has user {ids[-1]}; number its users from 0, or leave"):
            build_loader(dataset, config, rank=0, world_size=1)
        with pytest.raises(DataError, match=r"the dataset has user -\d+; number its users from 0"):
            list(build_stream_loader(dataset, config, rank=0, world_size=1))
    assert sum(batch.num_real for batch in _loaders(dataset, 1)[0]) == len(ids)
