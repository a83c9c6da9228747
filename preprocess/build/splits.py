"""Rules that divide rows and their events between `train` and `eval`.

user:0.3         30 % of the users are in `eval`; which ones depends on their ids and the seed alone
leave-last:2     the last 2 events of each user are predicted from the earlier ones
time:2015-01-01  events from this time on are predicted from the earlier ones
none             everything is in `train`
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import TIMESTAMP_MS, user_hash
from evenrank.preprocess.build.sequences import Sequences, first_at_or_after
from evenrank.preprocess.sources.interactions import MAX_TIMESTAMP_MS

TRAIN, EVAL = "train", "eval"
_MAX_TARGETS = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRule:
    """A rule that divides sequences into splits."""

    divide: Callable[[Sequences, int], dict[str, Sequences]]  # called with a seed
    has_targets: bool = False  # whether a number of last events of the rows in `eval` are to be predicted


def parse_split(text: str) -> SplitRule:
    """Parse `user:FRACTION`, `leave-last:N`, `time:TIMESTAMP` (milliseconds, or ISO 8601 in UTC) or `none`."""
    kind, _, value = text.partition(":")
    try:
        if kind == "user" and 0 <= (fraction := float(value)) <= 1:
            return SplitRule(divide=lambda sequences, seed: _by_user(sequences, fraction, seed))
        if kind == "leave-last" and 1 <= (count := int(value)) <= _MAX_TARGETS:
            return SplitRule(divide=lambda sequences, seed: _leave_last(sequences, count), has_targets=True)
        if kind == "time" and 0 <= (boundary_ms := _milliseconds(value)) <= MAX_TIMESTAMP_MS:
            return SplitRule(divide=lambda sequences, seed: _by_time(sequences, boundary_ms), has_targets=True)
        if text == "none":
            return SplitRule(divide=lambda sequences, seed: {TRAIN: sequences})
    except (ValueError, OverflowError):  # the latter from dates next to the ends of the calendar
        pass
    raise ConfigError(
        f"invalid split {text!r}; expected user:FRACTION (0 to 1), leave-last:N (N from 1 to 2^31-1), "
        "time:TIMESTAMP (milliseconds or ISO 8601, 1970 to 9999) or none"
    )


def _milliseconds(text: str) -> int:
    if text.isdecimal():
        return int(text)
    moment = datetime.fromisoformat(text)
    return round(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)


def _by_user(sequences: Sequences, fraction: float, seed: int) -> dict[str, Sequences]:
    # The salt must not be 0, because the hash with salt 0 orders the rows.
    hashes = user_hash(sequences.user_ids, salt=(seed << 1) | 1)
    # The top 53 bits convert to float64 exactly, and scale to fractions below 1.
    in_eval = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction
    return {TRAIN: sequences.take(~in_eval), EVAL: sequences.take(in_eval)}


def _leave_last(sequences: Sequences, count: int) -> dict[str, Sequences]:
    """Keep all events of users in `train` whose history would become empty, and leave these users out of `eval`."""
    has_history = sequences.lengths > count
    train = replace(sequences, ends=np.where(has_history, sequences.ends - count, sequences.ends))
    evaluated = sequences.take(has_history)
    num_targets = np.full(len(evaluated), count, dtype=np.int32)
    return {TRAIN: train, EVAL: replace(evaluated, num_targets=num_targets)}


def _by_time(sequences: Sequences, boundary_ms: int) -> dict[str, Sequences]:
    times = sequences.events[TIMESTAMP_MS]
    boundaries = first_at_or_after(sequences.begins, sequences.ends, sequences.order, times, boundary_ms)
    train = replace(sequences, ends=boundaries).take(boundaries > sequences.begins)
    evaluated = replace(sequences, num_targets=(sequences.ends - boundaries).astype(np.int32))
    return {TRAIN: train, EVAL: evaluated.take(boundaries < sequences.ends)}
