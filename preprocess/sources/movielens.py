"""MovieLens (ml-1m, ml-20m): rating files -> interactions. Ratings become actions 0, 1, ..., lowest rating first."""

import re
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.preprocess.sources.catalog import MovieLensDataset
from evenrank.preprocess.sources.download import source_files
from evenrank.preprocess.sources.interactions import (
    MAX_TIMESTAMP_MS,
    Context,
    Interactions,
    encode_text_context,
    reading,
)
from evenrank.preprocess.sources.tabular import CsvEvents, integer_check, read_lines

_COLUMNS = {"userId": pl.Int64, "movieId": pl.Int64, "rating": pl.Float64, "timestamp": pl.Int64}

# The fields of a line of users.dat, under the names of the features they become.
_USER_FIELDS = (USER_ID, "sex", "age_group", "occupation", "zip_code")
# User id, age and occupation of a line; a missing feature is empty.
_USER_NUMBERS = "[0-9]{1,18}::[0-9]{0,18}::[0-9]{0,18}"


def read_movielens(dataset: MovieLensDataset, folder: Path) -> Interactions:
    """Read the rating file of a MovieLens dataset, and its users' features if it has any.

    Raises:
        DataError: a file is empty or has an unexpected header, or a line of the users' features cannot be read.

    """
    lowest, highest = 1 / dataset.ratings_per_star, dataset.max_stars
    step = pl.col("rating") * dataset.ratings_per_star  # 1, 2, ..., num_actions for ratings on the scale
    ratings = CsvEvents(
        path=folder / dataset.ratings,
        columns=_COLUMNS,
        has_header=dataset.has_header,
        separator=dataset.separator,
        events=(
            pl.col("userId").alias(USER_ID),
            pl.col("movieId").alias(ITEM_ID),
            (step - 1).cast(pl.Int32, strict=False).alias(ACTION),
            (pl.col("timestamp") * 1000).alias(TIMESTAMP_MS),
        ),
        checks={
            **integer_check("userId"),
            **integer_check("movieId"),
            "movieId must not be negative": pl.col("movieId") >= 0,
            "rating is not a number": pl.col("rating").is_not_null(),
            f"rating is not on the scale of {dataset.name}, {lowest:g} to {highest} in steps of {lowest:g}": (
                step.is_between(1, dataset.num_actions) & (step == step.round())
            ),
            **integer_check("timestamp"),
            "timestamp is not in the years 1970 to 9999": pl.col("timestamp").is_between(0, MAX_TIMESTAMP_MS // 1000),
        },
    )
    context = None if dataset.users is None else _read_users(folder / dataset.users)
    return Interactions(
        parts=(ratings.part(),),
        context=context,
        num_actions=dataset.num_actions,
        sources=lambda: source_files(folder.parent, [folder / name for name in dataset.files]),
    )


def _read_users(path: Path) -> Context:
    rows = []
    with reading(path):
        for number, line in read_lines(path):
            row = line.split("::")
            if len(row) != len(_USER_FIELDS) or not re.fullmatch(_USER_NUMBERS, "::".join((row[0], row[2], row[3]))):
                raise DataError(
                    f"{path}, line {number} ({line[:80]!r}): expected UserID::Gender::Age::Occupation::Zip-code; fix "
                    "or remove the line"
                )
            rows.append(row)
    if not rows:
        raise DataError(f"{path} contains no users; unpack or download it again")
    return encode_text_context(rows, _USER_FIELDS, integer_columns=(USER_ID, "age_group", "occupation"))
