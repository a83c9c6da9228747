import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError, StateError
from evenrank.dataloader import (
    Loader,
    LoaderConfig,
    Mixture,
    Replay,
    Requests,
    SequenceBatch,
    build_loader,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer, LinearCost
from evenrank.dataloader.replay import due_seconds
from evenrank.datasets import open_store, read_manifest
from tests.dataloader.batch_helpers import rows_of
from tests.ranks import RankPool

pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
from evenrank.preprocess import PreprocessConfig, RequestRule, TabularConfig, preprocess

BEGIN = 1_577_916_000  # two hours before midnight, the begin of 2020-01-02
SPLITS = ("user:0.5", "leave-last:2", "time:2020-01-02T01:00", "none")
Log = list[tuple[int, int, int, int]]  # user, item, action, time in seconds
# Times of few values, so that many are equal, and at most two hours apart from midnight.
EVENTS = st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 3), st.integers(0, 16).map(lambda n: n * 900))
LOGS = st.lists(EVENTS, min_size=1, max_size=40).map(lambda log: [(*event[:3], BEGIN + event[3]) for event in log])


@dataclass(frozen=True)
class Request:
    user: int
    time_ms: int
    history: list[int]
    actions: list[int]
    candidates: list[int]
    labels: list[int]


def write_dataset(folder: Path, log: Log, *, gap: float, by_date: bool = False, **options: Any) -> Path:
    """Preprocess a log with requests at least `gap` seconds apart."""
    path = folder / "log.csv"
    path.write_text("user,item,action,time\n" + "".join(f"{','.join(map(str, event))}\n" for event in log))
    names = {"user_column": "user", "item_column": "item", "timestamp_column": "time", "action_columns": ("action",)}
    custom = TabularConfig(events=(path,), timestamp_unit="s", **names)  # type: ignore[arg-type]
    rule = RequestRule(seconds=gap, by_date=by_date)
    defaults: dict[str, Any] = {"ids": "keep", "allow_empty": True, "custom": custom, "requests": rule}
    preprocess(PreprocessConfig(**{"dataset": "custom", "out": folder / "data", **defaults, **options}))
    return folder / "data"


def replay_log(log: Log, *, gap: float, by_date: bool, max_history: int, max_candidates: int) -> list[Request]:
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
        for begin, end in itertools.pairwise([*begins, len(events)]):
            _, items, actions, times = zip(*events, strict=True)
            shown = slice(begin, min(end, begin + max_candidates))
            past = slice(max(0, begin - max_history), begin)
            histories = list(items[past]), list(actions[past])
            requests.append(Request(user, times[begin] * 1000, *histories, list(items[shown]), list(actions[shown])))
    return sorted(requests, key=lambda request: (request.time_ms, request.user))


def load(path: Path | str, rank: int = 0, world_size: int = 1, **options: Any) -> Loader[SequenceBatch]:
    balance = options.pop("balance", None)
    defaults: dict[str, Any] = {"batch_size": 4, "max_history_length": 5, "max_num_candidates": 3, "user_id": True}
    config = LoaderConfig(**{**defaults, "order": Requests(), **options})
    return build_loader(path, config, rank=rank, world_size=world_size, balance=balance)


def requests_of(batch: SequenceBatch) -> list[Request]:
    """Return the requests of a batch, and check its padding."""
    assert batch.request_ts_ms is not None
    assert batch.request_ts_ms[batch.num_real :].tolist() == [0] * (batch.batch_size - batch.num_real)
    assert len(batch.request_ts_ms) == batch.batch_size
    users, items, actions = (rows_of(batch.features, name) for name in ("user_id", "item_id", "action"))
    labels, counts = rows_of(batch.labels, "label"), batch.num_candidates.tolist()
    assert not any(map(any, (*users[batch.num_real :], *items[batch.num_real :])))
    found = []
    for row, time_ms in enumerate(batch.request_ts_ms[: batch.num_real].tolist()):
        end = len(items[row]) - counts[row]
        (user,) = users[row]
        found.append(Request(user, time_ms, items[row][:end], actions[row], items[row][end:], labels[row]))
    return found


def requests_by_step(loaders: list[Loader[SequenceBatch]]) -> list[Request]:
    """Return the requests of all ranks, step by step."""
    steps = zip(*loaders, strict=True)
    return [request for batches in steps for batch in batches for request in requests_of(batch)]


