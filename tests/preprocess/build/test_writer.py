"""Files of a dataset: which users and row groups they have, and that their bytes depend on no division of the work."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from evenrank.datasets import open_store
from evenrank.datasets.event_statistics import read_statistics
from evenrank.datasets.schema import user_hash
from evenrank.preprocess import Filters, RequestRule, job, preprocess
from evenrank.preprocess import writer as writer_module
from evenrank.preprocess.build import events
from evenrank.preprocess.read import text as text_files
from tests.preprocess.decoded import bytes_in, number, of_log, read_vocabulary, synthetic, write_log


def test_a_file_has_the_users_whose_hashes_begin_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "ROWS_PER_GROUP", 32)
    num_events = preprocess(synthetic(tmp_path / "whole", 150, split="none")).splits["train"].interactions
    monkeypatch.setattr(job, "EVENTS_PER_FILE", num_events // 3)  # so that two bits number the files
    splits, everybody = preprocess(synthetic(tmp_path / "out", 150, split="user:0.02")).splits, list[int]()
    for name, split in splits.items():
        numbers = [int(Path(file.path).stem.removeprefix("part-")) for file in split.files]
        assert numbers == ([0, 1, 2, 3] if name == "train" else sorted(set(numbers)))
        for leading, file in zip(numbers, split.files, strict=True):
            users = pq.read_table(tmp_path / "out" / file.path)["user_id"].to_numpy()
            hashes = user_hash(users)
            assert len(users) == file.rows
            assert {*(hashes >> np.uint64(62)).tolist()} == {leading}
            assert (np.sort(hashes) == hashes).all()
            everybody += users.tolist()
    assert len(splits["eval"].files) < 4  # there is no file without rows
    assert sorted(everybody) == list(range(1, 151))


def test_row_groups_end_once_they_have_enough_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "EVENTS_PER_GROUP", 10)
    lengths = [3, 3, 3, 3, 25, 1, 9, 1, 1]
    log = [(user, 1, time) for user, length in enumerate(lengths) for time in range(length)]
    number(tmp_path / "out", write_log(tmp_path / "log.csv", log))
    file = pq.ParquetFile(next((tmp_path / "out" / "train").glob("*.parquet")))
    groups = [file.read_row_group(n)["length"].to_pylist() for n in range(file.num_row_groups)]
    assert sorted(length for group in groups for length in group) == sorted(lengths)
    assert all(sum(group) >= 10 for group in groups[:-1])
    assert all(sum(group[:-1]) < 10 for group in groups)


def test_the_share_of_events_that_loaders_cut_off_is_counted(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.csv", [(user, 1, n) for user, length in ((5, 700), (6, 2)) for n in range(length)])
    for window, share in ((None, 188 / 702), (600, 88 / 702), (512, 0)):
        manifest = number(tmp_path / "out", path, filters=Filters(window=window))
        assert read_statistics(manifest).cut_share == round(share, 6)


# Workers; events of a bucket, of a run; bytes of a block, of a piece of text.
_DIVISIONS = [
    (1, 10**9, 10**9, 10**7, 10**9),
    (4, 500, 100, 10**7, 10**4),
    (2, 160, 900, 7000, 10**9),
    (3, 60, 2000, 7000, 20_011),
]
_BAD = ("1,2,x", '1,2,"y, ""z"""', "1,2", "1,2,,4", "", "1,2,-5", "1,2,\r\x00")


@pytest.mark.parametrize(
    ("filters", "place_of_features"),
    [(Filters(), "table"), (Filters(min_user_events=3, min_item_events=4, window=7, stride=5), "events")],
)
def test_the_bytes_do_not_depend_on_how_the_work_is_divided(
    here: Path, monkeypatch: pytest.MonkeyPatch, filters: Filters, place_of_features: str
) -> None:
    rng = np.random.default_rng(0)
    rows = zip(rng.integers(1, 400, 6000), rng.zipf(1.5, 6000) % 300, rng.integers(0, 50, 6000), strict=True)
    lines = [f"{user},{item},{1_600_000_000 + time}" for user, item, time in rows]
    bad = dict(zip(range(500, 6000, 800), _BAD, strict=True))
    for place, line in bad.items():
        lines.insert(place, line)
    Path("log.csv").write_text("\n".join(["user,item,time", *lines]), newline="")
    pl.DataFrame({"item": range(100, 400), "price": np.arange(100, 400) / 4}).write_csv("items.csv")
    pl.DataFrame({"user": range(0, 400, 2), "age": np.arange(200) % 5}).write_parquet("users.parquet")
    of_users = {"context": Path("users.parquet"), "context_columns": ("age",)}
    of_items = {"item_features": (Path("items.csv"),), "item_columns": ("price:float",)}
    log = {**of_users, **of_items, "item_features_as": place_of_features}
    rules: dict[str, Any] = {"filters": filters, "requests": RequestRule(seconds=10), "ids": "dense"}
    config = of_log(here / "out", Path("log.csv"), log=log, on_error="skip", rejects=True, split="user:0.3", **rules)
    outputs = []
    monkeypatch.setattr(job, "EVENTS_PER_FILE", 800)
    for workers, per_bucket, per_run, block_bytes, piece_bytes in _DIVISIONS:
        monkeypatch.setattr(job, "num_cores", lambda count=workers: count)
        monkeypatch.setattr(events, "EVENTS_PER_RUN", per_run)
        monkeypatch.setattr(job, "EVENTS_PER_BUCKET", per_bucket)
        monkeypatch.setattr(text_files, "_BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(text_files, "_PIECE_BYTES", piece_bytes)
        preprocess(config)
        outputs.append(bytes_in(here / "out"))
    assert all(output == outputs[0] for output in outputs)
    with Path("out/rejects.csv").open(newline="") as file:
        rejects = [(name, int(line), text) for name, line, _, text in [*csv.reader(file, strict=True)][1:]]
    assert rejects == [("log.csv", place + 2, line) for place, line in bad.items()]
    prices = {id_: item / 4 for id_, item in read_vocabulary(here / "out", "item_id").items() if (item or 0) >= 100}
    assert len(prices) > 20
    if place_of_features == "table":
        table = pl.read_parquet("out/item_features.parquet")
        assert dict(table.select("item_id", "price").rows()) == prices
    else:
        columns = open_store("out").columns
        found = zip(columns["item_id"].tolist(), columns["price"].tolist(), strict=True)
        assert all(price == prices.get(item, 0) for item, price in found)
