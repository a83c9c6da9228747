"""MovieLens (ml-1m, ml-20m): rating files -> interactions. Ratings become actions 0, 1, ..., lowest rating first."""

from pathlib import Path

import polars as pl

from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.preprocess.files.tabular import open_table
from evenrank.preprocess.sources.catalog import MovieLensDataset
from evenrank.preprocess.sources.download import source_files
from evenrank.preprocess.sources.features import encode_context
from evenrank.preprocess.sources.interactions import Interactions, integer_checks, time_checks

_RATING_COLUMNS = {"userId": pl.Int64(), "movieId": pl.Int64(), "rating": pl.Float64(), "timestamp": pl.Int64()}
_USER_COLUMNS = dict.fromkeys(("user", "sex", "age_group", "occupation", "zip_code"), pl.String())


def read_movielens(dataset: MovieLensDataset, folder: Path) -> Interactions:
    """Read the ratings and the users' features, if any, of a MovieLens dataset."""
    ratings = open_table(
        folder / dataset.events[0],
        _RATING_COLUMNS,
        separator=dataset.separator,
        columns=tuple(_RATING_COLUMNS),
        has_header=dataset.has_header,
    )
    lowest = 1 / dataset.ratings_per_star
    step = pl.col("rating") * dataset.ratings_per_star  # 1, 2, ..., num_actions for ratings on the scale
    events = (
        pl.col("userId").alias(USER_ID),
        pl.col("movieId").alias(ITEM_ID),
        (step - 1).cast(pl.Int32, strict=False).alias(ACTION),
        (pl.col("timestamp") * 1000).alias(TIMESTAMP_MS),
    )
    checks = {
        **integer_checks("userId", "movieId"),
        "movieId must not be negative": pl.col("movieId") >= 0,
        "rating is not a number": pl.col("rating").is_not_null(),
        f"rating is not on the scale of {dataset.name}, {lowest:g} to 5 in steps of {lowest:g}": (
            step.is_between(1, dataset.num_actions) & (step == step.round())
        ),
        **time_checks("timestamp", unit_ms=1000),
    }
    return Interactions(
        parts=(ratings.part(events, checks),),
        context=None if dataset.users is None else encode_context(_read_users(folder / dataset.users)),
        num_actions=dataset.num_actions,
        time_unit="s",
        sources=lambda: source_files(folder.parent, [folder / name for name in dataset.files]),
    )


def _read_users(path: Path) -> pl.DataFrame:
    users = open_table(path, _USER_COLUMNS, separator="::", columns=tuple(_USER_COLUMNS))
    text = {name: pl.when(pl.col(name) != "").then(pl.col(name)) for name in ("sex", "zip_code")}
    numbers = {name: pl.col(name).cast(pl.Int64, strict=False) for name in ("age_group", "occupation")}
    features = [(text | numbers)[name].alias(name) for name in _USER_COLUMNS if name != "user"]
    checks = {f"{name} is not a number": pl.col(name).str.contains("^[0-9]{0,18}$") for name in numbers}
    columns = [pl.col("user").cast(pl.Int64).alias(USER_ID), *features]
    return users.read_users(columns, integer_checks("user") | checks)
