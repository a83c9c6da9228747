"""Interactions -> sequences: one row per user, events in time order, rows in the order of the contract."""

import polars as pl

from evenrank.datasets.schema import ACTION, ITEM_ID, LENGTH, TIMESTAMP_MS, USER_ID, user_hash
from evenrank.preprocess.interactions import Interactions


def build_sequences(interactions: Interactions) -> pl.DataFrame:
    """Group events by user, oldest first, those of one time in file order; add context and length.

    Returns:
        user_id, the contextual features, item_id, action, timestamp_ms (lists), length; ordered by
        (user_hash(user_id), user_id).

    """
    # Polars keeps the order of rows within a group, so a stable sort by time leaves ties in file order.
    events = [pl.col(name).sort_by(TIMESTAMP_MS, maintain_order=True) for name in (ITEM_ID, ACTION, TIMESTAMP_MS)]
    sequences = interactions.events.group_by(USER_ID).agg(events).collect()
    if interactions.context is None:
        features: list[str] = []
    else:
        table = interactions.context.features
        features = [name for name in table.columns if name != USER_ID]
        sequences = sequences.join(table, on=USER_ID, how="left").with_columns(pl.col(features).fill_null(0))
    hashes = pl.Series("hash", user_hash(sequences.get_column(USER_ID).to_numpy()))
    return sequences.sort(hashes, pl.col(USER_ID)).select(
        USER_ID,
        *features,
        ITEM_ID,
        ACTION,
        TIMESTAMP_MS,
        pl.col(ITEM_ID).list.len().cast(pl.Int32).alias(LENGTH),
    )
