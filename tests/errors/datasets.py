from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets import FolderLog, describe_log, open_store, open_vectors, read_manifest
from evenrank.datasets.continuous_log import rows_of_table
from evenrank.datasets.distributions import Histogram, Uniform, draw_actions, parse_distribution
from evenrank.datasets.mixture import MixtureOrder
from evenrank.datasets.order import EpochSchedule
from evenrank.datasets.slices import Targets, TimeWindows
from evenrank.datasets.stream import StreamConfig, open_stream
from tests.datasets.crafted import store_of, windows_of
from tests.datasets.logs import MANIFEST, items_of, table_of
from tests.datasets.test_order import samples
from tests.datasets.test_store import Reversed
from tests.errors.scene import Row, Scene


def config(call: Callable[[Scene], Any], line: str) -> Row:
    return Row(call, ConfigError, line)


def data(call: Callable[[Scene], Any], line: str) -> Row:
    return Row(call, DataError, line)


def drawn(text: str, line: str) -> Row:
    return config(lambda _: parse_distribution(text), line)


def histogram(values: list[int], counts: list[int] | None, line: str) -> Row:
    of_values = Histogram.of if counts is None else lambda seen: Histogram(values=seen, counts=np.array(counts))
    return config(lambda _: of_values(np.array(values, dtype=np.int64)), line)


def mixed(first: Any, weights: list[float], line: str) -> Row:
    return config(lambda _: MixtureOrder([first, samples(5)], weights), line)


def windows(times: list[list[int]], line: str, **options: Any) -> Row:
    kind = ConfigError if options else DataError
    return Row(lambda _: windows_of(store_of(times), **{"every": "1d", **options}), kind, line)


def targets(line: str, max_targets: int = 1, **options: Any) -> Row:
    return config(lambda _: Targets(**options).open(store_of([[1, 2]]), lambda store: store, max_targets), line)


def mapped(name: str, size: int, line: str) -> Row:
    return config(lambda scene: open_store(scene.data).remapped({name: Reversed(size)}), line)


def foreign(columns: dict[str, str], line: str, **options: Any) -> Row:
    return config(lambda scene: open_store(scene.folder, columns=columns, **options), line)


def manifest(text: str, line: str) -> Row:
    return data(lambda scene: read_manifest(Path(scene.file("manifest.json", text)).parent), line)


def log(line: str, sizes: dict[str, int], **options: Any) -> Row:
    return config(lambda _: describe_log(sizes, **options), line)


def schedule(line: str, **options: Any) -> Row:
    return config(lambda _: EpochSchedule(**{"num_samples": 10, "world_size": 1, "batch_size": 2} | options), line)


def topic(table: pa.Table, line: str) -> Row:
    return data(lambda _: rows_of_table(table, MANIFEST, "topic"), f"topic{line}...")


def _with(name: str, value: Any) -> pa.Table:
    """Return records of a log with a value in each row or event of a column."""
    is_list = pa.types.is_list(LOG[name].type)
    values = [[value] * len(items_of(record)) if is_list else value for record in range(6)]
    return LOG.set_column(LOG.column_names.index(name), name, [values])


def lake(line: str, seen: float = 0.0, **columns: str) -> Row:
    """Open a folder with one file of lists and texts."""

    def opened(scene: Scene) -> Any:
        values = {"movies": [[1], [3]], "ts": [[-4], [6, 7]], "name": ["a", "b"], "seen": [[seen], [0.1]]}
        pq.write_table(pa.table(values), scene.folder / "a.parquet")
        return open_store(scene.folder, columns=columns)

    return data(opened, f"<folder>/a.parquet{line}...")


def _draw_actions(_: Scene) -> Any:
    return draw_actions(Uniform(low=1 << 31, high=1 << 31), np.random.default_rng(0), 2)


MAP, ITEMS, S3 = {"item_id": Reversed()}, {"item_id": "i"}, "s3://b/data?region=us-east-1"
LOG = table_of(range(6))
TARGETS = LOG.append_column("num_targets", [[1, 2, 4, 1, 1, 1]])
NO_IDS = "must have integers, from 0 if they are ids, it has"
EVERY = "...every must be a number of hours, days or weeks, such as 6h, 1d or 1w, got '1y'"
AFTER = "...start 2000-01-01 is after the last event, at 1970-01-01T00:00:00..."
UNPACKED = (
    "<folder> is not a dataset: it contains no manifest.json; pass a folder that `evenrank preprocess --out` wrote"
)
NO_BUCKET = "no://bucket/data cannot be opened: Unrecognized filesys..."

