import os
import tracemalloc
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.datasets.schema import user_hash
from evenrank.preprocess.build import buckets as buckets_module
from evenrank.preprocess.build.buckets import Buckets, write_run

DTYPES = {"user_id": "int64", "timestamp_ms": "int64", "price": "float32"}
USERS = st.lists(st.lists(st.sampled_from([0, 1, -7, 2**40, -(2**63)]), max_size=9), max_size=4)


@settings(max_examples=60)
@given(USERS, st.integers(0, 4), st.integers(0, 6), st.sampled_from([0, 2**33]))
def test_a_range_has_the_events_of_its_users_of_each_in_the_order_of_the_runs(
    tmp_path_factory: pytest.TempPathFactory, users: list[list[int]], num_bits: int, range_bits: int, first_ms: int
) -> None:
    folder, log, runs = tmp_path_factory.mktemp("runs"), [], []
    for number, of_run in enumerate(users):
        keys, times = np.array(of_run, dtype=np.int64), np.arange(len(of_run))
        columns = {"user_id": keys, "timestamp_ms": times, "price": times.astype(np.float32) / 4}
        runs.append(write_run(folder / f"{number}", columns, num_bits)._replace(first_ms=number * first_ms))
        log += [(user, time + number * first_ms, time / 4) for time, user in enumerate(of_run)]
    buckets = Buckets(folder=folder, runs=runs, dtypes=DTYPES, num_bits=num_bits)
    hashes = {user: int(user_hash(np.array([user]))[0]) for user, _, _ in log}
    for index in range(1 << range_bits):
        columns = buckets.read_range(index, range_bits)
        assert {name: str(values.dtype) for name, values in columns.items()} == DTYPES
        expected = [event for event in log if range_bits == 0 or hashes[event[0]] >> (64 - range_bits) == index]
        found = [*zip(*(values.tolist() for values in columns.values()), strict=True)]
        assert sorted(found, key=itemgetter(0)) == sorted(expected, key=itemgetter(0))


def test_a_range_is_read_in_little_more_memory_than_its_events_take(tmp_path: Path) -> None:
    columns = {"user_id": np.zeros(1 << 18, dtype=np.int64), "timestamp_ms": np.arange(1 << 18) << 13}
    columns["price"] = columns["user_id"].astype(np.float32)
    runs = [write_run(tmp_path / f"{number}", columns, 0) for number in range(4)]
    buckets = Buckets(folder=tmp_path, runs=runs, dtypes=DTYPES, num_bits=0)
    tracemalloc.start()
    read = buckets.read_range(0, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.6 * sum(values.nbytes for values in read.values())


def test_a_run_that_is_cut_or_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    columns = {"user_id": np.arange(500), "timestamp_ms": np.arange(500)}
    runs = [write_run(tmp_path / f"run-{number}", columns, 0) for number in range(3)]
    buckets = Buckets(folder=tmp_path, runs=runs, dtypes=dict.fromkeys(columns, "int64"), num_bits=0)
    for spoil in (lambda path: os.truncate(path, 3999), lambda path: os.truncate(path, 0), os.unlink):
        spoil(runs[1].path)
        with pytest.raises(OSError, match="run-1"):
            buckets.read(0)


def test_a_run_that_does_not_fit_on_the_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets_module, "replacing", lambda path: nullcontext(Path("/dev/full")))
    with pytest.raises(OSError, match="No space left on device"):
        write_run(tmp_path / "run", {"user_id": np.arange(99)}, 3)
    with pytest.raises(OSError, match="No space left on device"):
        Buckets(folder=tmp_path, runs=[], dtypes=DTYPES, num_bits=3).keep(0, np.ones(9, dtype=np.bool_), reason=1)
