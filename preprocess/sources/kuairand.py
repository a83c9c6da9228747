"""KuaiRand (Pure, 1K, 27K): logs of watched videos -> interactions.

The bits of an action are what the user did with the video: clicked it, liked it, commented on it, ...
"""

import csv
import re
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.preprocess.sources.catalog import KuaiRandDataset
from evenrank.preprocess.sources.download import source_files
from evenrank.preprocess.sources.interactions import (
    MAX_TIMESTAMP_MS,
    Context,
    Interactions,
    encode_text_context,
    reading,
)
from evenrank.preprocess.sources.tabular import CsvEvents, integer_check, read_lines

# Columns of the log that are 1 if the user did this, else 0, and the values of their bits in the action.
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

# All columns of a log, in file order. Those that are not used are never parsed, whatever type is given here.
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
        DataError: a file is missing, is empty or has an unexpected header, or a line of the users' features cannot be
            read.

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
            **integer_check("user_id"),
            **integer_check("video_id"),
            "video_id must not be negative": pl.col("video_id") >= 0,
            **integer_check("time_ms"),
            "time_ms is not in the years 1970 to 9999": pl.col("time_ms").is_between(0, MAX_TIMESTAMP_MS),
            **{f"{flag} must be 0 or 1": pl.col(flag).is_between(0, 1) for flag in _FLAGS},
            **integer_check("play_time_ms"),
            **integer_check("duration_ms"),
            **integer_check(
                "tab"
            ),  # the last column, read only for this check: it is missing in rows with too few fields
        },
    )


def _read_users(path: Path) -> Context:
    columns = (USER_ID, *_FEATURES)
    with reading(path):
        lines = ((number, _fields(path, number, line)) for number, line in read_lines(path))
        _, header = next(lines, (1, []))
        if missing := [name for name in columns if name not in header]:
            raise DataError(f"{path} lacks column {', '.join(missing)}; unpack or download it again")
        positions = [header.index(name) for name in columns]
        rows = []
        for number, fields in lines:
            if len(fields) != len(header) or not re.fullmatch("-?[0-9]{1,18}", fields[positions[0]]):
                raise DataError(
                    f"{path}, line {number} ({','.join(fields)[:80]!r}): expected {len(header)} fields with an integer "
                    "as user_id; fix or remove the line"
                )
            rows.append([fields[position] for position in positions])
    if not rows:
        raise DataError(f"{path} contains no users; unpack or download it again")
    return encode_text_context(rows, columns, integer_columns=(USER_ID,))


def _fields(path: Path, number: int, line: str) -> list[str]:
    # Ranges such as "(0,10]" are quoted. A quoted field must end on its line: an unbalanced quote hides no other line.
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error as error:
        raise DataError(f"{path}, line {number}: {error}; unpack or download it again") from error
