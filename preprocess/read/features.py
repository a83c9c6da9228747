"""Features of users and items, encoded and looked up; what every source returns, whatever its raw files look like."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.schema import EVENTS, FLOAT, ITEM_ID, USER_ID, Column, IdKind, IdSummary, Schema, SourceFile
from evenrank.preprocess.log_config import LogColumn, TabularConfig, TimestampUnit
from evenrank.preprocess.read.keys import KeyTable, keys_of
from evenrank.preprocess.read.table import EventPart, Table
from evenrank.preprocess.read.tabular import open_table
from evenrank.preprocess.read.values import (
    CASTS,
    MISSING_NUMBERS,
    MISSING_TEXTS,
    as_declared,
    check_json_keys,
    id_checks,
    id_texts,
    integer_bits,
    is_plain_integer,
    raw_id,
    with_ids,
)
from evenrank.preprocess.read.vectors import Vectors

_ROW = "evenrank row"
_OPTIONS = {USER_ID: ("--user-column", "--context-columns"), ITEM_ID: ("--item-column", "--item-columns")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Features of users or items: ids, 0 if missing, else 1..n or as in the file; lists of ids from 1; or floats."""

    keys: NDArray[np.int64]  # of the users or items, distinct: [n]
    rows: pl.DataFrame  # of the same: a column Int64, List(Int64) or Float32 per feature
    values: Mapping[str, pl.Series]  # per feature of ids that are numbered: those of the ids 1, 2, ...
    num_repeated: int = 0  # rows that are left out, as an earlier one is of the same item

    @property
    def sizes(self) -> dict[str, int]:
        """Largest id + 1 per feature of ids."""
        kept = (c for c in self.rows.iter_columns() if c.dtype == pl.Int64 and c.name not in self.values)
        largest = {column.name: int(column.to_numpy().max(initial=0)) for column in kept}
        return {
            **{name: len(values) + 1 for name, values in self.values.items()},
            **{n: m + 1 for n, m in largest.items()},
        }

    @property
    def columns(self) -> Schema:
        """The columns of a dataset that they become."""
        return tuple(
            Column(name, "list" if dtype == pl.List else "scalar", FLOAT if dtype == pl.Float32 else "int64")
            for name, dtype in self.rows.schema.items()
        )


NO_FEATURES = Features(keys=np.empty(0, dtype=np.int64), rows=pl.DataFrame(), values={})


def read_features(config: TabularConfig, name: str, kind: IdKind) -> Features:
    """Read and encode the features of users or items, if there is a file of them.

    `name` is `user_id` or `item_id`, whose ids are of this `kind`. Text is a list as JSON if it begins with `[`, else
    by `|`.
    """
    if (file := config.feature_files.get(name)) is None:
        return NO_FEATURES
    names, separator = [column.name for column in file.columns], config.delimiter if file.header else None
    options = dict.fromkeys(names, _OPTIONS[name][1]) | {file.key: _OPTIONS[name][0]}
    frames, values, num_repeated = list[pl.DataFrame](), dict[str, pl.Series](), 0
    for path in file.paths:
        optional = names if len(file.paths) > 1 else ()
        given = {"separator": separator, "columns": file.header, "options": options, "optional": optional}
        table = with_ids(open_table(path, [file.key, *names], **given), file.key)  # type: ignore[arg-type]
        own = [column for column in file.columns if column.name in table.dtypes]
        frame, of_file, num_others = _read_file(table, name, kind, file.key, own)
        frames, values, num_repeated = [*frames, frame], values | of_file, num_repeated + num_others
    for column_name in names:
        if (count := sum(column_name in frame.columns for frame in frames)) != 1:
            raise DataError(
                f"column {column_name!r} ({_OPTIONS[name][1]}) is in {count} of {len(frames)} files of features of "
                f"{name.removesuffix('_id')}s, first {file.paths[0]}; it must be in one"
            )
    rows = reduce(lambda left, right: left.join(right, on=name, how="full", coalesce=True), frames).select(name, *names)
    if len(frames) > 1:  # of those that some file lacks
        rows = rows.with_columns(
            pl.col(pl.Int64, pl.Float32).fill_null(0), pl.col(pl.List(pl.Int64)).fill_null(pl.lit([]))
        )
    keys: NDArray[np.int64] = rows.drop_in_place(name).to_numpy()
    return Features(keys=keys, rows=rows, values=values, num_repeated=num_repeated)


