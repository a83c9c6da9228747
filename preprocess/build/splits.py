"""Which rows, and which of their events, go to `train` and to `eval`.

user:0.3        users; a user's split depends on its id and the seed alone
leave-last:2    each user's last 2 events are to be predicted from those before
time:2015-01-01 events from then on are to be predicted from those before
none            all in `train`
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import user_hash
from evenrank.preprocess.sources.interactions import MAX_TIMESTAMP_MS
from evenrank.preprocess.build.sequences import Sequences

TRAIN = "train"
EVAL = "eval"


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRule:
    """A way to split, as it is written on the command line."""

    text: str
    divide: Callable[[Sequences, int], dict[str, Sequences]]  # takes a seed
    has_targets: bool = False  # rows of `eval` say how many of their last events are to be predicted


def parse_split(text: str) -> SplitRule:
    """Read `user:FRACTION`, `leave-last:N`, `time:TIMESTAMP` (milliseconds, or ISO 8601 in UTC) or `none`.

    Raises:
        ConfigError: it is none of these, or the value is out of its range.

    """
    kind, _, value = text.partition(":")
    try:
        if kind == "user" and 0 <= (fraction := float(value)) <= 1:
            return SplitRule(text=text, divide=lambda sequences, seed: _by_user(sequences, fraction, seed))
        if kind == "leave-last" and (count := int(value)) >= 1:
            return SplitRule(text=text, divide=lambda sequences, seed: _leave_last(sequences, count), has_targets=True)
        if kind == "time" and 0 <= (boundary := _milliseconds(value)) <= MAX_TIMESTAMP_MS:
            return SplitRule(text=text, divide=lambda sequences, seed: _by_time(sequences, boundary), has_targets=True)
        if text == "none":
            return SplitRule(text=text, divide=lambda sequences, seed: {TRAIN: sequences})
    except ValueError:
        pass
    raise ConfigError(
        f"{text!r} is not a split; there are user:FRACTION (0 to 1), leave-last:N (N from 1), "
        "time:TIMESTAMP (milliseconds or ISO 8601, 1970 to 9999) and none"
    )


def _milliseconds(text: str) -> int:
    if text.isdecimal():
        return int(text)
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def _by_user(sequences: Sequences, fraction: float, seed: int) -> dict[str, Sequences]:
    # The salt only has to differ from 0, which orders the rows.
    hashes = user_hash(sequences.user_ids, salt=(seed << 1) | 1)
    # The top 53 bits are exact in a float64, and below 1.
    in_eval = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction
    return {TRAIN: sequences.take(~in_eval), EVAL: sequences.take(in_eval)}


def _leave_last(sequences: Sequences, count: int) -> dict[str, Sequences]:
    """Keep users whole in `train` who would have no history left."""
    has_history = sequences.lengths > count
    train = replace(sequences, ends=np.where(has_history, sequences.ends - count, sequences.ends))
    evaluated = sequences.take(has_history)
    targets = np.full(len(evaluated), count, dtype=np.int32)
    return {TRAIN: train, EVAL: replace(evaluated, num_targets=targets)}


def _by_time(sequences: Sequences, boundary: int) -> dict[str, Sequences]:
    places = sequences.first_at_or_after(boundary)
    train = replace(sequences, ends=places).take(places > sequences.begins)
    evaluated = replace(sequences, num_targets=(sequences.ends - places).astype(np.int32))
    return {TRAIN: train, EVAL: evaluated.take(places < sequences.ends)}
