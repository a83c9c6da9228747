"""MovieLens (ml-1m, ml-20m): rating files -> interactions. A rating becomes an action from 0 (lowest) on."""

import re
from pathlib import Path

import polars as pl

from evenrank.datasets.errors import DataError
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID, SourceFile
from evenrank.preprocess.catalog import PublicDataset
from evenrank.preprocess.download import md5_of
from evenrank.preprocess.interactions import Context, Interactions, encode_context

_BOM = "\u00ef\u00bb\u00bf"  # of UTF-8, as latin-1 reads it
_RATING = "rating"
_SECONDS = "seconds"
# Seconds whose milliseconds still fit into 64 bits.
_MAX_SECONDS = (2**63 - 1) // 1000
_DTYPES = {USER_ID: pl.Int64, ITEM_ID: pl.Int64, _RATING: pl.Float64, _SECONDS: pl.Int64}

# Fields of a line of users.dat, and the names of the features they become.
_USER_FIELDS = (USER_ID, "sex", "age_group", "occupation", "zip_code")
# User id, age and occupation; a feature that is missing is empty.
_USER_NUMBERS = "[0-9]{1,18}::[0-9]{0,18}::[0-9]{0,18}"


def read_movielens(dataset: PublicDataset, folder: Path) -> Interactions:
    """Read the rating file of a MovieLens dataset, and its users' features where it has them.

    Raises:
        DataError: a file is empty, has another header, or a line that cannot be read or lies outside the rating scale;
            the message gives the first such line.

    """
    ratings_path = folder / dataset.ratings
    events = _read_ratings(dataset, ratings_path)
    sources = [ratings_path]
    context = None
    if dataset.users is not None:
        sources.append(folder / dataset.users)
        context = _read_users(folder / dataset.users)
    return Interactions(
        events=events.lazy(),
        context=context,
        num_actions=dataset.num_actions,
        sources=tuple(
            SourceFile(path=f"{dataset.name}/{path.name}", bytes=path.stat().st_size, md5=md5_of(path))
            for path in sources
        ),
    )


def _read_ratings(dataset: PublicDataset, path: Path) -> pl.DataFrame:
    skip_lines = 0 if dataset.header is None else 1
    try:
        with path.open("rb") as file:
            first_line = file.readline().decode("latin-1").rstrip("\r\n")
        if dataset.header is not None and first_line.removeprefix(_BOM) != dataset.header:
            shown = first_line[:80]
            raise DataError(f"{path} begins with {shown!r} where {dataset.header!r} is expected; is it another file?")
        ratings = _scan(dataset, path, skip_lines).collect()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except pl.exceptions.NoDataError:
        raise DataError(f"{path} holds no rating; unpack or download it again") from None
    except pl.exceptions.PolarsError as error:
        raise DataError(_first_bad_line(dataset, path, skip_lines)) from error
    if ratings.is_empty():
        raise DataError(f"{path} holds no rating; unpack or download it again")
    steps = pl.col(_RATING) * dataset.ratings_per_star  # 1, 2, ..., num_actions for ratings on the scale
    valid = [
        steps.is_between(1, dataset.num_actions) & (steps == steps.round()),
        pl.col(USER_ID).is_not_null(),
        pl.col(ITEM_ID) >= 0,
        pl.col(_SECONDS).is_between(-_MAX_SECONDS, _MAX_SECONDS),
        *(pl.col(name).is_null() for name in ratings.columns if name not in _DTYPES),
    ]
    if not ratings.select(pl.all_horizontal(valid).fill_null(False).all()).item():
        raise DataError(_first_bad_line(dataset, path, skip_lines))
    return ratings.select(
        USER_ID,
        ITEM_ID,
        (steps - 1).cast(pl.Int32).alias(ACTION),
        (pl.col(_SECONDS) * 1000).alias(TIMESTAMP_MS),
    )


def _scan(dataset: PublicDataset, path: Path, skip_lines: int) -> pl.LazyFrame:
    # A separator of two characters, `::`, is read as one of them with an empty column between each two fields.
    gaps = len(dataset.separator) - 1
    schema: dict[str, type[pl.DataType]] = {}
    for name, dtype in _DTYPES.items():
        if schema:
            schema.update({f"gap before {name} {gap}": pl.String for gap in range(gaps)})
        schema[name] = dtype
    return pl.scan_csv(
        path,
        separator=dataset.separator[0],
        has_header=False,
        skip_lines=skip_lines,
        schema=schema,
        quote_char=None,
    )


def _first_bad_line(dataset: PublicDataset, path: Path, skip_lines: int) -> str:
    """Describe the first line that is not a rating on the scale; slow, for when it is known that there is one."""
    with path.open(encoding="latin-1", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            text = line.rstrip("\r\n")
            if number > skip_lines and (reason := _why_bad(dataset, text.split(dataset.separator))):
                return f"{path}, line {number} ({text[:80]!r}): {reason}; mend or remove the line"
    return f"{path} cannot be read as lines of {dataset.separator!r} separated numbers; unpack or download it again"


def _why_bad(dataset: PublicDataset, values: list[str]) -> str | None:
    if len(values) != len(_DTYPES):
        return f"{len(values)} fields where {len(_DTYPES)} are expected"
    for name, value in zip(_DTYPES, values, strict=True):
        if name != _RATING and not (re.fullmatch("[+-]?[0-9]+", value) and -(2**63) <= int(value) < 2**63):
            return f"{value!r} is not a 64-bit number"
    if int(values[1]) < 0:
        return f"{values[1]} is no item id, because it is negative"
    if abs(int(values[3])) > _MAX_SECONDS:
        return f"{values[3]} seconds are too many to be counted in milliseconds"
    lowest, highest = 1 / dataset.ratings_per_star, dataset.max_stars
    try:
        steps = float(values[2]) * dataset.ratings_per_star
    except ValueError:
        return f"{values[2]!r} is not a rating"
    if not 1 <= steps <= dataset.num_actions or steps != int(steps):
        return (
            f"rating {values[2]} is not on the scale of {dataset.name}, {lowest:g} to {highest} in steps of {lowest:g}"
        )
    return None


def _read_users(path: Path) -> Context:
    try:
        lines = path.read_text(encoding="latin-1").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if not lines:
        raise DataError(f"{path} holds no user; unpack or download it again")
    rows = [line.split("::") for line in lines]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(_USER_FIELDS) or not re.fullmatch(_USER_NUMBERS, "::".join((row[0], row[2], row[3]))):
            raise DataError(
                f"{path}, line {number} ({lines[number - 1][:80]!r}): UserID::Gender::Age::Occupation::Zip-code is "
                f"expected; mend or remove the line"
            )
    users = pl.DataFrame(rows, schema=dict.fromkeys(_USER_FIELDS, pl.String), orient="row")
    present = users.with_columns(pl.when(pl.all() != "").then(pl.all()))
    return encode_context(present.with_columns(pl.col(USER_ID, "age_group", "occupation").cast(pl.Int64)))