def _read_file(
    table: Table, name: str, kind: IdKind, key: str, columns: Sequence[LogColumn]
) -> tuple[pl.DataFrame, dict[str, pl.Series], int]:
    """Return the keys of users or items, as column `name`, with some encoded features, and the values of these.

    Also return how many rows are left out, as an earlier one is of the same item.
    """
    selected, checks = [raw_id(table, key, kind).alias(name)], id_checks(table, key, "text")
    for column in columns:
        value = pl.col(column.name)
        if column.dtype in (FLOAT, "int64"):
            value, of_column = as_declared(table, column, "scale it down")
            checks |= of_column
        if column.dtype == "int64":
            checks[f"{column.name} must not be negative"] = value >= 0
        selected.append(value.alias(column.name))
    raw, num_others = table.read_distinct(name, selected, checks, keeps_first=name == ITEM_ID)
    check_json_keys([table], [column.name for column in columns if not raw.get_column(column.name).count()])
    encoded, values = [pl.Series(name, keys_of(raw.get_column(name)))], {}
    for column in columns:
        feature = raw.get_column(column.name)
        if column.dtype == "list":
            feature, values[column.name] = _encode_lists(table.path, feature)
        elif column.dtype == "id":
            feature, values[column.name] = _encode(_sortable(table.path, feature))
        encoded.append(feature)
    return pl.DataFrame(encoded), values, num_others


