from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import read_manifest
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from evenrank.preprocess.build.buckets import Buckets, Columns, num_range_bits, write_run
from evenrank.preprocess.build.sequences import Sequences, build_sequences
from evenrank.preprocess.build.splits import cut_windows, k_core, keep_lengths
from evenrank.preprocess.config import Filters
from evenrank.preprocess.engine import threads

BEGIN = 1_700_000_000
DTYPES = {"user_id": "int64", "item_id": "int64"}


def _k_core_by_definition(events: list[tuple[int, int]], users: int, items: int) -> list[tuple[int, int]]:
    """Remove the events of users and items that are too rare, until none is left."""
    while True:
        per_user = {user: sum(1 for event in events if event[0] == user) for user, _ in events}
        per_item = {item: sum(1 for event in events if event[1] == item) for _, item in events}
        kept = [event for event in events if per_user[event[0]] >= users and per_item[event[1]] >= items]
        if len(kept) == len(events):
            return kept
        events = kept


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=60),
    st.integers(1, 4),
    st.integers(2, 4),
    st.sampled_from([10, 10**9]),
)
def test_the_k_core_matches_its_definition(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, int]], users: int, items: int, per_bucket: int
) -> None:
    folder, num_bits = tmp_path_factory.mktemp("k-core"), num_range_bits(len(events), per_bucket)
    runs = []
    for number, part in enumerate(np.array_split(np.array(events, dtype=np.int64).reshape(-1, 2), 3)):
        columns = {"user_id": part[:, 0].copy(), "item_id": part[:, 1].copy()}
        runs.append(write_run(folder / f"run-{number}", columns, num_bits))
    buckets = Buckets(folder=folder, runs=runs, dtypes=DTYPES, num_bits=num_bits)
    with threads(2, folder) as engine:
        num_removed = k_core(buckets, Filters(min_user_events=users, min_item_events=items), engine)
    left = [buckets.read(index) for index in range(len(buckets))]
    kept = [event for bucket in left for event in zip(*(bucket[name].tolist() for name in DTYPES), strict=True)]
    assert num_removed == len(events) - len(kept)
    assert sorted(kept) == sorted(_k_core_by_definition(events, users, items))


def _sequences(lengths: list[int]) -> Sequences:
    users = np.repeat(np.arange(len(lengths)), lengths)
    events = np.arange(len(users))
    columns: Columns = {"user_id": users, "item_id": events, "action": events.astype(np.int32), "timestamp_ms": events}
    return build_sequences(columns, lambda keys: keys)[0]


@pytest.mark.parametrize("filters", [Filters(min_length=2), Filters(max_length=4), Filters(min_length=2, max_length=4)])
@pytest.mark.parametrize("as_", ["events", "table"])
def test_a_log_without_the_users_that_are_left_out_gives_the_same(
    tmp_path: Path, filters: Filters, as_: Literal["events", "table"]
) -> None:
    # Each user has an item that nobody else has, and an event twice; user 9 has none.
    events = [(user, item, time) for user in range(1, 6) for time, item in enumerate((user, *[9] * (user - 1)))]
    events += [event for event in events if event[1] == event[0] > 2]
    lengths = Counter(user for user, _, _ in events)
    kept = [event for event in events if filters.min_length <= lengths[event[0]] <= (filters.max_length or 99)]
    (tmp_path / "users.csv").write_text("user,city\n" + "".join(f"u{user},c{user}\n" for user in (1, 3, 5, 9)))
    (tmp_path / "items.csv").write_text("item,brand\n" + "".join(f"i{item},b{item}\n" for item in (1, 2, 4, 5, 9)))
    results = []
    for name, log, options in (("all", events, filters), ("kept", kept, Filters())):
        path = tmp_path / f"{name}.csv"
        path.write_text("user,item,time\n" + "".join(f"u{u},i{i},{BEGIN + t}\n" for u, i, t in log))
        custom = TabularConfig(
            events=(path,),
            user_column="user",
            item_column="item",
            timestamp_column="time",
            context=tmp_path / "users.csv",
            context_columns=("city",),
            item_features=tmp_path / "items.csv",
            item_columns=("brand",),
            item_features_as=as_,
        )
        out = tmp_path / name
        config = PreprocessConfig(dataset="custom", out=out, custom=custom, split="none", filters=options)
        described = asdict(preprocess(config))
        for other in ("sources", "options"):
            del described[other]
        audit = read_manifest(out).options["audit"]
        left_out = audit.pop("users left out by filters", 0)
        tables = {path.relative_to(out): path.read_bytes() for path in sorted(out.rglob("*.parquet"))}
        results.append((described, audit, tables))
        assert left_out == (len(lengths) - len({user for user, _, _ in kept}) if name == "all" else 0)
    assert results[0] == results[1]


def test_users_that_a_killed_run_left_out_are_counted_again(tmp_path: Path) -> None:
    users = np.repeat(np.arange(9), np.arange(9))
    run = write_run(tmp_path / "run", {"user_id": users, "item_id": users}, 1)
    buckets = Buckets(folder=tmp_path, runs=[run], dtypes=DTYPES, num_bits=1)
    for name in ("killed", "continued"):  # without the results that the first one would have kept
        (tmp_path / name).mkdir()
        with threads(1, tmp_path / name) as engine:
            assert keep_lengths(buckets, Filters(min_length=4), engine) == 3


@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_windows_cover_every_event_in_as_few_rows_as_they_can(length: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window))
    rows = cut_windows(_sequences([length]), Filters(window=window, stride=stride))
    items = [rows.take(np.array([row])).values("item_id").tolist() for row in range(len(rows))]
    assert rows.windows.tolist() == list(range(len(rows)))
    assert set().union(*items) == set(range(length))
    for number, row in enumerate(items):
        assert row == list(range(number * stride, min(number * stride + window, length)))
    assert items[-1][-1] == length - 1
    assert all(row[-1] < length - 1 for row in items[:-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": 0}, "min_length must be at least 1 and at most 2147483647, got 0"),
        ({"min_length": 5, "max_length": 4}, "must be at least min_length, got max_length=4 and min_length=5"),
        ({"stride": 4}, "stride=4 has no effect without window; give both, or leave it out"),
        ({"window": 4, "stride": 5}, r"stride must be at most window \(4\), or events are lost; got 5"),
    ],
)
def test_invalid_filters_name_the_value(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Filters(**options)
