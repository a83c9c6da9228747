import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch, build_loader
from evenrank.datasets import open_store
from evenrank.datasets.errors import ConfigError, StateError
from tests.dataloader.test_collate import STORE


def _ids(batch: SequenceBatch) -> list[int]:
    return batch.sample_ids[: batch.num_real].tolist()


def _loaders(path: Path, world_size: int, **options: object) -> list[Loader[SequenceBatch]]:
    config = LoaderConfig(**{"batch_size": 8, **options})  # type: ignore[arg-type]
    return [build_loader(path, config, rank=rank, world_size=world_size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_comes_once_an_epoch_in_batches_of_full_size(
    small_dataset: Path, world_size: int, num_workers: int
) -> None:
    loaders = _loaders(small_dataset, world_size, num_workers=num_workers)
    batches = [list(loader) for loader in loaders]
    num_steps = len(batches[0])
    assert [len(of_rank) for of_rank in batches] == [num_steps] * world_size
    ids = [sample for of_rank in batches for batch in of_rank for sample in _ids(batch)]
    assert sorted(ids) == list(range(len(open_store(small_dataset))))
    for step, batch in itertools.chain.from_iterable(enumerate(of_rank) for of_rank in batches):
        assert batch.batch_size == batch.features.stride() == len(batch.sample_ids) == 8
        assert batch.sample_ids[batch.num_real :].eq(-1).all()
        assert batch.step == step


def test_batches_hold_the_users_own_events(small_dataset: Path) -> None:
    store = open_store(small_dataset)
    for batch in _loaders(small_dataset, 1, max_history_length=10, max_num_candidates=2)[0]:
        items = torch.split(batch.features["item_id"].values(), batch.features["item_id"].lengths().tolist())
        labels = torch.split(batch.labels["label"].values(), batch.labels["label"].lengths().tolist())
        for row, sample in enumerate(_ids(batch)):
            span = slice(store.offsets[sample], store.offsets[sample + 1])
            assert items[row].tolist() == store.events["item_id"][span][-12:].tolist()
            assert labels[row].tolist() == store.events["action"][span][-2:].tolist()


def test_the_length_of_a_loader_is_the_number_of_its_batches(small_dataset: Path) -> None:
    for drop_last in (False, True):
        loader = _loaders(small_dataset, 3, drop_last=drop_last)[2]
        assert len(loader) == len(list(loader))


def test_dropping_the_last_step_leaves_only_full_batches(small_dataset: Path) -> None:
    loaders = _loaders(small_dataset, 3, drop_last=True)
    assert all(batch.num_real == 8 for loader in loaders for batch in loader)


def test_epochs_differ_and_repeat_by_seed(small_dataset: Path) -> None:
    one, other = _loaders(small_dataset, 1)[0], _loaders(small_dataset, 1)[0]
    epochs = [[_ids(batch) for batch in one] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert [[_ids(batch) for batch in other] for _ in range(2)] == epochs
    assert [_ids(batch) for batch in _loaders(small_dataset, 1, seed=1)[0]] != epochs[0]


def test_without_shuffling_rows_come_in_their_order(small_dataset: Path) -> None:
    loader = _loaders(small_dataset, 1, order="rows")[0]
    assert [sample for batch in loader for sample in _ids(batch)] == list(range(loader.num_samples))


def test_users_with_too_few_events_are_left_out_and_counted(small_dataset: Path) -> None:
    lengths = open_store(small_dataset).lengths
    loader = _loaders(small_dataset, 1, max_num_candidates=3)[0]
    ids = [sample for batch in loader for sample in _ids(batch)]
    assert sorted(ids) == np.flatnonzero(lengths >= 3).tolist()
    assert loader.num_dropped == np.count_nonzero(lengths < 3) > 0


def test_empty_histories_are_real() -> None:
    assert STORE.lengths.tolist() == [3, 0, 6]
    config = LoaderConfig(batch_size=2)
    batches = list(Loader([STORE], config.make_collate(), config, rank=0, world_size=1))
    assert sorted(sample for batch in batches for sample in _ids(batch)) == [0, 1, 2]
    assert [batch.num_real for batch in batches] == [2, 1]


def _stop_and_resume(small_dataset: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def shape() -> dict[str, int]:
        return {"batch_size": int(rng.integers(1, 20)), "num_workers": int(rng.integers(0, 3))}

    world_size, stop = int(rng.integers(1, 5)), int(rng.integers(0, 12))
    first = _loaders(small_dataset, world_size, seed=int(rng.integers(0, 100)), **shape())
    iterators = [iter(loader) for loader in first]
    trained: list[int] = []
    last: SequenceBatch | None = None
    for _ in range(stop):
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            break
        trained += [sample for batch in batches for sample in _ids(batch)]
        last = batches[int(rng.integers(0, world_size))]
    # Pull ahead, as training pipelines do: the state is that of the batch trained last.
    for iterator in iterators:
        list(itertools.islice(iterator, int(rng.integers(0, 3))))
    if last is None:
        return
    state = first[int(rng.integers(0, world_size))].state_dict(after=last)
    second = _loaders(small_dataset, int(rng.integers(1, 5)), **shape())
    for loader in second:
        loader.load_state_dict(state)
    rest = [sample for loader in second for batch in loader for sample in _ids(batch)]
    if state["position"] < first[0].num_samples:
        assert sorted(trained + rest) == list(range(first[0].num_samples))
    else:  # the epoch was over
        assert sorted(trained) == sorted(rest) == list(range(first[0].num_samples))


@pytest.mark.parametrize("seed", range(30))
def test_training_resumes_anywhere_with_exactly_the_samples_that_are_left(small_dataset: Path, seed: int) -> None:
    _stop_and_resume(small_dataset, seed)


@pytest.mark.long
def test_training_resumes_anywhere_in_many_rounds(small_dataset: Path) -> None:
    for seed in range(100, 400):
        _stop_and_resume(small_dataset, seed)


def test_a_state_without_a_batch_is_that_after_the_last_one(small_dataset: Path) -> None:
    loader = _loaders(small_dataset, 1)[0]
    batches = list(itertools.islice(loader, 3))
    assert loader.state_dict() == loader.state_dict(after=batches[-1])
    assert loader.state_dict()["position"] == 24


def test_a_state_of_other_data_or_filters_is_refused(small_dataset: Path) -> None:
    state = _loaders(small_dataset, 1, max_num_candidates=3)[0].state_dict()
    with pytest.raises(StateError, match="belongs to other data or filters"):
        _loaders(small_dataset, 1)[0].load_state_dict(state)
    with pytest.raises(StateError, match="version 9"):
        _loaders(small_dataset, 1)[0].load_state_dict({**state, "version": 9})


def test_an_error_while_collating_reaches_the_caller(small_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = _loaders(small_dataset, 1, num_workers=2)[0]

    def fail(*arguments: object, **options: object) -> list[SequenceBatch]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(loader, "_collate", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"max_num_candidates": -1}, "max_num_candidates must be a whole number of at least 0, got -1"),
        ({"prefetch": 0}, "prefetch must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_settings_name_the_value(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoaderConfig(**{"batch_size": 8, **options})  # type: ignore[arg-type]


def test_a_rank_outside_the_world_is_refused(small_dataset: Path) -> None:
    with pytest.raises(ConfigError, match="got rank 2 of 2"):
        build_loader(small_dataset, LoaderConfig(batch_size=8), rank=2, world_size=2)
