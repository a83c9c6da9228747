"""Rules that divide rows and their events between `train` and `eval`.

user:0.3         30 % of the users are in `eval`; which ones depends on their ids and the seed alone
leave-last:2     the last 2 events of each user are predicted from the earlier ones
time:2015-01-06  events from this time on are predicted from the earlier ones; also a year, a month, ISO 8601 in UTC, or
                 a number since 1970 of seconds, milliseconds, ..., by its size
time:last:7d     events less than 7 days (d; weeks w, hours h) older than the log's last event are predicted
file:PATH        the users that a file lists are in `eval`; or, if it is a second log (a file, folder or pattern), the
                 events of that log are predicted
none             everything is in `train`
"""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.event_statistics import DURATIONS_MS
from evenrank.datasets.schema import TIMESTAMP_MS, USER_ID, IdKind, user_hash
from evenrank.preprocess.build.sequences import Sequences
from evenrank.preprocess.log_config import TabularConfig
from evenrank.preprocess.read.keys import keys_of
from evenrank.preprocess.read.places import find_files
from evenrank.preprocess.read.tabular import open_table
from evenrank.preprocess.read.times import MAX_TIMESTAMP_MS, PER_SECOND, unit_of
from evenrank.preprocess.read.values import id_checks, raw_id, with_ids

TRAIN, EVAL = "train", "eval"
IN_EVAL = "evenrank in_eval"  # column of events, if eval has its own log: 1 in that log, else 0
_MAX_TARGETS = int(np.iinfo(np.int32).max)
_LAST = re.compile("last:([1-9][0-9]{0,8})([hdw])")
_NUMBER = re.compile("(?![0-9]{4}$|(?:19|20)[0-9]{6}$)[0-9]+")  # neither 2015 nor 20150106


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFacts:
    """What a rule depends on besides the sequences."""

    seed: int
    last_ms: int  # time of the last event of the log, before filters
    eval_users: NDArray[np.int64]  # keys of those in the file of `file:PATH`


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRule:
    """A rule that divides sequences into splits; it can be pickled."""

    divide: Callable[[Sequences, SplitFacts], dict[str, Sequences]]
    by: Literal["user", "last", "time", ""]  # of `eval`: users, last events of each, late events; empty: there is none
    file: Path | None = None  # with the users of `eval`, or its events
    remedy: str | None = None  # of a split without rows, if that is an error

    @property
    def has_targets(self) -> bool:
        """Whether a number of last events of the rows in `eval` are to be predicted."""
        return self.by in ("last", "time")


def parse_split(text: str, *, has_eval_log: bool = False) -> SplitRule:
    """Parse the text of a rule, as above; with `has_eval_log`, a file is a second log, whose events have IN_EVAL."""
    kind, _, value = text.partition(":")
    try:
        if kind == "user" and 0 <= (fraction := float(value)) <= 1:
            return SplitRule(divide=partial(_by_user, fraction=fraction), by="user")
        if kind == "leave-last" and 1 <= (count := int(value)) <= _MAX_TARGETS:
            return SplitRule(divide=partial(_leave_last, count=count), by="last")
        if kind == "time":
            last = _LAST.fullmatch(value)
            offset_ms = -int(last[1]) * DURATIONS_MS[last[2]] + 1 if last else _milliseconds(value)
            if last or 0 <= offset_ms <= MAX_TIMESTAMP_MS:
                divide = partial(_by_time, offset_ms=offset_ms, from_end=last is not None)
                return SplitRule(divide=divide, by="time", remedy="choose a time between them")
        if kind == "file" and value:
            if has_eval_log:
                remedy = "give a second log with other events"
                return SplitRule(divide=_by_second_log, by="time", file=Path(value), remedy=remedy)
            remedy = "list some users of the log, but not all"
            return SplitRule(divide=_by_list, by="user", file=Path(value), remedy=remedy)
        if text == "none":
            return SplitRule(divide=_all_in_train, by="")
    except (ValueError, OverflowError):  # the latter from dates next to the ends of the calendar
        pass
    raise ConfigError(
        f"invalid split {text!r}; expected user:FRACTION (0 to 1), leave-last:N (N from 1 to 2^31-1), "
        "time:TIME (2015, 2015-01-06, ISO 8601 or seconds, 1970 to 9999), time:last:7d (or h, w), file:PATH or none"
    )