ROWS = [
    drawn("gamma", "unknown distribution 'gamma'...known: uniform, normal, zipf, clipped-zipf, lognormal, hist..."),
    drawn("zipf:low=1,high=5,low=2", "zipf has low twice ...; give it once"),
    drawn("zipf:alpha=2", "zipf has no parameter 'alpha'...known: exponent, low, high, shift..."),
    drawn("zipf:low=x", "...low must be int, got 'x'..."),
    drawn("uniform:low=5,high=4", "Uniform: low must be at most high, got low=5 and high=4..."),
    drawn("uniform:high=9223372036854775807", "Uniform: high must be at least 0 and at most 92233720368...4784,..."),
    drawn("zipf:low=0", "...low + shift must be at least 1, got low=0 shift=0; pass shift=1 for values from 0"),
    drawn("clipped-zipf:exponent=1", "ClippedZipf: exponent must be above 1 and at most 100, got 1.0"),
    drawn("histogram:column=length", "histogram needs path ...; write histogram:path=..."),
    drawn("lognormal:mean=nan", "Lognormal: mean must be above 0 and finite, got nan"),
    drawn("lognormal:mean=1e-308,std=1e308", "...std must be at most 10^100 times the mean, got mean=1e-308..."),
    config(_draw_actions, "...actions must be between 0 and 2147483647, got 2147483648 to 2147483648..."),
    config(lambda s: Histogram.read(s.data, "genre"), "...no integer column 'genre'; known: length, user_id, ..."),
    data(lambda scene: Histogram.read(scene.data, split="test"), "<data> has no split 'test'; known: eval, train"),
    histogram([3, -2], None, "a histogram needs observations of at least 0, got -2..."),
    histogram([], None, "a histogram needs observations of at least 0, got none..."),
    histogram([2, 1], [1, 1], "...must ascend from at least 0 and its counts be at least 1..."),
    histogram([1, 2], [1], "...as many counts as values and at least one, got 2 values and 1 counts..."),
    mixed(samples(5), [0, 1], "...weights must be positive numbers..."),
    mixed(samples(5), [1e9, 1], "dataset 1 of the mixture has 5 samples and gets 0 of an epoch's 10..."),
    mixed(samples(1, [0]), [1, 1], "dataset 0 of the mixture has 0 samples..."),
    schedule("EpochSchedule: world_size must be at least 1, got 0", world_size=0),
    schedule("...start must be between 0 and num_samples = 10, got 11", start=11),
    config(lambda _: StreamConfig(lanes=0), "StreamConfig: lanes must be at least 1, got 0"),
    data(lambda scene: open_stream(scene.data, "test"), "<data> has no split 'test'; known: eval, train"),
    data(lambda _: open_stream("no://bucket/data", "train"), NO_BUCKET),
    config(lambda _: TimeWindows(every="1y"), EVERY),
    config(lambda _: TimeWindows(every="1d", start="today"), "...start must be a time in ISO 8601, such as 2015-01..."),
    windows([[1]], AFTER, start="2000-01-01"),
    targets(
        "'bought == 1' needs the column 'bought'; there are user_id, item_id, action, timestamp_ms", where="bought == 1"
    ),
    targets("where must be a condition, such as 'action == 1', got the number 'action % 2'", where="action % 2"),
    targets("'action = 1' is no expression; write one such as ...", where="action = 1"),
    targets("with where or min_history, samples have one target, got max_num_candidates=2; pass 1", 2, min_history=1),
    targets(
        "no event in the split 'train' of the dataset is a target with where='action > 5' and min_history=2; choose "
        "others",
        where="action > 5",
        min_history=2,
    ),
    targets(
        "...segment=0.5 applies to within='shuffle', not to within='user'; leave it out", within="user", segment=0.5
    ),
    targets("...segment must be above 0 and at most 1, got 0", segment=0),
    targets("...within must be one of shuffle, time, user, got 'row'", within="row"),
    windows([[1]], "with where or min_history, samples have one target, got ...", where="action == 1", max_targets=2),
    windows([[1]], "no event in the split ...", start="first", min_history=1),
    windows([[1]], "no event in the split ...", where="action > 5"),
    config(
        lambda _: Targets(where="action > 5").open(store_of([]), lambda store: store, 1), "no event in the split ..."
    ),
    windows([[0, 0], [0]], "the dataset has no times of events; windows of time need them..."),
    windows([[]], "the dataset has no events in its split 'train'..."),
    foreign({"user_id": "uid"}, "columns must name the column of item_id, they have user_id"),
    foreign({"item_id": "movies", "label": "x"}, "no feature can be called 'label'..."),
    foreign(ITEMS, "sort_by_time needs a column of timestamp_ms, they have item_id", sort_by_time=True),
    data(lambda s: open_store(s.folder, columns=ITEMS), "<folder> has no Parquet files; pass a folder..."),
    config(lambda _: open_store(S3, columns=ITEMS), "columns are for a folder of Parquet files, no..."),
    config(lambda scene: open_store(scene.data).head(-1), "...n must be at least 0, got -1"),
    mapped("video_id", 600, "the dataset has no column 'video_id' to map; known: user_id, segment, item_id,..."),
    mapped("item_id", 100, "item_id is up to ... in the dataset, too large for a table of num_embeddings=100;..."),
    config(lambda s: open_store(s.data).remapped(MAP).remapped(MAP), "the column 'item_id' is mapped already; ..."),
    config(
        lambda s: open_vectors(s.data, "action"), "there are no vectors of 'action'; choose one of user_id, item_id"
    ),
    data(
        lambda s: open_vectors(s.data), "<data> has no vectors of item_id; preprocess it with --item-vectors FILE, ..."
    ),
    data(lambda s: open_vectors(open_stream(s.data, "eval"), "user_id"), "<data> has no vectors of user_id; prepro..."),
    data(
        lambda _: open_vectors(store_of([[1]])), "a store in memory has no vectors of item_id; preprocess it with ..."
    ),
    data(lambda scene: read_manifest(scene.folder), UNPACKED),
    manifest("{", "<folder>/manifest.json is not valid JSON..."),
    manifest('{"schema_version": 99}', "...schema version 99, this version of evenrank reads 2..."),
    manifest('{"schema_version": 2}', "...has a missing or malformed field..."),
    data(lambda s: read_manifest(s.folder / "no"), "<folder>/no is not a dataset: no such folder; make one wi..."),
    data(lambda s: read_manifest(s.file("log.csv", "")), "<folder>/log.csv is not a dataset: it is a file; pass..."),
    data(lambda s: FolderLog(s.folder / "no", MANIFEST), "<folder>/no is no folder; make that of the log..."),
    config(lambda s: FolderLog(s.folder, MANIFEST, incomplete_seconds=0), "...incomplete_seconds must be above 0..."),
    log("...vocabulary_sizes must have item_id, they have action...", {"action": 3}),
    log("...vocabulary_sizes['item_id'] must be at least 1, got 0", {"item_id": 0}),
    log("...extra_events['dwell'] must be one of ..., got 'text'...", {"item_id": 3}, extra_events={"dwell": "text"}),
    topic(LOG.drop_columns("segment"), " has 0 columns 'segment'; write one, as the log's manifest says"),
    topic(
        LOG.append_column("user_id", LOG["user_id"]), " has 2 columns 'user_id'; write one, as the log's manifest says"
    ),
    topic(_with("item_id", 50), ": item_id has 50, which vocabulary_sizes['item_id'] = 50 of the log does not"),
    topic(LOG.set_column(2, "action", [[[0]] * 6]), ", row 1: 'item_id' has 2 values, 'action' has 1"),
    topic(_with("segment", None), ": column 'segment' (segment) must have integers"),
    topic(_with("action", 2**40), ": column 'action' (action) cannot have type int64: Integer value 1099511627776"),
    topic(_with("share", "a"), ": column 'share' (share) cannot have type string: Failed to parse"),
    topic(_with("dwell", "x"), f": column 'dwell' (dwell) {NO_IDS} 0 nulls and type string"),
    topic(TARGETS, ", row 2: num_targets is 4, of 3 events; it"),
    lake(" has 0 columns 'films'; known: movies, ts, name, seen", item_id="films"),
    lake(": column 'name' (item_id) has no lists; map one that has", item_id="name"),
    lake(", row 1: 'movies' has 1 values, 'ts' has 2; the", item_id="movies", timestamp_ms="ts"),
    lake(f": column 'ts' (item_id) {NO_IDS} -4; `even", item_id="ts"),
    lake(f": column 'seen' (item_id) {NO_IDS} 0 nulls and type do", item_id="seen"),
    # Floats that would be rounded, or are not finite.
    lake(": column 'seen' (watched) has 1.6e+09, not finite or", 1.6e9 + 1, item_id="movies", watched="seen"),
    lake(": column 'seen' (watched) has 16777216, not finite or", -(2.0**24), item_id="movies", watched="seen"),
    lake(": column 'seen' (watched) has inf, not finite or", np.inf, item_id="movies", watched="seen"),
]
