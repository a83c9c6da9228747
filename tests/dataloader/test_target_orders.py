"""Loaders of chosen targets: users held out of training, a window that is evaluated again and again, and states."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import StateError
from evenrank.dataloader import LoaderConfig, Targets, TimeWindows, build_loader
from evenrank.datasets import open_store
from tests.dataloader.batch_helpers import ids_of, rows_of

TRAINED, HELD_OUT = "fraction(user_id, 7) < 0.7", "fraction(user_id, 7) >= 0.7"


def _load(path: Path, order: Any, rank: int = 0, world_size: int = 1, batch_size: int = 8, **options: Any) -> Any:
    config = LoaderConfig(
        batch_size=batch_size,
        max_num_candidates=1,
        max_history_length=9,
        order=order,
        user_id=True,
        extra_events=("timestamp_ms",),
        **options,
    )
    return build_loader(path, config, rank=rank, world_size=world_size)


def _targets(loader: Any) -> Iterator[tuple[int, int]]:
    """Yield the user and the time of each target of an epoch."""
    for batch in loader:
        rows = zip(*(rows_of(batch.features, name) for name in ("user_id", "timestamp_ms")), strict=True)
        yield from ((user, times[-1]) for (user, *_), times in itertools.islice(rows, batch.num_real))


def test_held_out_users_are_never_trained_and_evaluated_on_one_window_again_and_again(small_dataset: Path) -> None:
    train, evaluated = (
        _load(small_dataset, TimeWindows(every="2w", start="first", where=where)) for where in (TRAINED, HELD_OUT)
    )
    trained = [target for _ in range(train.num_windows) for target in _targets(train)]
    whole = [target for _ in range(evaluated.num_windows) for target in _targets(evaluated)]
    assert {user for user, _ in trained}.isdisjoint({user for user, _ in whole})
    store = open_store(small_dataset)
    users = np.repeat(store.columns["user_id"], store.lengths).tolist()
    assert sorted(trained + whole) == sorted(zip(users, store.columns["timestamp_ms"].tolist(), strict=True))

    order = TimeWindows(every="2w", start=train.window(1)[0].isoformat(), where=HELD_OUT, within="user")
    begin_ms, end_ms = (round(time.timestamp() * 1000) for time in train.window(1))
    expected = [target for target in whole if begin_ms <= target[1] < end_ms]
    assert len(expected) > 20
    seen = []
    for world_size in (1, 2, 3):
        ranks = [_load(small_dataset, order, rank, world_size, batch_size=3) for rank in range(world_size)]
        for _ in range(2):
            for loader in ranks:
                loader.begin_at(0)
            steps = list(zip(*ranks, strict=True))
            seen.append([sample for step in steps for batch in step for sample in ids_of(batch)])
            for loader in ranks:
                loader.begin_at(0)
            assert sorted(target for loader in ranks for target in _targets(loader)) == sorted(expected)
        for loader in ranks:
            loader.begin_at(0)
        _, second = (next(zip(*iterators, strict=True)) for iterators in [[iter(loader) for loader in ranks]] * 2)
        state = ranks[0].state_dict(after=second[0])
        resumed = _load(small_dataset, order, batch_size=5)
        resumed.load_state_dict(state)
        rest = [sample for batch in resumed for sample in ids_of(batch)]
        assert rest == [*range(2 * 3 * world_size, len(expected))]
        resumed.begin_at(0)
        assert sum(batch.num_real for batch in resumed) == len(expected)
    assert seen == [[*range(len(expected))]] * 6  # the same in each run, in the order of users


@pytest.mark.parametrize("segment", [0.1, 0.33, 1.0])
def test_an_epoch_is_shuffled_within_segments_of_users(small_dataset: Path, segment: float) -> None:
    loader = _load(small_dataset, Targets(min_history=2, segment=segment))
    num_samples, (store,) = loader.num_samples, loader.stores
    size, rows = round(segment * num_samples), store.slices.rows
    assert (np.diff(rows) >= 0).all()
    epochs = [[sample for batch in loader for sample in ids_of(batch)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for samples in epochs:
        for begin in range(0, num_samples, size):
            of_segment = [*range(begin, min(begin + size, num_samples))]
            assert sorted(samples[begin : begin + size]) == of_segment != samples[begin : begin + size]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"where": "action >= 0"},  # of all events
    {"where": "action >= 1"},
    {"min_history": 1},
    {"segment": 0.5},
    {"within": "user"},
    {"within": "time"},
]


@pytest.mark.parametrize("order", [Targets, lambda **options: TimeWindows(every="1w", **options)])
def test_a_state_is_refused_with_any_other_setting_of_the_order(small_dataset: Path, order: Any) -> None:
    states = [_load(small_dataset, order(**options)).state_dict() for options in SETTINGS]
    for (index, options), (other, state) in itertools.product(enumerate(SETTINGS), enumerate(states)):
        loader = _load(small_dataset, order(**options))
        if index == other:
            loader.load_state_dict(state)
        else:
            with pytest.raises(StateError, match=r"^the loader's state is of other data, codes or filters: "):
                loader.load_state_dict(state)
