"""Small logs as files, how they are preprocessed, and what the datasets contain, with raw ids."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl
import pyarrow.parquet as pq

from evenrank.datasets.schema import Manifest
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, TabularConfig, preprocess

BEGIN = 1_700_000_000  # seconds
Event = tuple[Any, Any, int]  # user, item, seconds after BEGIN
NAMES: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}


def write_log(path: Path, log: Sequence[Event], *, dtype: Any = None) -> Path:
    """Write events as CSV or Parquet, the latter with users and items of type `dtype`."""
    user, item, time = ([event[column] for event in log] for column in range(3))
    frame = pl.DataFrame({"user": pl.Series(user, dtype=dtype), "item": pl.Series(item, dtype=dtype)})
    frame = frame.with_columns(pl.Series("time", [BEGIN + seconds for seconds in time], dtype=pl.Int64))
    frame.write_csv(path) if path.suffix == ".csv" else frame.write_parquet(path)
    return path


def of_log(
    out: Path | str, *paths: Path, log: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> PreprocessConfig:
    """Describe the dataset of logs, without a split; `log` are further options of a TabularConfig."""
    custom = TabularConfig(events=paths, **NAMES | {**log})
    return PreprocessConfig(**{"dataset": "custom", "out": out, "custom": custom, "split": "none", **options})


def number(out: Path | str, *paths: Path, **options: Any) -> Manifest:
    """Preprocess logs, without a split."""
    return preprocess(of_log(out, *paths, **options))


def synthetic(out: Path | str, num_users: int = 10, **options: Any) -> PreprocessConfig:
    """Describe a dataset of drawn events."""
    return PreprocessConfig(dataset="synthetic", out=out, synthetic=SyntheticConfig(num_users=num_users), **options)


def read_vocabulary(dataset: Path, column: str) -> dict[int, Any]:
    """Return the raw id of each id of a column: from the vocabulary, and None for 0 of unknown values."""
    rows = pq.read_table(dataset / f"vocabulary_{column}.parquet").to_pylist()
    assert [row["id"] for row in rows] == list(range(1, len(rows) + 1))
    assert len({row["value"] for row in rows}) == len(rows)
    return {0: None} | {row["id"]: row["value"] for row in rows}


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all files of a split, in their order."""
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def decode(dataset: Path, rows: list[dict[str, Any]], *, features: bool = False) -> list[dict[str, Any]]:
    """Replace the ids in rows of a dataset by raw ids, where they have a vocabulary, and those of features if asked."""
    labels = json.loads((dataset / "manifest.json").read_text())["context_labels"] if features else {}
    for name in {*rows[:1][0]} if rows and features else {"user_id", "item_id"}.intersection(*rows[:1]):
        if (dataset / f"vocabulary_{name}.parquet").exists():
            values: Any = read_vocabulary(dataset, name)
        elif not (values := labels.get(name)):
            continue
        for row in rows:
            ids = row[name]
            row[name] = [values[number] for number in ids] if isinstance(ids, list) else values[ids]
    return rows


def bytes_in(folder: Path, *, versions: bool = True) -> dict[str, bytes]:
    """Return the content of all files below a folder, by their paths; the manifest perhaps without earlier versions."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return files if versions else files | {"manifest.json": without_versions(files["manifest.json"])}


def without_versions(manifest: bytes) -> bytes:
    """Leave out the earlier versions of vocabularies, by which appended datasets differ from others."""
    content = json.loads(manifest)
    for ids in content["ids"].values():
        ids["versions"] = ids["versions"][-1:]
    return json.dumps(content).encode()
