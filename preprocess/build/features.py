"""Features of users and items: their values numbered, as in an earlier dataset if there is one, and looked up."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError
from evenrank.datasets.schema import IdSummary, read_manifest
from evenrank.preprocess.build.vocabulary import Ids, read_values, versions_of, vocabulary_name
from evenrank.preprocess.options import DENSE
from evenrank.preprocess.read.features import FeatureLookup, Features, Interactions


def number_features(interactions: Interactions, folder: Path | None) -> Interactions:
    """Number the values of features as in an earlier dataset, if there is one; raises a DataError if it is damaged."""
    context, items, ids = interactions.context, interactions.item_features, dict[str, IdSummary]()
    if folder is not None:
        manifest = read_manifest(folder)
        earlier = {name: pl.Series(labels[1:], dtype=pl.String) for name, labels in manifest.context_labels.items()}
        for name in items.values.keys() & manifest.vocabulary_sizes.keys() - earlier.keys():
            earlier[name] = read_values(folder / vocabulary_name(name))
        context, items, ids = _continue(context, earlier), _continue(items, earlier), dict(manifest.ids)
    values = {**context.values, **items.values} if interactions.files else {}  # else they are drawn, as ids
    feature_ids = {name: _label_ids(of_feature, ids.get(name)) for name, of_feature in values.items()}
    return replace(interactions, context=context, item_features=items, feature_ids=feature_ids)


def _continue(features: Features, earlier: Mapping[str, pl.Series]) -> Features:
    """Number values as an earlier dataset does, whose values are given by feature; further ones follow, ascending."""
    rows, values = features.rows, dict(features.values)
    for name in values.keys() & earlier.keys():
        known, found = earlier[name], values[name]
        if known.dtype != found.dtype:  # labels in the manifest are texts
            known, found = (pl.Series(map(str, series), dtype=pl.String) for series in (known, found))
        values[name] = pl.concat([known, found.filter(~found.is_in(known.implode()))])
        numbers = pl.int_range(len(values[name]) + 1, eager=True)
        ids = found.replace_strict(values[name], numbers[1:]).cast(pl.Int64)
        is_list = rows.schema[name] == pl.List
        numbered = (pl.element() if is_list else pl.col(name)).replace_strict(
            numbers[: len(found) + 1], pl.concat([numbers[:1], ids])
        )
        rows = rows.with_columns(pl.col(name).list.eval(numbered) if is_list else numbered)
    return replace(features, rows=rows, values=values)


def _label_ids(values: pl.Series, earlier: IdSummary | None) -> IdSummary:
    """Return how the values of a feature became ids: 1, 2, ..., those of an earlier dataset first."""
    labels = [*map(str, values)]
    digest = hashlib.sha256(json.dumps(labels).encode()).hexdigest()
    versions = versions_of(earlier, len(labels), digest)
    return IdSummary(rule=DENSE, kind="text", distinct=len(labels), versions=versions)


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
