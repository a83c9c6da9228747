"""`raw_values`: the ids of a dataset back to those of its log, for rows to look at."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.storage import Remote
from evenrank.datasets.schema import TIMESTAMP_MS, Manifest
from evenrank.datasets.unpack import open_file, wrap_parquet_errors


def raw_values(name: str, values: NDArray[Any], manifest: Manifest, place: Path | Remote | None) -> list[Any]:
    """Return what the log has for the values [n] of a column; None is missing, or unknown to the vocabulary.

    `place` has the vocabularies; None: there are none. Raises a DataError if one cannot be read.
    """
    if name == TIMESTAMP_MS:
        times = values.astype("datetime64[ms]").tolist()  # integers where there is no such datetime
        return [time.replace(tzinfo=UTC) if isinstance(time, datetime) else time for time in times]
    if values.dtype == np.float32:
        return [None if value != value else value for value in values.tolist()]
    if (labels := manifest.context_labels.get(name)) is not None:
        return [labels[value] if value < len(labels) else value for value in values.tolist()]
    if place is None or name not in manifest.ids or manifest.ids[name].rule != "dense":
        return list(values.tolist())
    path = place / f"vocabulary_{name}.parquet"
    with open_file(path) as opened, wrap_parquet_errors(str(path)):
        is_given = pc.field("id").isin(np.unique(values))  # of which a vocabulary can have many more than fit
        table = pq.read_table(opened, columns=["id", "value"], filters=is_given)
        known = dict(zip(table["id"].to_pylist(), table["value"].to_pylist(), strict=True))
    return [known.get(value) for value in values.tolist()]
