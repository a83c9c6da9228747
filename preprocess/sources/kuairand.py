"""KuaiRand (Pure, 1K, 27K): logs of watched videos -> interactions. What a user did with a video makes the action."""

import csv
import re
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.preprocess.sources.catalog import KuaiRandDataset
from evenrank.preprocess.sources.csvfile import CsvEvents, integer
from evenrank.preprocess.sources.download import source_files
from evenrank.preprocess.sources.interactions import MAX_TIMESTAMP_MS, Context, Interactions, encode_context

# What is 1 in the log where the user did it, and the bit of the action that it becomes.
_FLAGS = {
    "is_click": 1,
    "is_like": 2,
    "is_follow": 4,
    "is_comment": 8,
    "is_forward": 16,
    "is_hate": 32,
    "long_view": 64,
    "is_profile_enter": 128,
}
_EXTRA = ("play_time_ms", "duration_ms")

# Of the log, in its order. Columns that nobody asks for are never parsed, whatever type they have here.
_COLUMNS: dict[str, type[pl.DataType]] = {
    "user_id": pl.Int64,
    "video_id": pl.Int64,
    "date": pl.String,
    "hourmin": pl.String,
    "time_ms": pl.Int64,
    "is_click": pl.Int8,
    "is_like": pl.Int8,
    "is_follow": pl.Int8,
    "is_comment": pl.Int8,
    "is_forward": pl.Int8,
    "is_hate": pl.Int8,
    "long_view": pl.Int8,
    "play_time_ms": pl.Int64,
    "duration_ms": pl.Int64,
    "profile_stay_time": pl.String,
    "comment_stay_time": pl.String,
    "is_profile_enter": pl.Int8,
    "is_rand": pl.String,
    "tab": pl.Int64,
}

_FEATURES = (
    "user_active_degree",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
)


def read_kuairand(dataset: KuaiRandDataset, folder: Path) -> Interactions:
    """Read the logs of a KuaiRand dataset, and its users' features.

    Raises:
        DataError: a file is missing, empty or has another header, or a line of the users' features cannot be read.

    """
    return Interactions(
        parts=tuple(_log(folder / name).part() for name in dataset.logs),
        context=_read_users(folder / dataset.users),
        num_actions=2 * max(_FLAGS.values()),
        extra_events=dict.fromkeys(_EXTRA, "int64"),
        sources=lambda: source_files(folder.parent, [folder / name for name in dataset.files]),
    )


def _log(path: Path) -> CsvEvents:
    bits = [pl.col(flag).cast(pl.Int32) * bit for flag, bit in _FLAGS.items()]
    return CsvEvents(
        path=path,
        columns=_COLUMNS,
        has_header=True,
        events=(
            pl.col("user_id").alias(USER_ID),
            pl.col("video_id").alias(ITEM_ID),
            pl.sum_horizontal(bits).alias(ACTION),
            pl.col("time_ms").alias(TIMESTAMP_MS),
            *map(pl.col, _EXTRA),
        ),
        checks={
            **integer("user_id"),
            **integer("video_id"),
            "video_id must not be negative": pl.col("video_id") >= 0,
            **integer("time_ms"),
            "time_ms is not in the years 1970 to 9999": pl.col("time_ms").is_between(0, MAX_TIMESTAMP_MS),
            **{f"{flag} must be 0 or 1": pl.col(flag).is_between(0, 1) for flag in _FLAGS},
            **integer("play_time_ms"),
            **integer("duration_ms"),
            **integer("tab"),  # read for this check alone: a row of too few fields lacks the last one
        },
    )


def _read_users(path: Path) -> Context:
    try:
        # Ranges such as "(0,10]" are quoted, and there are few users: the csv module reads both safely.
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            if missing := [name for name in (USER_ID, *_FEATURES) if name not in header]:
                raise DataError(f"{path} has no column {', '.join(missing)}; unpack or download it again")
            places = [header.index(name) for name in (USER_ID, *_FEATURES)]
            rows = []
            for line in lines:
                if len(line) != len(header) or not re.fullmatch("-?[0-9]{1,18}", line[places[0]]):
                    raise DataError(
                        f"{path}, line {lines.line_num} ({','.join(line)[:80]!r}): {len(header)} fields with a whole "
                        f"number as user_id are expected; mend or remove the line"
                    )
                rows.append([line[place] for place in places])
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except csv.Error as error:
        raise DataError(f"{path}, line {lines.line_num}: {error}; unpack or download it again") from error
    if not rows:
        raise DataError(f"{path} holds no user; unpack or download it again")
    users = pl.DataFrame(rows, schema=dict.fromkeys((USER_ID, *_FEATURES), pl.String), orient="row")
    present = users.with_columns(pl.when(pl.all() != "").then(pl.all()))
    return encode_context(present.with_columns(pl.col(USER_ID).cast(pl.Int64)))
