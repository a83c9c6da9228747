"""Features of users and items: their values numbered as an earlier dataset does, and looked up for rows and events."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.schema import IdSummary, read_manifest
from evenrank.preprocess.build.vocabulary import Ids, label_ids, read_values, vocabulary_name
from evenrank.preprocess.options import DENSE
from evenrank.preprocess.read.features import Features, Interactions
from evenrank.preprocess.read.keys import KeyTable, encode_keys, random_seed


def number_features(interactions: Interactions, folder: Path | None) -> Interactions:
    """Number the values of features as in an earlier dataset, if there is one; raises a DataError if it is damaged."""
    context, items, ids = interactions.context, interactions.item_features, dict[str, IdSummary]()
    if folder is not None:
        manifest = read_manifest(folder)
        earlier = {name: pl.Series(labels[1:], dtype=pl.String) for name, labels in manifest.context_labels.items()}
        for name in items.values.keys() & manifest.vocabulary_sizes.keys() - earlier.keys():
            earlier[name] = read_values(folder / vocabulary_name(name))
        context, items, ids = continue_ids(context, earlier), continue_ids(items, earlier), dict(manifest.ids)
    values = {**context.values, **items.values} if interactions.files else {}  # else they are drawn, as ids
    feature_ids = {name: label_ids(of_feature, ids.get(name)) for name, of_feature in values.items()}
    return replace(interactions, context=context, item_features=items, feature_ids=feature_ids)


def continue_ids(features: Features, earlier: Mapping[str, pl.Series]) -> Features:
    """Number values as an earlier dataset does, whose values are given by feature; further ones follow, ascending."""
    rows, values = features.rows, dict(features.values)
    for name in values.keys() & earlier.keys():
        known, found = earlier[name], values[name]
        if known.dtype != found.dtype:  # labels in the manifest are texts
            known, found = (pl.Series(map(str, series), dtype=pl.String) for series in (known, found))
        values[name] = pl.concat([known, found.filter(~found.is_in(known.implode()))])
        index = {value: number for number, value in enumerate(values[name], start=1)}
        ids = pl.Series(name, [0, *(index[value] for value in found)], dtype=pl.Int64)
        column = rows.get_column(name)
        is_list = column.dtype == pl.List
        numbered = ids.gather(column.explode().drop_nulls() if is_list else column)
        if is_list:
            ends = column.list.len().cum_sum()
            numbered = pl.Series(name, pa.LargeListArray.from_arrays(np.append(0, ends), numbered.to_numpy()))
        rows = rows.with_columns(numbered)
    return replace(features, rows=rows, values=values)


class Seen(NamedTuple):
    """Distinct users or items that were looked up: int64 [n] both."""

    known: NDArray[np.int64]  # places of those that have features
    unknown: NDArray[np.int64]  # keys of the others


class FeatureLookup:
    """Look up features of `users` or `items` by key; one without features gets 0, or an empty list."""

    def __init__(self, features: Features, *, of: str) -> None:
        self._index = KeyTable(features.keys)
        missing = [pl.Series(name, [[] if t == pl.List else 0], dtype=t) for name, t in features.rows.schema.items()]
        self._rows = features.rows.vstack(pl.DataFrame(missing))  # the last row is of any other key
        self._of, self._unknown = of, np.empty(0, dtype=np.int64)
        self.dtypes = features.dtypes
        self.requested = np.zeros(len(features.keys), dtype=bool)  # which keys were looked up: [n]

    def lookup(self, keys: NDArray[np.int64]) -> tuple[pl.DataFrame, Seen]:
        """Return the features of the given users or items, a row of each, and whom `record` takes."""
        places = self._index.find(keys)
        is_known = places >= 0
        unknown = keys[~is_known] if len(self.requested) else keys[:0]  # nobody is, where there are no features
        seen = Seen(np.unique(places[is_known]), encode_keys(unknown, random_seed())[0])
        places[~is_known] = len(self.requested)
        return pl.DataFrame([column.gather(places) for column in self._rows.iter_columns()]), seen

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


def look_up_items(features: Features, ids: Ids, *, as_table: bool) -> FeatureLookup:
    """Return the lookup of features of events, or of none if they become a table, of all items of the vocabulary."""
    if not as_table:
        return FeatureLookup(features, of="items")
    if ids.summary.collisions:
        shared = f"{ids.summary.collisions:,} items share their ids by {ids.summary.rule}"
        raise DataError(f"{shared}, so no table has their features; choose dense ids or item_features_as 'events'")
    lookup = FeatureLookup(replace(features, rows=pl.DataFrame()), of="items")
    lookup.requested |= (ids.encode(features.keys) > 0) & (ids.summary.rule == DENSE)
    return lookup
