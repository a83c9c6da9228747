"""KuaiRand (Pure, 1K, 27K): logs of watched videos -> interactions.

The bits of an action tell how the user responded to the video: a click, a like, a comment, ...
"""

from pathlib import Path

import polars as pl

from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.preprocess.files.table import EventPart
from evenrank.preprocess.files.tabular import open_table
from evenrank.preprocess.sources.catalog import PublicArchive
from evenrank.preprocess.sources.download import source_files
from evenrank.preprocess.sources.features import encode_context
from evenrank.preprocess.sources.interactions import Interactions, integer_checks, time_checks

# All columns of a log, in file order.
_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
_UNUSED = ("date", "hourmin", "profile_stay_time", "comment_stay_time", "is_rand")
# Columns that are 1 if the user responded so, else 0: the bits of the action, lowest bit first.
_FLAGS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter")
_EXTRA = ("play_time_ms", "duration_ms")
_FEATURES = (
    "user_active_degree",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
)


def read_kuairand(dataset: PublicArchive, folder: Path) -> Interactions:
    """Read the logs and the users' features of a KuaiRand dataset."""
    return Interactions(
        parts=tuple(_read_log(folder / name) for name in dataset.events),
        context=encode_context(_read_users(folder / dataset.files[-1])),
        num_actions=1 << len(_FLAGS),
        extra_events=dict.fromkeys(_EXTRA, "int64"),
        sources=lambda: source_files(folder.parent, [folder / name for name in dataset.files]),
    )


def _read_log(path: Path) -> EventPart:
    columns = _HEADER.split(",")
    needed = {name: pl.Int64() for name in columns if name not in _UNUSED}
    table = open_table(path, needed, separator=",", columns=columns, has_header=True)
    bits = [pl.col(flag).cast(pl.Int32, strict=False) * (1 << bit) for bit, flag in enumerate(_FLAGS)]
    events = (
        pl.col("user_id").alias(USER_ID),
        pl.col("video_id").alias(ITEM_ID),
        pl.sum_horizontal(bits).alias(ACTION),
        pl.col("time_ms").alias(TIMESTAMP_MS),
        *map(pl.col, _EXTRA),
    )
    checks = {
        **integer_checks("user_id", "video_id"),
        "video_id must not be negative": pl.col("video_id") >= 0,
        **time_checks("time_ms"),
        **{f"{flag} must be 0 or 1": pl.col(flag).is_between(0, 1) for flag in _FLAGS},
        **integer_checks("play_time_ms", "duration_ms", "tab"),
    }
    return table.part(events, checks)


def _read_users(path: Path) -> pl.DataFrame:
    # Ranges such as "(0,10]" are quoted.
    users = open_table(path, dict.fromkeys((USER_ID, *_FEATURES), pl.String()), separator=",")
    features = [pl.when(pl.col(name) != "").then(pl.col(name)).alias(name) for name in _FEATURES]
    return users.read_users([pl.col(USER_ID).cast(pl.Int64), *features], integer_checks(USER_ID))
