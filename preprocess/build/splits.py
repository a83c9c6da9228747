"""Which events and users are kept, and rules that divide rows and their events between `train` and `eval`.

user:0.3         30 % of the users are in `eval`; which ones depends on their ids and the seed alone
leave-last:2     the last 2 events of each user are predicted from the earlier ones
time:2015-01-06  events from this time on are predicted from the earlier ones; also a year, a month, ISO 8601 in UTC, or
                 a number since 1970 of seconds, milliseconds, ..., by its size
time:last:7d     events less than 7 days (d; weeks w, hours h, minutes m) older than the log's last event are predicted
time:first:300d  events at least 300 days later than the log's first event are predicted
time:...,gap:30m,eval:1d
                 events of the first 30 minutes from that time on are left out, and what follows one day after them
file:PATH        the users that a file lists are in `eval`; or, if it is a second log (a file, folder or pattern), the
                 events of that log are predicted
none             everything is in `train`
"""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.value_counts import ValueCounts, count_values
from evenrank.datasets.event_statistics import DURATIONS_MS
from evenrank.datasets.schema import ITEM_ID, TIMESTAMP_MS, USER_ID, IdKind, user_hash
from evenrank.preprocess.build.buckets import Buckets
from evenrank.preprocess.build.sequences import Sequences
from evenrank.preprocess.config import Filters
from evenrank.preprocess.engine import Engine
from evenrank.preprocess.log_config import TabularConfig
from evenrank.preprocess.read.keys import KeyTable, encode_keys, keys_of, random_seed
from evenrank.preprocess.read.places import find_files
from evenrank.preprocess.read.tabular import open_table
from evenrank.preprocess.read.times import MAX_TIMESTAMP_MS, PER_SECOND, unit_of
from evenrank.preprocess.read.values import id_checks, raw_id, with_ids

TRAIN, EVAL = "train", "eval"
IN_EVAL = "evenrank in_eval"  # column of events, if eval has its own log: 1 in that log, else 0
_MAX_EVENTS = int(np.iinfo(np.int32).max)  # of a row
_UNKNOWN, _RARE, _LENGTH, _GAP, _LATE = 1, 2, 3, 4, 5  # reasons to leave out events
_DURATION = "([1-9][0-9]{0,8}[mhdw])"
_TIME = re.compile(f"((first|last):{_DURATION}|.+?)(?:,gap:{_DURATION})?(?:,eval:{_DURATION})?")
_NUMBER = re.compile("(?![0-9]{4}$|(?:19|20)[0-9]{6}$)[0-9]+")  # neither 2015 nor 20150106


def drop_unknown(buckets: Buckets, known: Mapping[str, KeyTable], engine: Engine) -> int:
    """Leave out events whose values of some columns are not in a table, and return their number."""
    if not known:
        return 0
    drop = partial(_leave_out, buckets, known, 0, _MAX_EVENTS, _UNKNOWN)
    return sum(count for _, count in engine.map(drop, range(len(buckets)), stage="finding unknown values"))


def leave_out_times(buckets: Buckets, rule: "SplitRule", facts: "SplitFacts", engine: Engine) -> dict[str, int]:
    """Leave out events in the gap of a split by time, and after its eval; return their numbers, for the audit."""
    counts = dict.fromkeys(("events in the gap of the split (left out)", "events after eval (left out)"), 0)
    if rule.gap_ms or rule.eval_ms:
        begin_ms = rule.first_ms(facts)
        leave_out = partial(_leave_out_times, buckets, begin_ms, rule.gap_ms, rule.eval_ms or MAX_TIMESTAMP_MS)
        for _, of_bucket in engine.map(leave_out, range(len(buckets)), stage="leaving out times"):
            counts = {what: counts[what] + count for what, count in zip(counts, of_bucket, strict=True)}
    return counts


def _leave_out_times(buckets: Buckets, begin_ms: int, gap_ms: int, eval_ms: int, index: int) -> tuple[int, int]:
    times = buckets.read(index, (TIMESTAMP_MS,))[TIMESTAMP_MS] - begin_ms
    is_in_gap = (times >= 0) & (times < gap_ms)
    num_in_gap = buckets.keep(index, ~is_in_gap, reason=_GAP)
    return num_in_gap, buckets.keep(index, times[~is_in_gap] < gap_ms + eval_ms, reason=_LATE)


