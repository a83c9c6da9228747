"""Ids of public datasets, taken back to the raw files through the vocabulary."""

import csv
import random
from collections import Counter
from pathlib import Path

import pytest

from evenrank.preprocess import PreprocessConfig, preprocess
from evenrank.preprocess.read.public import CATALOG
from tests.preprocess.build.id_logs import expected_vocabulary, vocabulary
from tests.preprocess.decoded import decode, read_rows

BEGIN = 1_600_000_000
USERS, ITEMS = (3, 70_001, 12), (9, 4_000_000_000, 131_262, 10)
LOG = [(random.Random(row).choice(USERS), random.Random(-row - 1).choice(ITEMS), row // 3) for row in range(60)]


def write_raw_files(raw: Path, name: str) -> None:
    """Write the events of `LOG` in the layout of a dataset, over all its files."""
    log, folder = CATALOG[name].log, raw / CATALOG[name].folder
    scale = 1000 if log.timestamp_unit == "ms" else 1
    header = log.columns or log.needed_columns
    for index, path in enumerate(log.events):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        lines = [] if log.columns else [",".join(header)]
        for user, item, time in LOG[index :: len(log.events)]:
            values = {log.user_column: user, log.item_column: item, log.timestamp_column: (BEGIN + time) * scale}
            values |= {"rating": 4} if "rating" in header else {}
            lines.append((log.delimiter or ",").join(str(values.get(column, 0)) for column in header))
        (folder / path).write_text("\n".join(lines) + "\n")
    if log.context is not None:
        header = log.context_header or (log.user_column, *(text.partition(":")[0] for text in log.context_columns))
        lines = [] if log.context_header else [",".join(header)]
        lines += [(log.delimiter or ",").join([str(user), *["1"] * (len(header) - 1)]) for user in USERS]
        (folder / log.context).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("name", ["ml-1m", "ml-20m", "kuairand-pure"])
def test_ids_are_those_of_the_raw_files_by_the_vocabulary(tmp_path: Path, name: str) -> None:
    write_raw_files(tmp_path / "raw", name)
    out = tmp_path / "out"
    manifest = preprocess(PreprocessConfig(dataset=name, raw_dir=tmp_path / "raw", out=out, split="none"))
    for column, feature in enumerate(("user_id", "item_id")):
        expected = expected_vocabulary(LOG, column)
        assert vocabulary(out, feature) == expected
        assert (manifest.ids[feature].rule, manifest.ids[feature].kind) == ("dense", "int64")
        assert manifest.ids[feature].largest == max(USERS if column == 0 else ITEMS)
        assert manifest.vocabulary_sizes[feature] == len(expected) + 1
    of_dataset = Counter(
        (row["user_id"], item, time // 1000 - BEGIN)
        for row in decode(out, read_rows(out / "train"))
        for item, time in zip(row["item_id"], row["timestamp_ms"], strict=True)
    )
    log, raw = CATALOG[name].log, tmp_path / "raw" / CATALOG[name].folder
    of_files: Counter[tuple[int, int, int]] = Counter()
    for path in log.events:
        lines = (raw / path).read_text().replace("::", ",").splitlines()
        for row in csv.DictReader(lines, fieldnames=log.columns or None):
            time = int(row[log.timestamp_column]) // (1000 if log.timestamp_unit == "ms" else 1)
            of_files[int(row[log.user_column]), int(row[log.item_column]), time - BEGIN] += 1
    assert of_dataset == of_files
