"""The contextual features of users, encoded."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.schema import FLOAT, MULTI_VALUED, USER_ID, IdKind
from evenrank.preprocess.build.key_table import keys_of
from evenrank.preprocess.files.raw_values import TEXT_TYPES, is_plain_integer, raw_id
from evenrank.preprocess.files.tabular import open_table
from evenrank.preprocess.log_config import TabularConfig

_DTYPES: Mapping[Any, str] = {pl.Int64(): "int64", pl.List(pl.Int64()): MULTI_VALUED, pl.Float32(): FLOAT}


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The contextual features of users, encoded as integers: 0 if missing, else 1..n by sorted value; or floats."""

    features: pl.DataFrame  # user_id (int64, the user's key), then per feature Int64, List(Int64) or Float32
    labels: Mapping[str, tuple[str | None, ...]]  # of the ids 0 (always None), 1, 2, ... of each feature of integers

    @property
    def dtypes(self) -> dict[str, str]:
        """Type of each feature, as in the manifest."""
        return {name: _DTYPES[dtype] for name, dtype in self.features.drop(USER_ID).schema.items()}


def encode_context(raw: pl.DataFrame, floats: Collection[str] = ()) -> Context:
    """Encode columns of sortable values, except `user_id`, as 1..n by sorted value, and as 0 where a value is null.

    The elements of lists are encoded alike, without nulls. Columns named in `floats` become float32, 0 where a value is
    null; raises a DataError if one is not finite.
    """
    columns, labels = [raw.get_column(USER_ID)], {}
    for feature in raw.drop(USER_ID).iter_columns():
        if feature.name in floats:
            encoded = feature.cast(pl.Float32).fill_null(0)
            for value in feature.filter(~encoded.is_finite()):
                raise DataError(f"the feature {feature.name!r} has the value {value}, no finite float32; change it")
        else:
            is_list = feature.dtype == pl.List
            values = (feature.explode() if is_list else feature).drop_nulls().unique().sort()
            if is_list:
                ids = pl.int_range(1, len(values) + 1, eager=True)
                element = pl.element().replace_strict(values, ids, return_dtype=pl.Int64)
                encoded = feature.list.drop_nulls().list.eval(element).cast(pl.List(pl.Int64)).fill_null([])
            else:
                encoded = (values.search_sorted(feature).cast(pl.Int64) + 1).set(feature.is_null(), 0)
            labels[feature.name] = (None, *map(str, values))
        columns.append(encoded.alias(feature.name))
    return Context(features=pl.DataFrame(columns), labels=labels)


class ContextLookup:
    """Look up features by the key of a user; one without features gets 0, a missing value, or an empty list."""

    def __init__(self, context: Context | None) -> None:
        features = pl.DataFrame(schema={USER_ID: pl.Int64}) if context is None else context.features.sort(USER_ID)
        missing: dict[str, list[Any]] = {
            name: [[] if dtype == pl.List else 0] for name, dtype in features.schema.items()
        }
        features = features.vstack(pl.DataFrame(missing, schema=features.schema))
        self._users: NDArray[np.int64] = features.get_column(USER_ID).to_numpy()  # and a last row, of any other user
        self._features = features.drop(USER_ID)
        self._requested = np.zeros(len(self._users) - 1, dtype=bool)
        self.dtypes = {} if context is None else context.dtypes

    def lookup(self, user_keys: NDArray[np.int64]) -> pl.DataFrame:
        """Return the features of the given users: a row of each."""
        positions = np.searchsorted(self._users[:-1], user_keys)
        is_known = (positions < len(self._requested)) & (self._users[positions] == user_keys)
        self._requested[positions[is_known]] = True
        return self._features[np.where(is_known, positions, len(self._requested))]

    def count_unrequested(self) -> int:
        """Return the number of users that have features and were never looked up."""
        return int(np.count_nonzero(~self._requested))


def read_context(config: TabularConfig, path: Path, kind: IdKind) -> Context:
    """Read the users' features from a file; `kind` is that of the users' ids."""
    separator = config.delimiter if config.context_header else None
    table = open_table(
        path, (config.user_column, *config.context_columns), separator=separator, columns=config.context_header
    )
    ids, texts = raw_id(table, config.user_column, kind), raw_id(table, config.user_column, "text")
    users = table.read_users(
        [ids.alias(USER_ID), *map(pl.col, config.context_columns)],
        {f"{config.user_column} is empty or not an id": texts.is_not_null()},
    ).drop_nulls(USER_ID)  # text, which no event has if users are integers
    keys = pl.Series(USER_ID, keys_of(users.get_column(USER_ID)))
    return encode_context(
        users.with_columns(keys, *(_feature(path, users.get_column(name)) for name in config.context_columns))
    )


def _feature(path: Path, values: pl.Series) -> pl.Series:
    """Return a feature ready for sorting: text as integers if all of it is, empty text and NaN as null."""
    if values.dtype.is_nested() or values.dtype == pl.Binary:
        raise DataError(
            f"{path}: column {values.name!r} of type {values.dtype} cannot be a feature; convert it to text or numbers"
        )
    if values.dtype.base_type() not in TEXT_TYPES:
        return values.fill_nan(None) if values.dtype.is_float() else values
    text = values.cast(pl.String)
    text = text.set(text == "", None)
    are_integers = pl.select(is_plain_integer(pl.lit(text.drop_nulls())).all()).item()
    return text.cast(pl.Int64) if are_integers else text
