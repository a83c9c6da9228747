import multiprocessing
import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.event_statistics import read_statistics
from evenrank.datasets.schema import Manifest, user_hash
from evenrank.preprocess import (
    Filters,
    PreprocessConfig,
    RequestRule,
    SyntheticConfig,
    TabularConfig,
    job,
    preprocess,
)
from evenrank.preprocess import writer as writer_module
from evenrank.preprocess.build import events
from evenrank.preprocess.read import text as text_files
from tests.preprocess.decoded import decode, read_rows

HEADER = "userId,movieId,rating,timestamp\n"
ML_20M = HEADER + "7,30,0.5,300\n7,10,5.0,100\n3,20,3.5,50\n7,20,4.0,100\n-2,10,1.0,1112486027\n"
USERS = "ml-1m/users.dat"
ML_1M_RATINGS = "1::1193::5::978300760\n2::661::3::978302109\n1::914::1::978300000\n"
ML_1M_USERS = "1::F::1::10::48067\n2::M::56::16::70072\n3::M::25::15::55117-12\n"


def _run(tmp_path: Path, files: str | dict[str, str], dataset: str = "ml-20m", **options: Any) -> Manifest:
    for name, text in (files if isinstance(files, dict) else {"ml-20m/ratings.csv": files}).items():
        path = tmp_path / "raw" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="latin-1", newline="")
    options = {"allow_empty": True, **options}  # many of the logs are in 1970
    return preprocess(PreprocessConfig(dataset=dataset, raw_dir=tmp_path / "raw", out=tmp_path / "out", **options))