def _encode(values: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Return the ids of values [n], Int64, and the distinct values in the order of their ids."""
    return values.rank("dense").cast(pl.Int64).fill_null(0), values.drop_nulls().unique().sort()


def _encode_lists(path: Path, lists: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Encode the elements of lists alike, without missing ones; a value of its own is a list of one."""
    if lists.dtype == pl.String:
        is_json = lists.str.starts_with("[").fill_null(False)
        arrays = [_parse_array(path, lists.name, text) for text in lists.filter(is_json)]
        divided = pl.concat([lists.filter(~is_json).str.split("|"), pl.Series(arrays, dtype=pl.List(pl.String))])
        if (divided.list.len().fill_null(0) < 2).all():
            for text in lists.filter(lists.str.contains(r"^[^\[].*[,; ]")):
                reason = f"is one value, as all of column {lists.name!r}; divide lists by |, or write JSON arrays"
                raise DataError(f"{path}: {text[:80]!r} {reason} (single values are {lists.name}:id)")
        lists = divided.gather(pl.concat([(~is_json).arg_true(), is_json.arg_true()]).arg_sort())
    elements = pl.DataFrame({_ROW: np.arange(len(lists)), lists.name: lists})
    if lists.dtype.base_type() in (pl.List, pl.Array):
        elements = elements.explode(lists.name).cast(CASTS)
    elements = elements.with_columns(_sortable(path, elements.get_column(lists.name))).drop_nulls()
    ids, values = _encode(elements.get_column(lists.name))
    ends = np.cumsum(np.bincount(elements.get_column(_ROW), minlength=len(lists)))
    return pl.Series(lists.name, pa.LargeListArray.from_arrays(np.append(0, ends), ids.to_numpy())), values


def _parse_array(path: Path, column: str, text: str) -> list[str]:
    try:
        elements = [element for element in json.loads(text) if element is not None]
        if any(isinstance(element, list | dict) for element in elements):
            raise ValueError("an element is not text or a number")
        texts = [element if isinstance(element, str) else json.dumps(element) for element in elements]
        "".join(texts).encode()  # no half of a surrogate pair, which an escape can be
    except (ValueError, RecursionError) as error:
        reason = f"is no JSON array of texts and numbers ({error})"
        raise DataError(f"{path}: {text[:80]!r} in column {column!r} {reason}; fix it, or divide it by |") from error
    return texts


def _sortable(path: Path, values: pl.Series) -> pl.Series:
    """Return values ready for sorting: as integers if all are, by the rule of ids; missing ones as null."""
    if values.dtype.is_nested() or values.dtype == pl.Binary:
        reason = f"of type {values.dtype} cannot be ids; convert it to text or numbers, or declare it a list of these"
        raise DataError(f"{path}: column {values.name!r} {reason}")
    if values.dtype.is_float():
        values = values.fill_nan(None)
        are_integers = ((values == values.floor()) & (values.abs() < 1 << integer_bits(values.dtype))).all()
        return values.cast(pl.Int64) if are_integers else values
    if values.dtype != pl.String:
        return values
    texts, numbers = values.set(values.is_in(MISSING_TEXTS), None), id_texts(values)[0]
    numbers = numbers.set(numbers.is_in(MISSING_NUMBERS), None)  # which among texts are values
    are_integers = pl.select(is_plain_integer(pl.lit(numbers.drop_nulls())).all()).item()
    return numbers.cast(pl.Int64) if are_integers and (numbers.count() or not texts.count()) else texts


class Seen(NamedTuple):
    """Distinct users or items that were looked up: int64 [n] both."""

    known: NDArray[np.int64]  # places of those that have features
    unknown: NDArray[np.int64]  # keys of the others


class FeatureLookup:
    """Look up features of `users` or `items` by key; one without features gets 0, or an empty list."""

    def __init__(self, features: Features, *, of: str) -> None:
        self._index = KeyTable(features.keys)
        missing = [pl.Series(name, [[] if t == pl.List else 0], dtype=t) for name, t in features.rows.schema.items()]
        self._rows = features.rows.vstack(pl.DataFrame(missing))  # the last row, -1, is of any other key
        self._of, self._unknown = of, np.empty(0, dtype=np.int64)
        self.events = tuple(column._replace(kind="event") for column in features.columns)  # that those of items become
        self.requested = np.zeros(len(features.keys), dtype=bool)  # which keys were looked up: [n]

    def lookup(self, keys: NDArray[np.int64]) -> tuple[pl.DataFrame, Seen]:
        """Return the features of the given users or items, a row of each, and whom `record` takes."""
        has_features = len(self.requested) > 0
        places = self._index.find(keys) if has_features else np.full(len(keys), -1)
        rows = pl.DataFrame([column.gather(places) for column in self._rows.iter_columns()])
        if not has_features:  # nobody counts as without them
            return rows, Seen(keys[:0], keys[:0])
        is_known = places >= 0
        return rows, Seen(*(pl.Series(some).unique().to_numpy() for some in (places[is_known], keys[~is_known])))

    def record(self, seen: Seen) -> None:
        """Take note of users or items that were looked up."""
        self.requested[seen.known] = True
        self._unknown = np.union1d(self._unknown, seen.unknown)

    def audit(self) -> dict[str, int]:
        """Count the users or items that have features and were never looked up, and the reverse."""
        return {
            f"{self._of} with features but no event (left out)": int(np.count_nonzero(~self.requested)),
            f"{self._of} without features": len(self._unknown),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Interactions:
    """A dataset before its events are grouped by user."""

    parts: Sequence[EventPart]  # in file order
    sources: Callable[[], tuple[SourceFile, ...]]  # reads the raw files for their checksums
    files: Sequence[Path] = ()  # that are read
    context: Features = NO_FEATURES  # of users
    item_features: Features = NO_FEATURES
    vectors: Mapping[str, Vectors] = field(default_factory=dict)  # of `user_id` and `item_id`, where there are any
    has_item_table: bool = False  # whether features of items are a table, not columns of events
    num_actions: int | None  # None if the largest action is only known once all events are read
    time_unit: TimestampUnit = "ms"  # of the raw times; with `row`, those of events are undefined
    counts_from_start: bool = False  # whether times count from the start of the log, not from 1970
    events: Schema = EVENTS  # columns of events, without sizes of vocabularies
    has_eval_log: bool = False  # whether events have a further column, IN_EVAL
    options: Mapping[str, object] = field(default_factory=dict)  # of the source, for the manifest
    id_kinds: Mapping[str, IdKind] = field(default_factory=lambda: {USER_ID: "int64", ITEM_ID: "int64"})
    feature_ids: Mapping[str, IdSummary] = field(default_factory=dict)  # of an earlier dataset, if there is one