def k_core(buckets: Buckets, filters: Filters, engine: Engine) -> int:
    """Remove users and items with too few events until none is left, and return the number of events removed.

    What remains is the largest set of events in which every user and every item has enough; it does not depend on the
    order of removal, nor on whether some were removed by a run that was killed.
    """
    if filters.min_user_events == filters.min_item_events == 1:
        return 0
    tasks, num_removed, num_before = range(len(buckets)), 0, -1
    while num_removed != num_before:
        num_before, items = num_removed, ValueCounts()
        for _, counted in engine.map(partial(_count_items, buckets), tasks, stage="k-core: counting items", keep=False):
            items.add(*counted)
        values, counts = items.result()
        frequent = {ITEM_ID: KeyTable(values[counts >= filters.min_item_events])}
        remove = partial(_leave_out, buckets, frequent, filters.min_user_events, _MAX_EVENTS, _RARE)
        removed = engine.map(remove, tasks, stage="k-core: leaving out events", keep=False)
        num_removed = sum(count for _, count in removed)
    return num_removed


def _count_items(buckets: Buckets, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return count_values(buckets.read(index, (ITEM_ID,))[ITEM_ID])


def keep_lengths(buckets: Buckets, filters: Filters, engine: Engine) -> int:
    """Leave out users whose history is too short or too long, and return their number."""
    if filters.min_length == 1 and filters.max_length is None:
        return 0
    keep = partial(_leave_out, buckets, {}, filters.min_length, filters.max_length or _MAX_EVENTS, _LENGTH)
    return sum(count for _, count in engine.map(keep, range(len(buckets)), stage="leaving out users"))


def _leave_out(buckets: Buckets, known: Mapping[str, KeyTable], least: int, most: int, reason: int, index: int) -> int:
    """Leave out events whose values some tables lack, then users with fewer or more of the others.

    Return how many events were left out for this reason; if it is the length, how many users.
    """
    columns = buckets.read(index, (USER_ID, *known))
    # All events of a user are in one bucket.
    users, codes = encode_keys(columns[USER_ID], random_seed())
    is_kept = np.ones(len(codes), dtype=np.bool_)
    for name, table in known.items():
        is_kept &= table.find(columns[name]) >= 0
    lengths = np.bincount(codes[is_kept], minlength=len(users))
    num_events = buckets.keep(index, is_kept & ((lengths >= least) & (lengths <= most))[codes], reason=reason)
    if reason != _LENGTH:
        return num_events
    return len(np.unique(buckets.read(index, (USER_ID,), reason=reason)[USER_ID]))  # also of a run that was killed


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFacts:
    """What a rule depends on besides the sequences."""

    seed: int
    limits_ms: tuple[int, int]  # times of the first and the last event of the log, before filters
    eval_users: NDArray[np.int64]  # keys of those in the file of `file:PATH`


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRule:
    """A rule that divides sequences into splits."""

    by: Literal["user", "last", "time", ""]  # of `eval`: users, last events of each, late events; empty: there is none
    fraction: float = 0  # of the users
    count: int = 0  # of the last events
    begin_ms: int = 0  # time of the first late event
    origin: str = ""  # `first` or `last`: event of the log from which that counts; empty: from 1970
    gap_ms: int = 0  # how long late events are left out
    eval_ms: int = 0  # after that, how long they are in `eval`; 0: all of them
    file: Path | None = None  # with the users of `eval`, or its events
    remedy: str | None = None  # of a split without rows, if that is an error

    @property
    def has_targets(self) -> bool:
        """Whether a number of last events of the rows in `eval` are to be predicted."""
        return self.by in ("last", "time")

    def first_ms(self, facts: SplitFacts) -> int:
        """Return the time of the first late event."""
        return self.begin_ms + {"": 0, "first": facts.limits_ms[0], "last": facts.limits_ms[1]}[self.origin]

    def divide(self, sequences: Sequences, facts: SplitFacts) -> dict[str, Sequences]:
        """Return the rows of each split."""
        if not self.by:
            return {TRAIN: sequences}
        if self.by == "user":
            # The salt must not be 0, because the hash with salt 0 orders the rows.
            hashes = user_hash(sequences.user_keys, salt=(facts.seed << 1) | 1)
            # The top 53 bits convert to float64 exactly, and scale to fractions below 1.
            in_eval = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.fraction
            if self.file is not None:
                in_eval = np.isin(sequences.user_keys, facts.eval_users)
            return {TRAIN: sequences.take(~in_eval), EVAL: sequences.take(in_eval)}
        evaluated = sequences
        if (
            self.by == "last"
        ):  # users whose history would become empty keep all events in `train`, and are not in `eval`
            has_history = sequences.lengths > self.count
            train = replace(sequences, ends=sequences.ends - np.where(has_history, self.count, 0))
        elif self.file is None:
            is_before = sequences.events[TIMESTAMP_MS] < self.first_ms(facts)
            train = sequences.take_events(is_before[sequences.order])
        else:  # the events of a second log are predicted from those of the first one before them, all of `train`
            is_target = sequences.events[IN_EVAL][sequences.order] == 1
            num_before = np.concatenate(([0], np.cumsum(is_target)))  # events of the second log, by place in the order
            num_before_row = np.repeat(
                num_before[sequences.begins], sequences.lengths
            )  # by place, those of earlier rows
            train = sequences.take_events(~is_target)
            evaluated = sequences.take_events(is_target | (num_before[:-1] == num_before_row))
        num_targets = (sequences.lengths - train.lengths).astype(np.int32)
        evaluated = replace(evaluated, num_targets=num_targets)
        return {TRAIN: train.take(train.lengths > 0), EVAL: evaluated.take(num_targets > 0)}


def parse_split(text: str, *, has_eval_log: bool = False) -> SplitRule:
    """Parse the text of a rule, as above; with `has_eval_log`, a file is a second log, whose events have IN_EVAL."""
    kind, _, value = text.partition(":")
    try:
        if kind == "user" and 0 <= (fraction := float(value)) <= 1:
            return SplitRule(by="user", fraction=fraction)
        if kind == "leave-last" and 1 <= (count := int(value)) <= _MAX_EVENTS:
            return SplitRule(by="last", count=count)
        if kind == "time" and (found := _TIME.fullmatch(value)):
            begin, origin, begin_text, gap, length = found.groups(default="")
            begin_ms = _duration_ms(begin_text) if origin else _milliseconds(begin)
            begin_ms = 1 - begin_ms if origin == "last" else begin_ms
            if origin or 0 <= begin_ms <= MAX_TIMESTAMP_MS:
                gap_ms, eval_ms, remedy = _duration_ms(gap), _duration_ms(length), "choose a time between them"
                return SplitRule(
                    by="time", begin_ms=begin_ms, origin=origin, gap_ms=gap_ms, eval_ms=eval_ms, remedy=remedy
                )
        if kind == "file" and value:
            if has_eval_log:
                remedy = "give a second log with other events"
                return SplitRule(by="time", file=Path(value), remedy=remedy)
            remedy = "list some users of the log, but not all"
            return SplitRule(by="user", file=Path(value), remedy=remedy)
        if text == "none":
            return SplitRule(by="")
    except (ValueError, OverflowError):  # the latter from dates next to the ends of the calendar
        pass
    raise ConfigError(
        f"invalid split {text!r}; expected user:FRACTION (0 to 1), leave-last:N (N from 1 to 2^31-1), "
        "time:TIME (2015, 2015-01-06, ISO 8601 or seconds, 1970 to 9999), time:last:7d (or w, h, m), time:first:7d, "
        "each perhaps with ,gap:30m and ,eval:1d, file:PATH or none"
    )


def _duration_ms(text: str) -> int:
    return int(text[:-1]) * DURATIONS_MS[text[-1]] if text else 0


def _milliseconds(text: str) -> int:
    if _NUMBER.fullmatch(text):
        return int(text) * 1000 // PER_SECOND[unit_of(int(text))]
    moment = datetime.fromisoformat(text if len(text) > len("2015-01") else f"{text}-01-01"[: len("2015-01-01")])
    return round(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)


def cut_windows(sequences: Sequences, filters: Filters) -> Sequences:
    """Cut the rows of users with more than `window` events into windows that start every `stride` events.

        8 events, window 4, stride 3:    0 1 2 3
                                               3 4 5 6
                                                     6 7

    The last window ends with the newest event and may be shorter. `windows` becomes the index of each row's window.
    """
    if filters.window is None:
        return sequences
    stride = filters.stride or filters.window
    lengths = sequences.lengths
    counts = 1 + np.maximum(0, -(-(lengths - filters.window) // stride))
    rows = np.repeat(np.arange(len(sequences)), counts)
    windows = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    cut = sequences.take(rows)
    begins = cut.begins + windows * stride
    return replace(
        cut, begins=begins, ends=np.minimum(begins + filters.window, cut.ends), windows=windows.astype(np.int32)
    )


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
    users, _ = with_ids(table, column).read_distinct(USER_ID, ids, id_checks(table, column, "text"))
    return keys_of(users.get_column("of kind").drop_nulls()), len(users)