@pytest.mark.parametrize("split", SPLITS)
@settings(max_examples=5)
@given(
    log=LOGS, gap=st.sampled_from((0.0001, 900, 2000)), by_date=st.booleans(), max_candidates=st.sampled_from((2, 99))
)
@example(log=[(user, 1, 1, BEGIN) for user in range(12)], gap=900, by_date=False, max_candidates=2)
def test_batches_equal_a_replay_of_the_log_on_any_number_of_ranks_and_after_resuming(
    split: str, log: Log, gap: float, by_date: bool, max_candidates: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = write_dataset(Path(folder), log, gap=gap, by_date=by_date, split=split)
        gap = 0 if gap < 0.001 else gap  # which is counted in milliseconds
        limits = {"max_history": 5, "max_candidates": max_candidates}
        expected = replay_log(log, gap=gap, by_date=by_date, **limits)
        for world_size in (1, 2, 3):
            loaders = [load(data, rank, world_size, max_num_candidates=max_candidates) for rank in range(world_size)]
            assert requests_by_step(loaders) == expected
        stopped = [load(data, rank, 2, batch_size=1, max_num_candidates=max_candidates) for rank in range(2)]
        for loader in stopped:
            next(iter(loader))
        resumed = [load(data, rank, 3, max_num_candidates=max_candidates) for rank in range(3)]
        for loader in resumed:
            loader.load_state_dict(stopped[1].state_dict())
        assert requests_by_step(resumed) == (expected[2:] or expected)  # the next epoch, if nothing is left
        if max_candidates == 99:  # each event is a candidate once
            candidates = sorted((request.user, item) for request in expected for item in request.candidates)
            assert candidates == sorted((user, item) for user, item, *_ in log)


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    log = [
        (user, (user * index) % 30, index % 4, BEGIN + 37 * user + 500 * index)
        for user in range(9)
        for index in range(user)
    ]
    return write_dataset(tmp_path_factory.mktemp("traffic"), log, gap=700, split="user:0.5")


def _balance(rank: int, world_size: int, path: Path) -> list[list[Request]]:
    balance = BalanceConfig(cost=LinearCost(interleave_actions=False))
    own = load(path, rank, world_size, balance=balance)
    by_balancer = Balancer(load(path, rank, world_size), balance, device="cpu")
    return [
        [request for batch in Replay(batches, speed=1e9) for request in requests_of(batch)]
        for batches in (own, by_balancer)
    ]


def test_requests_are_balanced_without_an_exchange_and_by_a_balancer(ranks: RankPool, traffic: Path) -> None:
    expected = requests_by_step([load(traffic)])
    assert len(expected) > 16
    for of_ranks in zip(*ranks.run(2, _balance, traffic), strict=True):
        found = sorted(itertools.chain(*of_ranks), key=lambda request: (request.time_ms, request.user))
        assert found == expected


def test_rows_of_a_batch_are_selected_with_their_times(traffic: Path) -> None:
    batch = next(iter(load(traffic)))
    assert requests_of(batch.index_select([2, 0])) == [requests_of(batch)[2], requests_of(batch)[0]]


def test_a_replay_yields_all_batches_and_measures_how_late_it_is(traffic: Path) -> None:
    replayed = Replay(load(traffic, world_size=3, rank=2), speed=1e9)
    seen = []
    for batch in replayed:
        seen += requests_of(batch)
        assert replayed.lag_seconds >= 0
    assert seen == [request for batch in load(traffic, world_size=3, rank=2) for request in requests_of(batch)]
    assert replayed.lag_seconds > 0  # since all are due within microseconds
    of_batches = [[1000], [1000, 3500, 2000], [61_000, 3500]]  # balanced ones are not in the order of time
    assert [due_seconds(torch.tensor(times), 1000, 10.0) for times in of_batches] == [0, 0.25, 6]


def test_a_replay_needs_times_of_requests_and_a_speed(traffic: Path) -> None:
    shuffled = build_loader(traffic, LoaderConfig(batch_size=2), rank=0, world_size=1)
    with pytest.raises(
        ConfigError, match=r"no request_ts_ms; make their loader with LoaderConfig\(order=Requests\(\)\)"
    ):
        next(iter(Replay(shuffled)))
    for speed in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"Replay: speed must be above 0 and finite, got {speed}"):
            Replay(shuffled, speed=speed)


def test_semantic_ids_have_the_first_event_of_each_request_as_target(traffic: Path) -> None:
    codes = random_codes(read_manifest(traffic).vocabulary_sizes["item_id"], levels=2, codebook_size=16)
    config = LoaderConfig(batch_size=64, max_history_length=9, order=Requests(), codes=codes)
    (batch,) = build_loader(traffic, config, rank=0, world_size=1)
    expected = requests_by_step([load(traffic, max_num_candidates=1)])
    assert batch.request_ts_ms is not None
    assert batch.request_ts_ms[: batch.num_real].tolist() == [request.time_ms for request in expected]
    targets = rows_of(batch.labels, "label")[: batch.num_real]
    assert targets == codes.codes[[request.candidates[0] for request in expected]].tolist()


def test_states_of_other_limits_are_refused(traffic: Path) -> None:
    state = load(traffic).state_dict()
    with pytest.raises(StateError, match="the loader's state is of other data, codes or filters"):
        load(traffic, max_num_candidates=2).load_state_dict(state)


def test_requests_need_candidates_and_a_dataset(traffic: Path) -> None:
    with pytest.raises(ConfigError, match="requests have candidates as targets; pass max_num_candidates of at least 1"):
        load(traffic, max_num_candidates=0)
    config = LoaderConfig(batch_size=2, order=Requests(), max_num_candidates=1)
    for data, message in (
        (Mixture(weights={traffic: 1}), r"mixtures are always shuffled; order must be 'shuffle', got Requests\(\)"),
        (open_store(traffic), r"requests are of all splits of a dataset, not of .*; pass its folder or URL"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_loader(data, config, rank=0, world_size=1)