def _milliseconds(text: str) -> int:
    if _NUMBER.fullmatch(text):
        return int(text) * 1000 // PER_SECOND[unit_of(int(text))]
    moment = datetime.fromisoformat(text if len(text) > len("2015-01") else f"{text}-01-01"[: len("2015-01-01")])
    return round(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)


def _all_in_train(sequences: Sequences, facts: SplitFacts) -> dict[str, Sequences]:
    return {TRAIN: sequences}


def _by_user(sequences: Sequences, facts: SplitFacts, fraction: float) -> dict[str, Sequences]:
    # The salt must not be 0, because the hash with salt 0 orders the rows.
    hashes = user_hash(sequences.user_keys, salt=(facts.seed << 1) | 1)
    # The top 53 bits convert to float64 exactly, and scale to fractions below 1.
    in_eval = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction
    return {TRAIN: sequences.take(~in_eval), EVAL: sequences.take(in_eval)}


def _by_list(sequences: Sequences, facts: SplitFacts) -> dict[str, Sequences]:
    in_eval = np.isin(sequences.user_keys, facts.eval_users)
    return {TRAIN: sequences.take(~in_eval), EVAL: sequences.take(in_eval)}


def _leave_last(sequences: Sequences, facts: SplitFacts, count: int) -> dict[str, Sequences]:
    """Keep all events of users in `train` whose history would become empty, and leave these users out of `eval`."""
    has_history = sequences.lengths > count
    train = replace(sequences, ends=np.where(has_history, sequences.ends - count, sequences.ends))
    evaluated = sequences.take(has_history)
    num_targets = np.full(len(evaluated), count, dtype=np.int32)
    return {TRAIN: train, EVAL: replace(evaluated, num_targets=num_targets)}


def _by_time(sequences: Sequences, facts: SplitFacts, offset_ms: int, from_end: bool) -> dict[str, Sequences]:
    is_before = sequences.events[TIMESTAMP_MS] < offset_ms + facts.last_ms * from_end
    train = sequences.take_events(is_before[sequences.order])
    num_targets = (sequences.lengths - train.lengths).astype(np.int32)
    evaluated = replace(sequences, num_targets=num_targets)
    return {TRAIN: train.take(train.lengths > 0), EVAL: evaluated.take(num_targets > 0)}


def _by_second_log(sequences: Sequences, facts: SplitFacts) -> dict[str, Sequences]:
    """Predict the events of the second log from those of the first one before them; `train` has all of the first."""
    in_eval = sequences.events[IN_EVAL][sequences.order] == 1
    num_before = np.concatenate(([0], np.cumsum(in_eval)))  # events of the second log, by place in the order
    num_before_row = np.repeat(num_before[sequences.begins], sequences.lengths)  # by place, those of earlier rows
    train = sequences.take_events(~in_eval)
    num_targets = (sequences.lengths - train.lengths).astype(np.int32)
    evaluated = sequences.take_events(in_eval | (num_before[:-1] == num_before_row))
    evaluated = replace(evaluated, num_targets=num_targets)
    return {TRAIN: train.take(train.lengths > 0), EVAL: evaluated.take(num_targets > 0)}


def second_log(path: Path, log: TabularConfig) -> tuple[Path, ...]:
    """Return the files of the second log that the path of `file:PATH` leads to; none if it is a list of users.

    Only logs have items, or are not the file itself.
    """
    files = tuple(find_files([path]))
    if files != (path,):
        return files
    with contextlib.suppress(DataError):
        table = open_table(path, [log.item_column], separator=log.delimiter, columns=log.columns)
        if len(table.head(1, pl.col(log.item_column).is_not_null())):  # any key is a column of JSON lines
            return files
    return ()


def read_listed_users(path: Path, column: str, kind: IdKind) -> tuple[NDArray[np.int64], int]:
    """Return the keys of the users that a file lists, without those of another kind: int64 [users].

    Also return how many users it lists.

    Args:
        path: a text file (.txt) with an id per line, or a table.
        column: of the users in a table.
        kind: of the ids in the log.
    """
    if path.suffix.lower() == ".txt":
        # A separator that no id contains, repeated, so that quotes are part of an id.
        table, column = open_table(path, [USER_ID], separator="\x1f\x1f", columns=[USER_ID]), USER_ID
    else:
        table = open_table(path, [column])
    ids = [raw_id(table, column, "text").alias(USER_ID), raw_id(table, column, kind).alias("of kind")]
    users = with_ids(table, column).read_distinct(USER_ID, ids, id_checks(table, column, "text"))
    return keys_of(users.get_column("of kind").drop_nulls()), len(users)
