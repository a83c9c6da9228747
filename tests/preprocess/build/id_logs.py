"""Small logs as files, and the ids that preprocessing gives them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl

from evenrank.datasets.schema import Manifest
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess

BEGIN = 1_700_000_000  # seconds
Event = tuple[Any, Any, int]  # user, item, seconds after BEGIN
NAMES: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}


def write_log(path: Path, log: Sequence[Event], *, dtype: Any = None) -> Path:
    """Write events as CSV or Parquet, the latter with users and items of type `dtype`."""
    user, item, time = ([event[column] for event in log] for column in range(3))
    frame = pl.DataFrame({"user": pl.Series(user, dtype=dtype), "item": pl.Series(item, dtype=dtype)})
    frame = frame.with_columns(pl.Series("time", [BEGIN + seconds for seconds in time], dtype=pl.Int64))
    if path.suffix == ".csv":
        frame.write_csv(path)
    else:
        frame.write_parquet(path)
    return path


def number(out: Path, *paths: Path, log: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> Manifest:
    """Preprocess logs, without a split; `log` are further options of a TabularConfig."""
    custom = TabularConfig(events=paths, **NAMES, **log)
    options = {"split": "none", **options}
    return preprocess(PreprocessConfig(dataset="custom", out=out, custom=custom, **options))


def vocabulary(out: Path, column: str = "item_id") -> list[tuple[int, Any, int]]:
    """Return the rows of a vocabulary: id, value, count."""
    return pl.read_parquet(out / f"vocabulary_{column}.parquet").select("id", "value", "count").rows()


def expected_vocabulary(log: Sequence[Event], column: int, known: Iterable[Any] = ()) -> list[tuple[int, Any, int]]:
    """Return the vocabulary of users (column 0) or items (1) as its definition has it, after values that are known."""
    counts = Counter(event[column] for event in log)
    firsts = {value: min(event[2] for event in log if event[column] == value) for value in counts}
    new = sorted(counts.keys() - {*known}, key=lambda value: (firsts[value], value))
    return [(index, value, counts[value]) for index, value in enumerate([*known, *new], start=1)]
