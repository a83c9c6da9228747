import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.schema import IdKind
from evenrank.preprocess.build.sequences import Sequences, build_sequences
from evenrank.preprocess.build.splits import SplitFacts, parse_split, read_listed_users
from evenrank.preprocess.read.keys import keys_of


@pytest.mark.parametrize("text", ["user:0", "user:1", "leave-last:1", "time:0", "time:last:1h", "file:a.txt", "none"])
def test_valid_splits_are_parsed(text: str) -> None:
    assert parse_split(text).has_targets == text.startswith(("leave-last", "time"))


@pytest.mark.parametrize(
    "text",
    [
        *("", "user", "user:-0.1", "user:nan", "leave-last:0", "leave-last:x", "time:", "time:tomorrow", "nobody"),
        *(
            "time:1969",
            "time:0000",
            "time:2015-13",
            "time:20151301",
            "time:-1",
            "time:1e9",
            "time:253402300800000000000",
        ),
        *("time:last", "time:last:", "time:last:0d", "time:last:7", "time:last:7m", "time:last:-7d", "file:"),
    ],
)
def test_invalid_splits_raise_an_error_that_lists_the_valid_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid split .*; expected user:FRACTION .*leave-last:N .*time:.* or none"):
        parse_split(text)


def _sequences(*users_and_times: tuple[int, int]) -> Sequences:
    users, times = np.array(users_and_times, dtype=np.int64).T
    items = np.zeros(len(users), dtype=np.int64)
    columns = {"user_id": users, "item_id": items, "timestamp_ms": times, "action": items.astype(np.int32)}
    return build_sequences(columns, lambda keys: keys)[0]


def _divide(text: str, *users_and_times: tuple[int, int], eval_users: tuple[int, ...] = ()) -> dict[str, list[int]]:
    """Return per split the events to train on and those to predict, as their times; rows of users are concatenated."""
    times = [time for _, time in users_and_times]
    users = np.array(eval_users, dtype=np.int64)
    facts = SplitFacts(seed=0, last_ms=max(times), eval_users=users)
    splits = parse_split(text).divide(_sequences(*users_and_times), facts)
    targets = splits["eval"].num_targets
    if targets.any():
        rows = splits["eval"]
        predicted = rows.events["timestamp_ms"][
            np.concatenate([rows.order[e - n : e] for e, n in zip(rows.ends, targets, strict=True)])
        ]
    else:
        predicted = splits["eval"].values("timestamp_ms")
    return {"train": sorted(splits["train"].values("timestamp_ms").tolist()), "eval": sorted(predicted.tolist())}


DAY = 86_400_000
YEAR_2015 = 1_420_070_400_000


@pytest.mark.parametrize(
    ("text", "boundary_ms"),
    [
        ("time:2015", YEAR_2015),
        ("time:2015-01", YEAR_2015),
        ("time:2015-02", YEAR_2015 + 31 * DAY),
        ("time:2015-01-06", YEAR_2015 + 5 * DAY),
        ("time:20150106", YEAR_2015 + 5 * DAY),
        ("time:2015-01-06T12:30:00", YEAR_2015 + 5 * DAY + 45_000_000),
        ("time:2015-01-06T12:30:00.5+01:00", YEAR_2015 + 5 * DAY + 41_400_500),
        ("time:1420070400", YEAR_2015),
        ("time:1420070400000", YEAR_2015),
        ("time:1420070400000000", YEAR_2015),
        ("time:1420070400000000000", YEAR_2015),
        ("time:100", 100_000),
        ("time:21000101", 21_000_101_000),  # seconds: dates are of 1900 to 2099
    ],
)
def test_a_split_by_time_predicts_the_events_from_the_boundary_on(text: str, boundary_ms: int) -> None:
    times = [boundary_ms - 1, boundary_ms, boundary_ms + 1]
    expected = {"train": times[:1], "eval": times[1:]}
    assert _divide(text, *((7, time) for time in times)) == expected
    assert _divide(text, *((user, time) for user, time in enumerate(times))) == expected


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("time:last:7d", 7 * DAY), ("time:last:168h", 7 * DAY), ("time:last:1w", 7 * DAY), ("time:last:1h", 3_600_000)],
)
def test_the_last_days_exclude_the_moment_at_which_they_begin(text: str, duration_ms: int) -> None:
    last, begin = YEAR_2015, YEAR_2015 - duration_ms
    divided = _divide(text, (1, last), (2, begin + 1), (2, begin), (3, begin - 1))
    assert divided == {"train": [begin - 1, begin], "eval": [begin + 1, last]}
    assert _divide("time:last:999999999w", (1, last), (2, 0)) == {"train": [], "eval": [0, last]}


def test_listed_users_are_in_eval() -> None:
    events = [(3, 30), (-2, 20), (3, 31), (5, 50)]
    assert _divide("file:a.txt", *events, eval_users=(5, 3, 99)) == {"train": [20], "eval": [30, 31, 50]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("users.txt", '7\n"a, b"\n-2'),
        ("users.TXT", '\ufeff7\r\n"a, b"\r\n-2\r\n'),
        ("users.csv", 'user\n7\n"""a, b"""\n-2\n'),
        ("users.tsv", 'age\tuser\tx\n1\t7\t\n1\t"""a, b"""\t\n1\t-2\t\n'),
    ],
)
def test_users_are_listed_one_per_line_or_in_a_column_of_a_table(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, newline="")
    texts = pl.Series(["7", '"a, b"', "-2"])
    of_kinds: dict[IdKind, list[int]] = {"text": keys_of(texts).tolist(), "int64": [7, -2]}
    for kind, expected in of_kinds.items():
        keys, count = read_listed_users(tmp_path / name, "user", kind)
        assert (keys.tolist(), count) == (expected, 3)


def test_users_are_listed_in_parquet(tmp_path: Path) -> None:
    pl.DataFrame({"user": [7, -2]}).write_parquet(tmp_path / "users.parquet")
    keys, count = read_listed_users(tmp_path / "users.parquet", "user", "int64")
    assert (keys.tolist(), count) == ([7, -2], 2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "uid\n7\n", "a.csv has no column 'user'; known: uid"),
        ("a.csv", "user\n7\n4.5e+18\n", "a.csv, line 3 ('4.5e+18'): user may have been rounded"),
        ("a.txt", "7\n\n8\n", "a.txt, line 2 (''): the line is empty; fix or remove the line"),
        ("a", "7\n", "a has an unknown suffix; expected one of .csv, .tsv, .txt"),
    ],
)
def test_invalid_lists_of_users_raise(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        read_listed_users(tmp_path / name, "user", "text")
