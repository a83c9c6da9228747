"""Slow proofs: a user larger than a bucket, and runs that are killed at random times."""

import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from evenrank.datasets import open_store
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess

pytestmark = pytest.mark.long
_NUM_KILLS = 30


def test_a_user_can_have_more_events_than_a_bucket(tmp_path: Path) -> None:
    num_events = 10_000_000
    items, users = np.arange(num_events) % 70_001, np.where(np.arange(num_events) % 1000 == 0, 7, 1)
    times = 1_600_000_000 + np.arange(num_events)[::-1]
    pl.DataFrame({"user": users, "item": items, "time": times}).write_parquet(tmp_path / "log.parquet")
    log = TabularConfig(
        events=(tmp_path / "log.parquet",), user_column="user", item_column="item", timestamp_column="time"
    )
    preprocess(PreprocessConfig(dataset="custom", out=tmp_path / "out", custom=log, split="none", ids="keep"))
    store = open_store(tmp_path / "out")
    assert dict(zip(store.columns["user_id"].tolist(), store.lengths.tolist(), strict=True)) == {
        1: 9_990_000,
        7: 10_000,
    }
    place = store.columns["user_id"].tolist().index(1)
    events = store.columns["item_id"][store.offsets[place] : store.offsets[place + 1]]
    assert np.array_equal(events, items[users == 1][::-1])


def test_a_run_that_is_killed_at_random_times_ends_with_the_same_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    num_events = 3_000_000
    columns = {"user": rng.integers(0, 50_000, num_events), "item": rng.zipf(1.2, num_events) % 200_000}
    times = 1_600_000_000 + np.sort(rng.integers(0, 10_000_000, num_events))
    frame = pl.DataFrame({**columns, "time": times}).with_columns(pl.format("u{}", "user").alias("user"))
    frame.write_csv(tmp_path / "log.csv")
    options = "--user-column user --item-column item --timestamp-column time --k-core 3 --split time:last:30d"
    command = [
        sys.executable,
        "-m",
        "evenrank",
        "preprocess",
        "--dataset",
        "custom",
        "--events",
        "log.csv",
        *shlex.split(options),
    ]

    def bytes_in(folder: Path) -> dict[str, bytes]:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    for _ in range(2):  # the first one compiles
        begin = time.monotonic()
        subprocess.run([*command, "--out", "whole"], cwd=tmp_path, check=True, capture_output=True)
        seconds = time.monotonic() - begin
    expected, delays, num_killed, num_continued = bytes_in(tmp_path / "whole"), random.Random(0), 0, 0
    while num_killed < _NUM_KILLS:
        process = subprocess.Popen([*command, "--out", "out"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        try:
            _, errors = process.communicate(timeout=delays.uniform(0.2, 1.2) * seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            assert process.returncode == -signal.SIGKILL
            num_killed += 1
        else:
            assert process.returncode == 0, errors
            assert bytes_in(tmp_path / "out") == expected
        num_continued += "going on with what an earlier run has finished" in errors
    subprocess.run([*command, "--out", "out"], cwd=tmp_path, check=True)
    assert bytes_in(tmp_path / "out") == expected
    assert num_continued > _NUM_KILLS / 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "out", "whole"]
