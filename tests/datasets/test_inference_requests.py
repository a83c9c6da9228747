from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import Requests
from evenrank.datasets import open_store
from tests.s3_server import S3

pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
from evenrank.preprocess import Filters, PreprocessConfig, RequestRule, TabularConfig, preprocess

LOG = "".join(f"{user},{10 * user + index},{1_600_000_000 + 100 * index}\n" for user in (3, 5) for index in range(6))
NAMES = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}


def _write(folder: Path, log: str = LOG, **options: Any) -> Path:
    path = folder / "log.csv"
    path.write_text(f"user,item,time\n{log}")
    defaults: dict[str, Any] = {"ids": "keep", "split": "leave-last:1", "requests": RequestRule(seconds=200)}
    custom = TabularConfig(events=(path,), **NAMES)  # type: ignore[arg-type]
    preprocess(PreprocessConfig(dataset="custom", out=folder / "data", custom=custom, **{**defaults, **options}))
    return folder / "data"


def _items(data: Path | str, max_num_candidates: int = 2) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Return history and candidates of the requests of each split."""
    found = {}
    for store in Requests().open(data, open_store, max_num_candidates)[1]:
        assert store.num_targets is not None
        events = store.ends - store.num_targets
        items = [store.columns["item_id"][part].tolist() for part in map(slice, store.begins, store.ends)]
        found[store.split] = [(row[:n], row[n:]) for row, n in zip(items, events - store.begins, strict=True)]
    return found


def test_requests_are_slices_of_the_rows_with_all_events_by_time(tmp_path: Path, s3: S3) -> None:
    expected = [
        *(([], [30, 31]), ([], [50, 51]), ([30, 31], [32, 33]), ([50, 51], [52, 53])),
        *(([30, 31, 32, 33], [34, 35]), ([50, 51, 52, 53], [54, 55])),
    ]
    assert _items(_write(tmp_path)) == {"train": [], "eval": expected}
    assert _items(tmp_path / "data", 9)["eval"] == expected  # up to the user's next request
    assert _items(tmp_path / "data", 1)["eval"] == [(history, row[:1]) for history, row in expected]
    s3.put(tmp_path / "data", "requests")
    assert _items(s3.url("requests"))["eval"] == expected
    assert _items(_write(tmp_path, split="none")) == {"train": expected}
    filtered = _write(
        tmp_path, f"{LOG}5,30,1600000050\n7,30,1600000000\n", split="none", filters=Filters(min_item_events=2)
    )
    assert _items(filtered, 9) == {"train": [([], [30])] * 3}  # of the users 3, 7 and 5


def test_histories_that_are_divided_are_refused(tmp_path: Path) -> None:
    second = tmp_path / "second.csv"
    second.write_text("user,item,time\n3,38,1600000250\n3,39,1600000900\n")
    for options, user in (
        ({"split": "none", "filters": Filters(window=4)}, "us"),
        ({"split": f"file:{second}"}, "user 3"),
    ):
        data = _write(tmp_path, **options)
        fault = f"^requests need all events of a user in one row, but {data} divides those of {user}"
        with pytest.raises(ConfigError, match=fault):
            _items(data)


def test_requests_that_are_of_no_event_or_of_the_same_and_files_that_are_malformed_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path) / "requests.parquet"
    table = pq.read_table(path)
    wrong = [("history_end", value) for value in (1, -1, 1 << 62)]
    wrong += [("user_id", value) for value in (2, 4, 1 << 62)] + [("request_ts_ms", 0)]
    tables = [pa.concat_tables([table, table.slice(2, 1)])]
    for column, value in wrong:
        values = table[column].to_numpy().copy()
        values[1] = value
        tables.append(table.set_column(table.schema.names.index(column), column, pa.array(values)))
    no_event = "has a request of user .* ms, of which the dataset has no event; preproc"
    halves = table.set_column(
        table.schema.names.index("history_end"), "history_end", pa.array(np.zeros(len(table)) / 2)
    )
    for each, fault in (
        *((each, no_event) for each in tables),
        (table.drop_columns("history_end"), "has 0 columns 'history_end'; preprocess the dataset again"),
        (halves, "column 'history_end' must be int64 without nulls, it has type double"),
    ):
        pq.write_table(each, path)
        with pytest.raises(DataError, match=f"^{path}:? {fault}"):
            _items(tmp_path / "data")
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=f"^{path} cannot be read as Parquet "):
        _items(tmp_path / "data")
    path.unlink()
    with pytest.raises(DataError, match=f"^{path} is missing; preprocess the dataset again, with `evenrank preproc"):
        _items(tmp_path / "data")
