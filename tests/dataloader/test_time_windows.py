import itertools
import pickle
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import ConfigError, StateError
from evenrank.dataloader import (
    Loader,
    LoaderConfig,
    Mixture,
    Negatives,
    SequenceBatch,
    TimeWindows,
    build_loader,
    random_codes,
)
from evenrank.dataloader.sampling.epoch_positions import _FORMAT
from evenrank.datasets import open_store, read_manifest
from evenrank.datasets.slices import WindowsOfStore
from evenrank.datasets.store import Slices
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.resuming import with_changes

WINDOWS = TimeWindows(every="1w")


def _loader(path: Path, rank: int = 0, world_size: int = 1, **options: Any) -> Loader[SequenceBatch]:
    balance = options.pop("balance", None)
    defaults: dict[str, Any] = {"order": WINDOWS, "max_num_candidates": 2, "extra_events": ("timestamp_ms",)}
    config = LoaderConfig(**{"batch_size": 8, "max_history_length": 9, **defaults, **options})
    return build_loader(path, config, rank=rank, world_size=world_size, balance=balance)


def find_leak(loader: Loader[SequenceBatch], window: int) -> str | None:
    """Return what of a window's batches is from its future or is a target from outside it; None if nothing is."""
    begin, end = (int(time.timestamp() * 1000) for time in loader.window(window))
    loader.begin_at(window)
    for batch in loader:
        times_of_rows, counts = rows_of(batch.features, "timestamp_ms"), batch.num_candidates.tolist()
        for times, items, count in zip(times_of_rows, rows_of(batch.features, "item_id"), counts, strict=True):
            assert len(times) == len(items)
            history, targets = times[: len(times) - count], times[len(times) - count :]
            if any(not begin <= time < end for time in targets):
                return f"a target outside {begin}..{end}"
            if history and targets and max(history) > min(targets):
                return "a history from after its target"
    return None