def _draw(out: Path, num_users: int, **options: Any) -> Manifest:
    synthetic = SyntheticConfig(num_users=num_users)
    return preprocess(PreprocessConfig(dataset="synthetic", out=out, synthetic=synthetic, **options))


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a split with the raw ids of users and items."""
    return decode(folder.parent, read_rows(folder))


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_ml_20m_becomes_sequences_in_time_order(tmp_path: Path) -> None:
    manifest = _run(tmp_path, ML_20M, split="none")
    rows = [
        (3, [20], [6], [50_000], 1),
        (7, [10, 20, 30], [9, 7, 0], [100_000, 100_000, 300_000], 3),  # events of the same time stay in file order
        (-2, [10], [1], [1_112_486_027_000], 1),
    ]
    names = ("user_id", "item_id", "action", "timestamp_ms", "length")
    assert _rows(tmp_path / "out" / "train") == [
        dict(zip(names, row, strict=True)) for row in sorted(rows, key=lambda row: _hash(row[0]))
    ]
    assert _rows(tmp_path / "out" / "eval") == []
    assert dict(manifest.vocabulary_sizes) == {"user_id": 4, "item_id": 4, "action": 10}
    train = manifest.splits["train"]
    assert (train.rows, train.interactions) == (3, 5)
    assert train.lengths["min"] == train.lengths["p50"] == 1
    assert train.lengths["max"] == train.lengths["p75"] == 3
    (source,) = manifest.sources
    assert (source.path, source.bytes) == ("ratings.csv", len(ML_20M))
    assert source.sha256 == sha256(ML_20M.encode()).hexdigest()


def _hash(user_id: int) -> int:
    return int(user_hash(np.array([user_id], dtype=np.int64))[0])


def test_ml_1m_has_contextual_features_which_are_0_if_unknown(tmp_path: Path) -> None:
    ratings = ML_1M_RATINGS + "4::1::1::978300000\n5::1::1::978300000\n"
    files = {"ml-1m/ratings.dat": ratings, USERS: ML_1M_USERS + "5::::1::::\n"}
    manifest = _run(tmp_path, files, "ml-1m", split="none")
    names = ("user_id", "sex", "age_group", "occupation", "zip_code", "item_id", "action", "timestamp_ms", "length")
    rows = sorted(_rows(tmp_path / "out" / "train"), key=lambda row: row["user_id"])
    assert [tuple(row[name] for name in names) for row in rows] == [
        (1, 1, 1, 1, 1, [914, 1193], [0, 4], [978300000_000, 978300760_000], 2),
        (2, 2, 3, 3, 3, [661], [2], [978302109_000], 1),
        (4, 0, 0, 0, 0, [1], [0], [978300000_000], 1),
        (5, 0, 1, 0, 0, [1], [0], [978300000_000], 1),
    ]
    assert list(manifest.contextual.items()) == [(name, "int64") for name in names[1:5]]
    assert manifest.context_labels["sex"] == (None, "F", "M")
    assert manifest.context_labels["age_group"] == (None, "1", "25", "56")
    assert manifest.context_labels["zip_code"] == (None, "48067", "55117-12", "70072")
    sizes = {"user_id": 5, "item_id": 5, "action": 5, "sex": 3, "age_group": 4, "occupation": 4, "zip_code": 4}
    assert dict(manifest.vocabulary_sizes) == sizes


def test_column_types_match_the_schema(small_dataset: Path) -> None:
    schema = pq.read_schema(next((small_dataset / "train").glob("*.parquet")))
    lists = {"item_id": "int64", "action": "int32", "timestamp_ms": "int64"}
    expected = {"user_id": "int64", "segment": "int64", **{name: f"list<element: {of}>" for name, of in lists.items()}}
    assert {field.name: str(field.type) for field in schema} == {**expected, "length": "int32"}


RATING_FAULTS = {
    "1,2,5.5,3": r"1 bad row, first line 7 .*: rating is not on the scale 0.5 to 5 in steps of 0.5",
    "1,2,3.2,3": r"1,2,3.2,3'\): rating is not on .* in steps of 0.5",
    "1,2,0,3": r"1,2,0,3'\): rating is not on the scale 0.5 to 5",
    "1,x,3,3": r"line 7 \('1,x,3,3'\): movieId is not an integer in",
    "1,2,,3": r"line 7 \('1,2,,3'\): rating is not on the scale",
    "2_0,2,3,4": "line 7 .*userId is not an integer in",
    "1,2,3,9300000000000000": "line 7 .*timestamp is not a time in seconds since 1970 up to the year 9999",
    "\n1,2,3,4": r"1 bad row, first line 7 \(''\)",
}
INVALID_ML_1M = [
    ("1:9:2::4::3\n", ML_1M_USERS, "ratings.dat: the first line has 3 fields by the delimiter '::', and 4 columns"),
    ("1::2::6::3\n", ML_1M_USERS, r"1::2::6::3'\): rating is not on the scale 1 to 5 in steps of 1"),
    (ML_1M_RATINGS, "", "users.dat is empty; create it again"),
    (ML_1M_RATINGS, "1::F\n", "users.dat: the first line has 2 fields by the delimiter '::', and 5 columns"),
    (ML_1M_RATINGS, ML_1M_USERS + "::M::1::1::1\n", "users.dat, line 4 .*: userId is missing"),
]


@pytest.mark.parametrize(
    ("dataset", "files", "message"),
    [
        ("ml-20m", "", "ratings.csv is empty; create it again"),
        (
            "ml-20m",
            HEADER.replace("\n", "\r1,2,3,4\n5,6,1,8\n"),
            "ratings.csv: the first line .* cannot be parsed; fix its quotes or line ends",
        ),
        (
            "ml-20m",
            HEADER,
            "no events could be read: there is no row in .*ratings.csv; check the file, or unpack or down",
        ),
        *(("ml-20m", f"{ML_20M}{line}\n", message) for line, message in RATING_FAULTS.items()),
        *(("ml-1m", {"ml-1m/ratings.dat": ratings, USERS: users}, text) for ratings, users, text in INVALID_ML_1M),
    ],
)
def test_malformed_input_raises(tmp_path: Path, dataset: str, files: str | dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        _run(tmp_path, files, dataset)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize("piece_bytes", [1 << 20, 9])
def test_bad_rows_are_skipped_on_demand_and_duplicates_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(text_files, "_PIECE_BYTES", piece_bytes)
    text = ML_20M + "1,x,3,3\n1,2,3.0,5,9,9,9\n9,9,3.0,7\n1,2\n7,10,5.0,100\n7,10,4.5,100\n"
    manifest = _run(tmp_path, text, split="none", on_error="skip")
    assert manifest.splits["train"].interactions == 8
    assert manifest.options["audit"] == {
        "ratings.csv: 1 bad row, first line 7 ('1,x,3,3'): movieId is not an integer in -2^63..2^63-1; all skipped": 1,
        "ratings.csv: 2 bad rows, first line 8 ('1,2,3.0,5,9,9,9'): expected 4 fields, got 7; "
        "line 10 ('1,2'): expected 4 fields, got 2; all skipped": 2,
        "duplicate events (kept)": 1,
    }


def test_a_file_has_the_users_whose_hashes_begin_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "ROWS_PER_GROUP", 32)
    num_events = _draw(tmp_path / "whole", 150, split="none").splits["train"].interactions
    monkeypatch.setattr(job, "EVENTS_PER_FILE", num_events // 3)  # so that two bits number the files
    manifest = _draw(tmp_path / "out", 150, split="user:0.02", overwrite=True)
    for name, split in manifest.splits.items():
        ids = [pq.read_table(tmp_path / "out" / file.path)["user_id"].to_pylist() for file in split.files]
        assert [len(of_file) for of_file in ids] == [file.rows for file in split.files]
        numbers = [int(Path(file.path).stem.removeprefix("part-")) for file in split.files]
        assert numbers == ([0, 1, 2, 3] if name == "train" else sorted(set(numbers)))
        assert [{_hash(user) >> 62 for user in of_file} for of_file in ids] == [{number} for number in numbers]
        assert ids == [sorted(of_file, key=_hash) for of_file in ids]
    assert len(manifest.splits["eval"].files) < 4  # there is no file without rows
    everybody = [row["user_id"] for name in manifest.splits for row in _rows(tmp_path / "out" / name)]
    assert sorted(everybody) == list(range(1, 151))


def test_row_groups_end_once_they_have_enough_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "EVENTS_PER_GROUP", 10)
    lengths = [3, 3, 3, 3, 25, 1, 9, 1, 1]
    lines = [f"{user},1,3,{n}" for user, length in enumerate(lengths) for n in range(length)]
    _run(tmp_path, HEADER + "\n".join(lines) + "\n", split="none")
    file = pq.ParquetFile(next((tmp_path / "out" / "train").glob("*.parquet")))
    groups = [file.read_row_group(n)["length"].to_pylist() for n in range(file.num_row_groups)]
    assert sorted(length for group in groups for length in group) == sorted(lengths)
    assert all(sum(group) >= 10 for group in groups[:-1])
    assert all(sum(group[:-1]) < 10 for group in groups)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        _draw(tmp_path / name, 500)
    assert _contents(tmp_path / "one") == _contents(tmp_path / "two")


@pytest.mark.parametrize("filters", [Filters(), Filters(min_user_events=3, min_item_events=4, window=7, stride=5)])
def test_the_bytes_do_not_depend_on_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: Filters) -> None:
    rng = np.random.default_rng(0)
    rows = zip(rng.integers(1, 400, 6000), rng.zipf(1.5, 6000) % 300, rng.integers(1, 11, 6000), strict=True)
    lines = [f"{user},{item},{rating / 2},{rng.integers(0, 50)}" for user, item, rating in rows]
    text = HEADER + "\n".join(lines) + "\n"
    outputs = []
    monkeypatch.setattr(job, "EVENTS_PER_FILE", 800)
    for workers, per_bucket, per_run, block_bytes, piece_bytes in (
        (1, 10**9, 10**9, 10**7, 10**9),
        (4, 500, 100, 10**7, 10**4),
        (2, 160, 900, 7000, 10**9),
        (3, 60, 2000, 7000, 20_011),
    ):
        monkeypatch.setattr(job, "num_cores", lambda count=workers: count)
        monkeypatch.setattr(events, "EVENTS_PER_RUN", per_run)
        monkeypatch.setattr(job, "EVENTS_PER_BUCKET", per_bucket)
        monkeypatch.setattr(text_files, "_BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(text_files, "_PIECE_BYTES", piece_bytes)
        manifest = _run(tmp_path, text, filters=filters, requests=RequestRule(seconds=10))
        assert sum(split.interactions for split in manifest.splits.values()) > 2000
        outputs.append(_contents(tmp_path / "out"))
    assert all(output == outputs[0] for output in outputs)


def test_leave_last_marks_the_events_to_predict(tmp_path: Path) -> None:
    manifest = _run(tmp_path, ML_20M, split="leave-last:1")
    train = {row["user_id"]: row["item_id"] for row in _rows(tmp_path / "out" / "train")}
    assert train == {7: [10, 20], 3: [20], -2: [10]}
    (row,) = _rows(tmp_path / "out" / "eval")
    assert (row["user_id"], row["item_id"], row["num_targets"]) == (7, [10, 20, 30], 1)
    statistics = read_statistics(manifest)
    assert statistics.events == {"train": 4, "eval": 1}
    assert (statistics.early_eval_events, statistics.cold_items, statistics.cold_users) == (1, 1, 0)


def test_split_by_time_puts_no_later_event_into_train(tmp_path: Path) -> None:
    manifest = _run(tmp_path, ML_20M, split="time:1970-01-01T00:01:40")
    assert [(row["user_id"], row["item_id"]) for row in _rows(tmp_path / "out" / "train")] == [(3, [20])]
    evaluated = {row["user_id"]: (row["item_id"], row["num_targets"]) for row in _rows(tmp_path / "out" / "eval")}
    assert evaluated == {7: ([10, 20, 30], 3), -2: ([10], 1)}
    statistics = read_statistics(manifest)
    assert statistics.events == {"train": 1, "eval": 4}
    assert (statistics.early_eval_events, statistics.cold_items, statistics.cold_users) == (0, 2, 2)


DAYS = [16_436, 16_437, 16_437, 16_441]  # 2015-01-01, 2015-01-02, 2015-01-06
TIMES: dict[str, list[Any]] = {
    "s.csv": [day * 86_400 for day in DAYS],
    "ms.csv": [day * 86_400_000 for day in DAYS],
    "us.csv": [day * 86_400_000_000 for day in DAYS],
    "ns.parquet": [day * 86_400_000_000_000 for day in DAYS],
    "iso.csv": ["2015-01-01T00:00Z", "2015-01-02", "2015-01-02 02:00:00+02:00", "2015-01-06 00:00:00"],
    "date.csv": ["2015-01-01", "2015-01-02", "2015-01-02", "2015-01-06"],
    "date.parquet": [20150101, 20150102, 20150102, 20150106],
    "auto.parquet": [date(2015, 1, 1), date(2015, 1, 2), date(2015, 1, 2), date(2015, 1, 6)],
}


def _run_log(path: Path, times: list[Any], **options: Any) -> Manifest:
    log = pl.DataFrame({"user_id": [1, 2, 1, 1], "item_id": [5, 6, 7, 8], "timestamp": times})
    write: Callable[[Path], None] = log.write_csv if path.suffix == ".csv" else log.write_parquet
    write(path)
    columns: dict[str, Any] = {"user_column": "user_id", "item_column": "item_id", "timestamp_column": "timestamp"}
    custom = TabularConfig(events=(path,), **columns)
    return preprocess(PreprocessConfig(dataset="custom", out=path.parent / "out", custom=custom, **options))


def test_logs_in_all_units_give_the_same_dataset(tmp_path: Path) -> None:
    hashes = set()
    for name, times in TIMES.items():
        manifest = _run_log(tmp_path / name, times, split="time:last:4d")
        unit = name.split(".")[0]
        assert manifest.options["timestamp_unit"] == unit
        assert manifest.options["time"] == {
            "unit": unit,
            "first": "2015-01-01T00:00:00Z",
            "last": "2015-01-06T00:00:00Z",
        }
        hashes.add(manifest.content_hash)
    assert len(hashes) == 1
    (row,) = _rows(tmp_path / "out" / "eval")
    times = [day * 86_400_000 for day in (DAYS[0], DAYS[2], DAYS[3])]
    assert (row["timestamp_ms"], row["num_targets"]) == (times, 1)


@pytest.mark.parametrize(("split", "name"), [("time:2016", "eval"), ("time:last:9d", "train"), ("file:u.txt", "eval")])
def test_a_split_by_time_or_file_without_rows_is_an_error_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("u.txt").write_text("9\nx\n")
    message = (
        rf"^--split {split} leaves {name} without rows, of events from 2015-01-01T00:00:00Z to 2015-01-06T00:00:00Z; "
        ".*, or pass --allow-empty$"
    )
    with pytest.raises(DataError, match=message):
        _run_log(tmp_path / "log.csv", TIMES["s.csv"], split=split)
    assert not Path("out").exists()
    manifest = _run_log(tmp_path / "log.csv", TIMES["s.csv"], split=split, allow_empty=True)
    assert [split for split, info in manifest.splits.items() if not info.rows] == [name]


def test_a_log_in_1970_is_an_error_unless_allowed(tmp_path: Path) -> None:
    times = list(range(4))
    with pytest.raises(
        DataError, match=r"^the last event of .* is at 1970-01-01T00:00:03Z, read as seconds since 1970; "
    ):
        _run_log(tmp_path / "log.csv", times)
    manifest = _run_log(tmp_path / "log.csv", times, allow_empty=True)
    assert manifest.options["time"]["last"] == "1970-01-01T00:00:03Z"


@pytest.mark.parametrize("form", ["txt", "csv", "jsonl", "parquet"])
@pytest.mark.parametrize("name", ["zoë", "12"])
def test_a_file_lists_the_users_of_eval_by_their_raw_ids(tmp_path: Path, name: str, form: str) -> None:
    users, listed = tmp_path / f"users.{form}", pl.DataFrame({"user": [name, "nobody"]})
    writers: dict[str, Callable[[Path], object]] = {
        "txt": lambda path: path.write_text(f"{name}\nnobody\n"),
        "csv": listed.write_csv,
        "jsonl": listed.write_ndjson,
        "parquet": listed.write_parquet,
    }
    writers[form](users)
    log = tmp_path / "log.csv"
    log.write_text(f"user,item,time\n{name},5,2015-01-02\n{name},6,2015-01-03\n13,6,2015-01-01\n")
    custom = TabularConfig(events=(log,), user_column="user", item_column="item", timestamp_column="time")
    config = PreprocessConfig(dataset="custom", out=tmp_path / "out", custom=custom, split=f"file:{users}")
    manifest = preprocess(config)
    assert [row["length"] for row in _rows(tmp_path / "out" / "eval")] == [2]
    assert [row["length"] for row in _rows(tmp_path / "out" / "train")] == [1]
    assert manifest.options["split"] == f"file:users.{form}"
    assert manifest.options["audit"] == {"listed users without events": 1}
    assert [source.path for source in manifest.sources] == ["log.csv", f"users.{form}"]


def test_a_folder_with_what_is_read_is_not_replaced(tmp_path: Path) -> None:
    events = tmp_path / "logs" / "log.csv"
    events.parent.mkdir()
    events.write_text("user,item,time\n1,2,1420070400\n")
    users = tmp_path / "lists" / "users.txt"
    users.parent.mkdir()
    users.write_text("1\n")
    names: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    log = TabularConfig(events=(events,), **names)
    pattern = events.parent / "*.csv"
    for out, read in (
        (events.parent, events),
        (users.parent, users),
        (events.parent, events.parent),
        (events.parent, pattern),
    ):
        if read != users:
            log = replace(log, events=(read,))
        config = PreprocessConfig(dataset="custom", out=out, custom=log, split=f"file:{users}", overwrite=True)
        with pytest.raises(
            ConfigError, match=f"^{re.escape(str(read))} is read, and would be replaced with {out}; choose an"
        ):
            preprocess(config)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["lists", "log.csv", "logs", "users.txt"]


def test_events_and_users_left_out_by_filters_are_counted(tmp_path: Path) -> None:
    filters = Filters(min_user_events=2, min_item_events=2, min_length=3)
    text = HEADER + "1,5,3,1\n1,6,3,2\n1,6,3,3\n2,5,3,1\n2,6,3,2\n3,5,3,1\n3,9,3,1\n"
    manifest = _run(tmp_path, text, split="none", filters=filters)
    assert [row["user_id"] for row in _rows(tmp_path / "out" / "train")] == [1]
    # The k-core removes item 9, then user 3, who has one event left. The history of user 2 is too short.
    assert manifest.options["audit"] == {"users left out by filters": 1, "events left out by the k-core": 2}
    assert manifest.options["filters"] == {"min_user_events": 2, "min_item_events": 2, "min_length": 3}


def test_windows_cover_a_long_history(tmp_path: Path) -> None:
    text = HEADER + "".join(f"5,{i},3,{i}\n" for i in range(8)) + "6,1,3,1\n"
    _run(tmp_path, text, split="none", filters=Filters(window=4, stride=3))
    rows = [(row["user_id"], row["window"], row["item_id"]) for row in _rows(tmp_path / "out" / "train")]
    assert sorted(rows) == [(5, 0, [0, 1, 2, 3]), (5, 1, [3, 4, 5, 6]), (5, 2, [6, 7]), (6, 0, [1])]


@pytest.mark.parametrize(("window", "share"), [(None, 188 / 702), (600, 88 / 702), (512, 0)])
def test_the_share_of_events_that_loaders_cut_off_is_counted(tmp_path: Path, window: int | None, share: float) -> None:
    text = HEADER + "".join(f"{user},1,3,{n}\n" for user, length in ((5, 700), (6, 2)) for n in range(length))
    manifest = _run(tmp_path, text, split="none", filters=Filters(window=window))
    assert read_statistics(manifest).cut_share == round(share, 6)


def test_requests_are_written_and_replaced_with_the_dataset(tmp_path: Path) -> None:
    for _ in range(2):
        _run(tmp_path, ML_20M, requests=RequestRule(seconds=150))
    rows = decode(tmp_path / "out", pq.read_table(tmp_path / "out" / "requests.parquet").to_pylist())
    requests = sorted((row["user_id"], row["request_ts_ms"], row["history_end"]) for row in rows)
    assert requests == [(-2, 1_112_486_027_000, 0), (3, 50_000, 0), (7, 100_000, 0), (7, 300_000, 2)]


def test_the_split_of_a_user_does_not_depend_on_other_users(tmp_path: Path) -> None:
    def eval_users(num_users: int, **options: Any) -> set[int]:
        _draw(tmp_path / "out", num_users, **options)
        train = {row["user_id"] for row in _rows(tmp_path / "out" / "train")}
        evaluated = {row["user_id"] for row in _rows(tmp_path / "out" / "eval")}
        assert train | evaluated == set(range(1, num_users + 1))
        assert not train & evaluated
        return evaluated

    few, many = eval_users(1000), eval_users(2000)
    assert few == {user for user in many if user <= 1000}
    assert len(many) == pytest.approx(600, abs=60)
    assert eval_users(1000, seed=1) != few
    assert len(eval_users(1000, split="user:1")) == 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, r"seed must be at least 0 and below 2\^62, got -1"),
        ({"on_error": "warn"}, "on_error must be one of fail, skip, got 'warn'"),
    ],
)
def test_invalid_options_name_the_value(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PreprocessConfig(**{"dataset": "synthetic", "out": tmp_path, **options})


def test_string_ids_are_kept_in_a_file_of_their_own(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user,item,time\nzoë,5,2015-01-02\nb,6,2015-01-01\n")
    custom = TabularConfig(events=(log,), user_column="user", item_column="item", timestamp_column="time")
    preprocess(PreprocessConfig(dataset="custom", out=tmp_path / "out", custom=custom, split="none"))
    path = tmp_path / "out" / "vocabulary_user_id.parquet"
    assert pq.read_table(path).select(["id", "value"]).to_pylist() == [
        {"id": 1, "value": "b"},
        {"id": 2, "value": "zoë"},
    ]


def test_rows_count_as_seconds_over_all_files_of_a_log_without_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 20)
    (tmp_path / "a.csv").write_text("user,item\n1,5\n2,6\n1,7\n,8\n1,6\n")
    (tmp_path / "b.csv").write_text("user,item\n2,5\n1,6\n")
    custom = TabularConfig(events=(tmp_path / "?.csv",), user_column="user", item_column="item", timestamp_unit="row")
    options: dict[str, Any] = {"custom": custom, "split": "none", "on_error": "skip", "ids": "keep"}
    manifest = preprocess(PreprocessConfig(dataset="custom", out=tmp_path / "out", **options))
    rows = {row["user_id"]: (row["item_id"], row["timestamp_ms"]) for row in _rows(tmp_path / "out" / "train")}
    assert rows == {1: ([5, 7, 6, 6], [0, 2000, 3000, 5000]), 2: ([6, 5], [1000, 4000])}
    assert manifest.options["time"] == {"unit": "row", "first": "1970-01-01T00:00:00Z", "last": "1970-01-01T00:00:05Z"}


def test_a_child_that_lacks_the_threads_of_polars_refuses_at_once(tmp_path: Path) -> None:
    _draw(tmp_path / "parent", 10)

    def refuse() -> None:
        with pytest.raises(ConfigError, match=r"^this process was forked after Polars had started threads, which it"):
            _draw(tmp_path / "child", 10)
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=refuse)
    child.start()
    child.join(60)
    code = child.exitcode
    child.kill()
    assert code == 0
    _draw(tmp_path / "parent", 10)
