"""MovieLens (ml-1m, ml-20m): rating files -> interactions. A rating becomes an action from 0 (lowest) on."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from evenrank.datasets.errors import DataError
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID, SourceFile
from evenrank.preprocess.catalog import PublicDataset
from evenrank.preprocess.download import md5_of
from evenrank.preprocess.interactions import Context, Interactions, encode_context

_RATING = "rating"
_SECONDS = "seconds"
_DTYPES = {USER_ID: pl.Int64, ITEM_ID: pl.Int64, _RATING: pl.Float64, _SECONDS: pl.Int64}

# Fields of a line of users.dat, and the names of the features they become.
_USER_FIELDS = (USER_ID, "sex", "age_group", "occupation", "zip_code")


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
    with path.open("rb") as file:
        first_line = file.readline().decode("latin-1").rstrip("\r\n")
    if dataset.header is not None and first_line != dataset.header:
        raise DataError(
            f"{path} begins with {first_line[:80]!r} where {dataset.header!r} is expected; is it another file?"
        )
    try:
        ratings = _scan(dataset, path, skip_lines, _DTYPES).collect()
    except pl.exceptions.NoDataError:
        ratings = pl.DataFrame(schema=_DTYPES)
    except pl.exceptions.PolarsError as error:
        raise DataError(
            _first_bad_line(dataset, path, skip_lines) or f"{path}: {str(error).splitlines()[0]}"
        ) from error
    if ratings.is_empty():
        raise DataError(f"{path} holds no rating; unpack or download it again")
    steps = pl.col(_RATING) * dataset.ratings_per_star  # 1, 2, ..., num_actions for ratings on the scale
    on_scale = steps.is_between(1, dataset.num_actions) & (steps == steps.round())
    complete = pl.all_horizontal(pl.col(USER_ID, ITEM_ID, _SECONDS).is_not_null())
    if not ratings.select((on_scale & complete).fill_null(False).all()).item():
        raise DataError(_first_bad_line(dataset, path, skip_lines))
    return ratings.select(
        USER_ID,
        ITEM_ID,
        (steps - 1).cast(pl.Int32).alias(ACTION),
        (pl.col(_SECONDS) * 1000).alias(TIMESTAMP_MS),
    )


def _scan(dataset: PublicDataset, path: Path, skip_lines: int, dtypes: Mapping[str, type[pl.DataType]]) -> pl.LazyFrame:
    # A separator of two characters, `::`, is read as one of them with an empty column between each two fields.
    gaps = len(dataset.separator) - 1
    schema: dict[str, type[pl.DataType]] = {}
    for name, dtype in dtypes.items():
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
    ).select(list(dtypes))


def _first_bad_line(dataset: PublicDataset, path: Path, skip_lines: int) -> str:
    """Describe the first line that is not a rating on the scale; slow, for when it is known that there is one."""
    lowest, highest = 1 / dataset.ratings_per_star, dataset.max_stars
    with path.open(encoding="latin-1") as file:
        for number, line in enumerate(file, start=1):
            if number <= skip_lines:
                continue
            shown = f"{path}, line {number} ({line.rstrip()[:80]!r})"
            values = line.rstrip("\r\n").split(dataset.separator)
            if len(values) != len(_DTYPES):
                return f"{shown}: {len(values)} fields where {len(_DTYPES)} are expected; mend or remove the line"
            try:
                int(values[0]), int(values[1]), int(values[3])
                steps = float(values[2]) * dataset.ratings_per_star
            except ValueError as error:
                return f"{shown}: {error}; mend or remove the line"
            if not 1 <= steps <= dataset.num_actions or steps != int(steps):
                return (
                    f"{shown}: rating {values[2]} is not on the scale of {dataset.name}, {lowest:g} to {highest} in "
                    f"steps of {lowest:g}; mend or remove the line"
                )
    return ""


def _read_users(path: Path) -> Context:
    lines = path.read_text(encoding="latin-1").splitlines()
    if not lines:
        raise DataError(f"{path} holds no user; unpack or download it again")
    rows = [line.split("::") for line in lines]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(_USER_FIELDS) or not all(row[i].isdigit() for i in (0, 2, 3)):
            raise DataError(
                f"{path}, line {number} ({lines[number - 1][:80]!r}): UserID::Gender::Age::Occupation::Zip-code is "
                f"expected; mend or remove the line"
            )
    users = pl.DataFrame(rows, schema=dict.fromkeys(_USER_FIELDS, pl.String), orient="row")
    return encode_context(users.with_columns(pl.col(USER_ID, "age_group", "occupation").cast(pl.Int64)))