def test_nothing_of_the_future_is_in_a_window(small_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = _loader(small_dataset)
    assert [find_leak(loader, window) for window in range(loader.num_windows)] == [None] * loader.num_windows
    of_epoch = WindowsOfStore.of_epoch

    def cut_with_leak(self: WindowsOfStore, epoch: int, stores: Any) -> Any:
        (store,) = of_epoch(self, epoch, stores)
        assert store.slices is not None
        assert store.num_targets is not None
        later = np.minimum(store.slices.ends + 1, stores[0].ends[store.slices.rows])
        return [stores[0].sliced(Slices(store.slices.rows, store.slices.begins, later), store.num_targets)]

    monkeypatch.setattr(WindowsOfStore, "of_epoch", cut_with_leak)
    planted = _loader(small_dataset)
    assert any(find_leak(planted, window) for window in range(planted.num_windows))


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_event_is_a_candidate_once_on_any_number_of_ranks(small_dataset: Path, world_size: int) -> None:
    loaders = [_loader(small_dataset, rank, world_size, num_workers=rank % 2) for rank in range(world_size)]
    store = open_store(small_dataset)
    seen = []
    for window in range(loaders[0].num_windows):
        assert {loader.epoch for loader in loaders} == {window}
        batches = [list(loader) for loader in loaders]
        assert len({len(of_rank) for of_rank in batches}) == 1
        for batch in itertools.chain.from_iterable(batches):
            assert batch.epoch == window
            counts = batch.num_candidates.tolist()
            for items, times, count in zip(
                rows_of(batch.features, "item_id"), rows_of(batch.features, "timestamp_ms"), counts, strict=True
            ):
                seen += list(zip(items, times, strict=True))[len(items) - count :]
    assert sorted(seen) == sorted(
        zip(*(store.columns[name].tolist() for name in ("item_id", "timestamp_ms")), strict=True)
    )
    assert [list(loader) for loader in loaders] == [[]] * world_size  # after the last window


def test_a_state_within_a_window_resumes_on_other_ranks_and_after_a_boundary_the_next_one_begins(
    small_dataset: Path,
) -> None:
    loader = _loader(small_dataset)
    for window, steps, world_size in ((0, 1, 2), (1, 2, 3), (2, 5, 4)):
        whole = sorted(sample for batch in loader for sample in ids_of(batch))
        done = [ids_of(batch) for batch in itertools.islice(_at(_loader(small_dataset), window), steps)]
        stopped = _at(_loader(small_dataset, num_workers=window), window)
        *_, last = itertools.islice(stopped, steps)
        state = stopped.state_dict(after=last)
        assert (state["epoch"], state["position"]) == (window, 8 * steps)
        resumed = [_loader(small_dataset, rank, world_size, batch_size=5) for rank in range(world_size)]
        for of_rank in resumed:
            of_rank.load_state_dict(state)
        left = [sample for of_rank in resumed for batch in of_rank for sample in ids_of(batch)]
        assert sorted(itertools.chain(*done, left)) == whole
        assert resumed[0].epoch == window + 1
    after_last = _loader(small_dataset)
    after_last.load_state_dict(loader.state_dict())
    assert (after_last.epoch, len(after_last)) == (3, len(list(_at(_loader(small_dataset), 3))))
    other = _loader(small_dataset, order=TimeWindows(every="1d"))
    with pytest.raises(StateError, match="the loader's state is of other data, codes or filters"):
        other.load_state_dict(state)


def _at(loader: Loader[SequenceBatch], window: int) -> Loader[SequenceBatch]:
    loader.begin_at(window)
    return loader


def _targets(loader: Loader[SequenceBatch], num_windows: int = 10_000) -> list[tuple[int, int]]:
    """Iterate over windows, and return the time and the item of each target."""
    targets: list[tuple[int, int]] = []
    for _ in range(min(num_windows, loader.num_windows - loader.epoch)):
        for batch in loader:
            times, items = (rows_of(batch.features, name) for name in ("timestamp_ms", "item_id"))
            for row_times, row_items, count in zip(times, items, batch.num_candidates.tolist(), strict=True):
                targets += list(zip(row_times, row_items, strict=True))[len(row_times) - count :]
    return targets


@pytest.mark.parametrize("num_windows", [0, 1, 3])
@pytest.mark.parametrize("every", ["12h", "2d", "1w"])
@pytest.mark.parametrize("start", [None, "1970-01-03", "a week before"])
def test_each_event_is_a_target_once_over_two_jobs_with_other_windows(
    small_dataset: Path, num_windows: int, every: str, start: str | None
) -> None:
    """Of a state's window, the time counts, and not its number, which other windows have, or those of later data."""
    first, whole = (_loader(small_dataset, order=TimeWindows(every="1d")) for _ in range(2))
    first.skip_empty()
    trained = _targets(first, num_windows)
    if start == "a week before":
        start = (first.window(first.epoch)[0] - timedelta(weeks=1)).isoformat()
    second = _loader(small_dataset, order=TimeWindows(every=every, start=start))
    try:
        second.begin_after(first.state_dict())
    except StateError as error:
        (suggested,) = re.findall(r"^the loader's state ends at .*; pass TimeWindows\(start='(.*)'\)$", str(error))
        second = _loader(small_dataset, order=TimeWindows(every=every, start=suggested))
        second.begin_after(first.state_dict())
    assert sorted(trained + _targets(second)) == sorted(_targets(whole))


def test_a_state_without_a_time_says_nothing_of_windows(small_dataset: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = _loader(small_dataset)
    next(iter(loader))
    state = loader.state_dict()
    of_no_windows = build_loader(small_dataset, LoaderConfig(batch_size=8), rank=0, world_size=1).state_dict()
    for other in (of_no_windows, with_changes(_FORMAT, state, place="2015-01-06")):
        with pytest.raises(StateError, match="the loader's state has no window of time: it is of another order, or"):
            loader.begin_after(other)
    again = _loader(small_dataset)
    again.load_state_dict(state)
    _, *rest = _loader(small_dataset)
    assert [ids_of(batch) for batch in again] == [ids_of(batch) for batch in rest]
    late = _loader(small_dataset, order=TimeWindows(every="1d", start=loader.window(2)[0].isoformat()))
    late.begin_after(_loader(small_dataset).state_dict())
    assert late.epoch == 0
    assert caplog.messages[-1].startswith("the first window begins after ")


def test_states_of_the_window_before_are_known_while_the_next_one_is_pulled(small_dataset: Path) -> None:
    loader = _loader(small_dataset)
    *_, last = loader
    next(iter(loader))
    assert loader.state_dict(after=last)["epoch"] == 0
    assert loader.state_dict()["epoch"] == 1


def test_samples_come_by_time_without_shuffling(small_dataset: Path) -> None:
    loader = _loader(small_dataset, order=TimeWindows(every="1w", shuffle=False), max_num_candidates=1)
    for _ in range(2):
        times = [row[-1] for batch in loader for row in rows_of(batch.features, "timestamp_ms")[: batch.num_real]]
        assert times == sorted(times)
        assert len(times) > 100


def test_windows_without_events_are_skipped_and_the_stores_have_the_samples(small_dataset: Path) -> None:
    late = _loader(small_dataset, order=TimeWindows(every="1h", start="1970-01-01"))
    assert late.num_samples == 0
    late.skip_empty()
    store = open_store(small_dataset)
    first = store.columns["timestamp_ms"].min()
    assert late.epoch == first // 3_600_000
    (samples,) = late.stores
    (batch, *_) = late
    ids = batch.sample_ids[: batch.num_real].numpy()
    assert samples.columns["timestamp_ms"][samples.ends[ids] - 1].min() >= first
    assert samples.num_targets is not None
    assert batch.num_candidates[: batch.num_real].tolist() == samples.num_targets[ids].tolist()
    late.begin_at(late.num_windows - 1)
    late.skip_empty()
    assert late.epoch == late.num_windows - 1  # which has the last event
    next(iter(late))
    late.skip_empty()
    assert late.epoch == late.num_windows


def test_semantic_ids_have_each_event_with_a_code_as_a_target_once(small_dataset: Path) -> None:
    num_items = read_manifest(small_dataset).vocabulary_sizes["item_id"]
    codes = random_codes(num_items, levels=2, codebook_size=32)
    codes.codes[: num_items // 3] = -1
    config = LoaderConfig(batch_size=8, max_history_length=3, order=WINDOWS, codes=codes)
    loader = build_loader(small_dataset, config, rank=0, world_size=1)
    store = open_store(small_dataset)
    expected = 0
    for row in range(len(store)):
        items = store.columns["item_id"][store.offsets[row] : store.offsets[row + 1]]
        for event in range(len(items)):
            expected += bool(codes.has_code(items[max(0, event - 3) : event + 1]).all())
    assert sum(batch.num_real for _ in range(loader.num_windows) for batch in loader) == expected


def test_a_pickled_loader_goes_on_with_its_window(small_dataset: Path) -> None:
    loader = _loader(small_dataset)
    list(loader)
    again = pickle.loads(pickle.dumps(loader))
    assert [ids_of(batch) for batch in again] == [ids_of(batch) for batch in loader]


def test_negatives_are_none_of_the_users_items_and_the_same_on_any_number_of_ranks(small_dataset: Path) -> None:
    store = open_store(small_dataset)
    rows = {user: row for row, user in enumerate(store.columns["user_id"].tolist())}

    def drawn(world_size: int) -> dict[int, list[int]]:
        negatives: dict[int, list[int]] = {}
        for rank in range(world_size):
            loader = _loader(small_dataset, rank, world_size, negatives=Negatives(count=5), user_id=True)
            for batch in _at(loader, 2):
                assert batch.negatives is not None
                users = batch.features["user_id"].values().tolist()
                of_rows = rows_of(batch.negatives, "item_id")[: batch.num_real]
                for sample, user, items in zip(ids_of(batch), users, of_rows, strict=True):
                    span = slice(store.offsets[rows[user]], store.offsets[rows[user] + 1])
                    assert not {*items} & {*store.columns["item_id"][span].tolist()}
                    negatives[sample] = items
        return negatives

    assert drawn(1) == drawn(3)
    assert len(drawn(1)) > 20


def test_windows_need_candidates_and_one_dataset(small_dataset: Path) -> None:
    with pytest.raises(ConfigError, match="windows of time have candidates as targets; pass max_num_candidates of at"):
        _loader(small_dataset, max_num_candidates=0)
    other = _loader(small_dataset, order="rows")
    with pytest.raises(ConfigError, match=r"^order 'rows' has no windows of time; pass TimeWindows\(every='1d'\)$"):
        _ = other.num_windows
    with pytest.raises(ConfigError, match="order 'rows' has no windows of time"):
        other.window(0)
    with pytest.raises(ConfigError, match="mixtures are always shuffled; order must be 'shuffle', got TimeWindows"):
        build_loader(
            Mixture(weights={small_dataset: 1}),
            LoaderConfig(batch_size=2, order=WINDOWS, max_num_candidates=1),
            rank=0,
            world_size=1,
        )
