"""Windows of time and requests: every event once, over jobs with other windows too; the laws have their values."""

import itertools
import re
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenrank.core.errors import StateError
from evenrank.dataloader import LoaderConfig, Replay, Requests, TimeWindows, build_loader, random_codes
from evenrank.dataloader.replay import due_seconds
from evenrank.dataloader.sampling.epoch_positions import _FORMAT
from evenrank.datasets import open_store, read_manifest
from evenrank.preprocess import PreprocessConfig, RequestRule, TabularConfig, preprocess
from tests.dataloader.batch_helpers import rows_of, with_changes


def _load(path: Path, order: Any, rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    defaults = {"batch_size": 8, "max_history_length": 9, "max_num_candidates": 2, "user_id": True}
    config = LoaderConfig(**{**defaults, "order": order, **options})
    return build_loader(path, config, rank=rank, world_size=world_size)


def _windows(path: Path, every: str = "1w", start: str | None = None, within: Any = "shuffle", **options: Any) -> Any:
    order = TimeWindows(every=every, start=start, within=within)
    return _load(path, order, **{"extra_events": ("timestamp_ms",), **options})


def _events(loader: Any) -> Iterator[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
    """Yield the times and items of each sample's history, and of its targets."""
    for batch in loader:
        times, items = (rows_of(batch.features, name) for name in ("timestamp_ms", "item_id"))
        for row_times, row_items, count in zip(times, items, batch.num_candidates.tolist(), strict=True):
            events = list(zip(row_times, row_items, strict=True))
            yield events[: len(events) - count], events[len(events) - count :]


def _targets(loader: Any, num_windows: int = 10_000) -> list[tuple[int, int]]:
    """Iterate over windows, and return the time and the item of each target."""
    remaining = range(min(num_windows, loader.num_windows - loader.epoch))
    return [target for _ in remaining for _, targets in _events(loader) for target in targets]


JOBS = [("12h", None), ("2d", "1970-01-03"), ("1w", "a week before"), ("1w", None)]


@pytest.mark.parametrize("num_windows", [0, 1, 3])
@pytest.mark.parametrize(("every", "start"), JOBS)
def test_each_event_is_a_target_once_over_two_jobs_with_other_windows(
    small_dataset: Path, num_windows: int, every: str, start: str | None
) -> None:
    """Of a state's window, the time counts, and not its number, which other windows have, or those of later data."""
    first = _windows(small_dataset, "1d")
    first.skip_empty()
    trained = _targets(first, num_windows)
    if start == "a week before":
        start = (first.window(first.epoch)[0] - timedelta(weeks=1)).isoformat()
    second = _windows(small_dataset, every, start)
    try:
        second.begin_after(first.state_dict())
    except StateError as error:
        (suggested,) = re.findall(r"^the loader's state ends at .*; pass TimeWindows\(start='(.*)'\)$", str(error))
        second = _windows(small_dataset, every, suggested)
        second.begin_after(first.state_dict())
    columns = open_store(small_dataset).columns
    events = zip(*(columns[name].tolist() for name in ("timestamp_ms", "item_id")), strict=True)
    assert sorted(trained + _targets(second)) == sorted(events)
    assert list(second) == []  # after the last window


def test_windows_go_on_in_order_from_states_and_where_they_have_events(
    small_dataset: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = _windows(small_dataset)
    *_, last = loader
    next(iter(loader))
    assert (loader.state_dict(after=last)["epoch"], loader.state_dict()["epoch"]) == (0, 1)
    # A state without a time says nothing of windows.
    fresh, state = _windows(small_dataset), _windows(small_dataset).state_dict()
    for other in (_load(small_dataset, "rows").state_dict(), with_changes(_FORMAT, state, place="2015-01-06")):
        with pytest.raises(StateError, match="the loader's state has no window of time: it is of another order, or"):
            fresh.begin_after(other)
    late = _windows(small_dataset, "1d", fresh.window(2)[0].isoformat())
    late.begin_after(state)
    assert late.epoch == 0
    assert caplog.messages[-1].startswith("the first window begins after ")
    early = _windows(small_dataset, "1h", "1970-01-01")
    assert early.num_samples == 0
    early.skip_empty()
    first = open_store(small_dataset).columns["timestamp_ms"].min()
    assert early.epoch == first // 3_600_000
    (samples,), (batch, *_) = early.stores, early
    ids = batch.sample_ids[: batch.num_real].numpy()
    assert samples.columns["timestamp_ms"][samples.ends[ids] - 1].min() >= first
    assert batch.num_candidates[: batch.num_real].tolist() == samples.num_targets[ids].tolist()
    for _ in range(2):
        early.begin_at(early.num_windows - 1)
        early.skip_empty()
        assert early.epoch == early.num_windows - 1  # which has the last event
    next(iter(early))
    early.skip_empty()
    assert early.epoch == early.num_windows
    ordered = _windows(small_dataset, within="time", max_num_candidates=1)
    for _ in range(2):
        times = [targets[0][0] for _, targets in _events(ordered) if targets]
        assert times == sorted(times) != []


def test_semantic_ids_have_each_event_with_a_code_as_a_target_once(small_dataset: Path) -> None:
    num_items, store = read_manifest(small_dataset).vocabulary_sizes["item_id"], open_store(small_dataset)
    codes = random_codes(num_items, levels=2, codebook_size=32)
    codes.codes[: num_items // 3] = -1
    loader = _load(small_dataset, TimeWindows(every="1w"), codes=codes, max_num_candidates=1, max_history_length=3)
    has_code, spans = codes.has_code(store.columns["item_id"]), itertools.pairwise(store.offsets.tolist())
    expected = sum(has_code[max(a, event - 3) : event + 1].all() for a, b in spans for event in range(a, b))
    assert sum(batch.num_real for _ in range(loader.num_windows) for batch in loader) == expected > 20


BEGIN = 1_577_916_000  # two hours before midnight, the begin of 2020-01-02
Log = list[tuple[int, int, int, int]]  # user, item, action, time in seconds
# Times of few values, so that many are equal, and at most two hours apart from midnight.
EVENTS = st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 3), st.integers(0, 16).map(lambda n: n * 900))
LOGS = st.lists(EVENTS, min_size=1, max_size=40).map(lambda log: [(*event[:3], BEGIN + event[3]) for event in log])


class Request(NamedTuple):
    time_ms: int
    user: int
    history: list[int]
    actions: list[int]
    candidates: list[int]
    labels: list[int]


def _write(folder: Path, log: Log, gap: float, by_date: bool, split: str) -> Path:
    """Preprocess a log with requests at least `gap` seconds apart."""
    path = folder / "log.csv"
    path.write_text("user,item,action,time\n" + "".join(f"{','.join(map(str, event))}\n" for event in log))
    names: Any = {f"{name}_column": name for name in ("user", "item")} | {"timestamp_column": "time"}
    custom = TabularConfig(events=(path,), timestamp_unit="s", action_columns=("action",), **names)
    options: Any = {"dataset": "custom", "ids": "keep", "allow_empty": True, "custom": custom}
    rule = RequestRule(seconds=gap, by_date=by_date)
    preprocess(PreprocessConfig(out=folder / "data", split=split, requests=rule, **options))
    return folder / "data"


def _served(log: Log, gap: float, by_date: bool, max_candidates: int) -> list[Request]:
    """Return the requests of a log in plain Python, in order."""
    served: dict[tuple[int, int], Log] = {}
    for event in sorted(log, key=lambda event: event[3]):
        served.setdefault((event[0], event[3] // 86_400 if by_date else 0), []).append(event)
    requests = []
    for (user, _), events in served.items():
        begins: list[int] = []
        for index, event in enumerate(events):
            if not begins or event[3] - events[begins[-1]][3] >= gap:
                begins.append(index)
        _, items, actions, times = (list(values) for values in zip(*events, strict=True))
        for begin, end in itertools.pairwise([*begins, len(events)]):
            shown, past = slice(begin, min(end, begin + max_candidates)), slice(max(0, begin - 5), begin)
            of_events = items[past], actions[past], items[shown], actions[shown]
            requests.append(Request(times[begin] * 1000, user, *of_events))
    return sorted(requests, key=lambda request: request[:2])


def _requests_of(batches: Any) -> list[Request]:
    """Return the requests of batches, and check their padding."""
    found = []
    for batch in batches:
        users, items, actions = (rows_of(batch.features, name) for name in ("user_id", "item_id", "action"))
        assert batch.request_ts_ms[batch.num_real :].tolist() == [0] * (batch.batch_size - batch.num_real)
        assert not any(map(any, (*users[batch.num_real :], *items[batch.num_real :])))
        times, counts = batch.request_ts_ms.tolist(), batch.num_candidates.tolist()
        labels = rows_of(batch.labels, "label")
        for row in range(batch.num_real):
            end = len(items[row]) - counts[row]
            shown = items[row][:end], actions[row], items[row][end:], labels[row]
            found.append(Request(times[row], users[row][0], *shown))
    return found


@pytest.mark.parametrize("split", ["user:0.5", "leave-last:2", "time:2020-01-02T01:00", "none"])
@settings(max_examples=5)
@given(LOGS, st.sampled_from((0.0001, 900, 2000)), st.booleans(), st.sampled_from((2, 99)))
@example([(user, 1, 1, BEGIN) for user in range(12)], 900, False, 2)
def test_requests_are_those_of_a_plain_replay_of_the_log_on_any_ranks(
    split: str, log: Log, gap: float, by_date: bool, max_candidates: int
) -> None:
    options = {"batch_size": 4, "max_history_length": 5, "max_num_candidates": max_candidates}
    with tempfile.TemporaryDirectory() as folder:
        data = _write(Path(folder), log, gap, by_date, split)
        expected = _served(log, 0 if gap < 0.001 else gap, by_date, max_candidates)  # counted in milliseconds
        for world_size in (1, 3):
            loaders = [_load(data, Requests(), rank, world_size, **options) for rank in range(world_size)]
            steps = zip(*loaders, strict=True)
            assert [request for step in steps for request in _requests_of(step)] == expected
    if max_candidates == 99:  # each event is a candidate once
        candidates = sorted((request.user, item) for request in expected for item in request.candidates)
        assert candidates == sorted((user, item) for user, item, *_ in log)


def test_a_replay_yields_all_batches_when_they_are_due_and_measures_how_late_it_is(tmp_path: Path) -> None:
    log = [(user, (user * n) % 30, n % 4, BEGIN + 37 * user + 500 * n) for user in range(9) for n in range(user)]
    data = _write(tmp_path, log, 700, False, "user:0.5")
    replayed, rank = Replay(_load(data, Requests(), 2, 3), speed=1e9), _load(data, Requests(), 2, 3)
    assert [batch.sample_ids.tolist() for batch in replayed] == [batch.sample_ids.tolist() for batch in rank]
    assert replayed.lag_seconds > 0  # since all are due within microseconds
    slept: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenrank.dataloader.replay.time.monotonic", lambda: 50.0 + sum(slept))
        patch.setattr("evenrank.dataloader.replay.time.sleep", slept.append)
        batches = list(Replay(_load(data, Requests()), speed=4.0))
    times = [int(batch.request_ts_ms[: batch.num_real].max()) for batch in batches]
    assert np.cumsum(slept).tolist() == pytest.approx([(time - times[0]) / 4000 for time in times])
    of_batches = [[1000], [1000, 3500, 2000], [61_000, 3500]]  # balanced ones are not in the order of time
    assert [due_seconds(torch.tensor(times), 1000, 10.0) for times in of_batches] == [0, 0.25, 6]
    (batch,) = _load(data, Requests(), batch_size=99)
    chosen = _requests_of([batch.index_select([2, 0])])
    assert chosen == [_requests_of([batch])[row] for row in (2, 0)]
    codes = random_codes(read_manifest(data).vocabulary_sizes["item_id"], levels=2, codebook_size=16)
    (coded,) = _load(data, Requests(), batch_size=99, codes=codes, max_num_candidates=1)
    expected = _served(log, 700, False, 1)
    assert coded.request_ts_ms[: coded.num_real].tolist() == [request.time_ms for request in expected]
    targets = codes.codes[[request.candidates[0] for request in expected]]
    assert rows_of(coded.labels, "label")[: coded.num_real] == targets.tolist()
