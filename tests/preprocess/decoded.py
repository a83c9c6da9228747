"""Datasets with the raw ids that their vocabularies say."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


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


def bytes_in(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, by their paths."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
