"""`raw_rows`: rows to look at, with the raw ids of the log."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.datasets.schema import LENGTH, NUM_TARGETS, TIMESTAMP_MS
from evenrank.datasets.unpack import open_file, wrap_parquet_errors

MAX_SHOWN = 10  # events of a row

if TYPE_CHECKING:
    from evenrank.datasets.store import SequenceStore


def raw_rows(store: "SequenceStore", indices: NDArray[np.int64], max_events: int) -> list[dict[str, Any]]:
    """Return rows or slices [n] of a store as `SequenceStore.head` does."""
    rows, ends = store.rows_of(indices), store.ends[indices]
    begins = np.maximum(store.begins[indices], ends - max_events)
    shown: list[dict[str, Any]] = [{} for _ in indices]
    for column in store.manifest.columns:
        name = column.name
        firsts, lasts = rows, rows + 1
        if column.kind == "event":
            firsts, lasts = begins, ends
        elif column.kind == "list":
            firsts, lasts = store.list_offsets[name][rows], store.list_offsets[name][rows + 1]
        pieces = [store.columns[name][first:last] for first, last in zip(firsts, lasts, strict=True)]
        values = _raw(store, name, np.concatenate([store.columns[name][:0], *pieces]))
        for row, piece in zip(shown, pieces, strict=True):
            of_row, values = values[: len(piece)], values[len(piece) :]
            row[name] = of_row[0] if column.kind == "scalar" else of_row
    for row, length, index in zip(shown, store.lengths[indices].tolist(), indices, strict=True):
        row[LENGTH] = length
        if store.num_targets is not None:
            row[NUM_TARGETS] = int(store.num_targets[index])
    return shown


def _raw(store: "SequenceStore", name: str, values: NDArray[Any]) -> list[Any]:
    """Return what the log has for the values [n] of a column."""
    manifest = store.manifest
    if name == TIMESTAMP_MS:
        times = values.astype("datetime64[ms]").tolist()  # integers where there is no such datetime
        return [time.replace(tzinfo=UTC) if isinstance(time, datetime) else time for time in times]
    if name in store.column_maps or values.dtype == np.float32:
        return [None if value != value else value for value in values.tolist()]
    if (labels := manifest.context_labels.get(name)) is not None:
        return [labels[value] if value < len(labels) else value for value in values.tolist()]
    place = store.source or store.folder
    if place is None or name not in manifest.ids or manifest.ids[name].rule != "dense":
        return list(values.tolist())
    path = place / f"vocabulary_{name}.parquet"
    with open_file(path) as opened, wrap_parquet_errors(str(path)):
        is_shown = pc.field("id").isin(np.unique(values))  # of which a vocabulary can have many more than fit
        table = pq.read_table(opened, columns=["id", "value"], filters=is_shown)
        known = dict(zip(table["id"].to_pylist(), table["value"].to_pylist(), strict=True))
    return [known.get(value) for value in values.tolist()]
