from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets import FolderLog, describe_log, open_store, read_manifest
from evenrank.datasets.distributions import Histogram, Uniform, draw_actions, parse_distribution
from evenrank.datasets.mixture import MixtureOrder
from evenrank.datasets.order import EpochSchedule
from evenrank.datasets.slices import Targets, TimeWindows
from evenrank.datasets.stream import StreamConfig, open_stream
from tests.datasets.crafted import windows_of
from tests.datasets.logs import MANIFEST
from tests.datasets.test_mixture import samples
from tests.datasets.test_store import Reversed
from tests.datasets.test_time_windows import store_of
from tests.errors.scene import Row, Scene


def config(call: Callable[[Scene], Any], line: str) -> Row:
    return Row(call, ConfigError, line)


def data(call: Callable[[Scene], Any], line: str) -> Row:
    return Row(call, DataError, line)


def drawn(text: str, line: str) -> Row:
    return config(lambda _: parse_distribution(text), line)


def observed(values: list[int], line: str) -> Row:
    return config(lambda _: Histogram.of(np.array(values, dtype=np.int64)), line)


def histogram(values: list[int], counts: list[int], line: str) -> Row:
    return config(lambda _: Histogram(values=np.array(values), counts=np.array(counts)), line)


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


EVERY = "...every must be a number of hours, days or weeks, such as 6h, 1d or 1w, got '{}'"
SCHEDULE: Any = {"num_samples": 10, "world_size": 1, "batch_size": 2}
MAP = {"item_id": Reversed()}

ROWS = [
    drawn(
        "gamma", "unknown distribution 'gamma'...known: uniform, normal, zipf, clipped-zipf, lognormal, histogram..."
    ),
    drawn("zipf:low=1,high=5,low=2", "zipf has low twice ...; give it once"),
    drawn("zipf:alpha=2", "zipf has no parameter 'alpha'...known: exponent, low, high, shift..."),
    drawn("zipf:low=x", "...low must be int, got 'x'..."),
    drawn("uniform:low=5,high=4", "Uniform: low must be at most high, got low=5 and high=4..."),
    drawn(
        "uniform:high=9223372036854775807", "Uniform: high must be at least 0 and at most 9223372036854774784, got..."
    ),
    drawn("zipf:low=0", "...low + shift must be at least 1, got low=0 shift=0; pass shift=1 for values from 0"),
    drawn("clipped-zipf:exponent=1", "ClippedZipf: exponent must be above 1 and at most 100, got 1.0"),
    drawn("histogram:column=length", "histogram needs path ...; write histogram:path=..."),
    drawn("lognormal:mean=nan", "Lognormal: mean must be above 0 and finite, got nan"),
    drawn("lognormal:mean=1e-308,std=1e308", "...std must be at most 10^100 times the mean, got mean=1e-308..."),
    config(
        lambda _: draw_actions(Uniform(low=1 << 31, high=1 << 31), np.random.default_rng(0), 2),
        "...actions must be between 0 and 2147483647, got 2147483648 to 2147483648...",
    ),
    config(
        lambda scene: Histogram.read(scene.data, "genre"), "...no integer column 'genre'; known: length, user_id, ..."
    ),
    data(lambda scene: Histogram.read(scene.data, split="test"), "<data> has no split 'test'; known: eval, train"),
    observed([3, -2], "a histogram needs observations of at least 0, got -2..."),
    observed([], "a histogram needs observations of at least 0, got none..."),
    histogram([2, 1], [1, 1], "...must ascend from at least 0 and its counts be at least 1..."),
    histogram([1, 2], [1], "...as many counts as values and at least one, got 2 values and 1 counts..."),
    mixed(samples(5), [0, 1], "...weights must be positive numbers..."),
    mixed(samples(5), [1e9, 1], "dataset 1 of the mixture has 5 samples and gets 0 of an epoch's 10..."),
    mixed(samples(1, [0]), [1, 1], "dataset 0 of the mixture has 0 samples..."),
    config(
        lambda _: EpochSchedule(**SCHEDULE | {"world_size": 0}), "EpochSchedule: world_size must be at least 1, got 0"
    ),
    config(lambda _: EpochSchedule(**SCHEDULE, start=11), "...start must be between 0 and num_samples = 10, got 11"),
    config(lambda _: StreamConfig(lanes=0), "StreamConfig: lanes must be at least 1, got 0"),
    data(lambda scene: open_stream(scene.data, "test"), "<data> has no split 'test'; known: eval, train"),
    data(
        lambda _: open_stream("no://bucket/data", "train"), "no://bucket/data cannot be opened: Unrecognized filesys..."
    ),
    config(lambda _: TimeWindows(every="1y"), EVERY.format("1y")),
    config(
        lambda _: TimeWindows(every="1d", start="today"), "...start must be a time in ISO 8601, such as 2015-01-06..."
    ),
    targets("'bought == 1' needs the column 'bought'; there are user_id, sex, age, item_id, ...", where="bought == 1"),
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
    windows([[1]], "...start 2000-01-01 is after the last event, at 1970-01-01T00:00:00...", start="2000-01-01"),
    windows([[0, 0], [0]], "the dataset has no times of events; windows of time need them..."),
    windows([[]], "the dataset has no events in its split 'train'..."),
    foreign({"user_id": "uid"}, "columns must name the column of item_id, they have user_id"),
    foreign({"item_id": "movies", "label": "x"}, "no feature can be called 'label'..."),
    foreign({"item_id": "i"}, "sort_by_time needs a column of timestamp_ms, they have item_id", sort_by_time=True),
    data(
        lambda scene: open_store(scene.folder, columns={"item_id": "i"}),
        "<folder> has no Parquet files; pass a folder...",
    ),
    config(
        lambda _: open_store("s3://b/data?region=us-east-1", columns={"item_id": "i"}),
        "columns are for a folder of Parquet files, no...",
    ),
    config(lambda scene: open_store(scene.data).head(-1), "...n must be at least 0, got -1"),
    mapped(
        "video_id", 600, "the dataset has no column 'video_id' to map; known: user_id, segment, item_id, action, ..."
    ),
    mapped(
        "item_id", 100, "item_id is up to ... in the dataset, too large for a table of num_embeddings=100; pass ..."
    ),
    config(
        lambda scene: open_store(scene.data).remapped(MAP).remapped(MAP), "the column 'item_id' is mapped already; ..."
    ),
    data(
        lambda scene: read_manifest(scene.folder),
        "<folder> is not a dataset: it contains no manifest.json; pass a folder that `evenrank preprocess --out` wrote",
    ),
    manifest("{", "<folder>/manifest.json is not valid JSON..."),
    manifest('{"schema_version": 99}', "...schema version 99, this version of evenrank reads 2..."),
    manifest('{"schema_version": 2}', "...has a missing or malformed field..."),
    data(
        lambda scene: read_manifest(scene.folder / "no"), "<folder>/no is not a dataset: no such folder; make one wi..."
    ),
    data(
        lambda scene: read_manifest(scene.file("log.csv", "")),
        "<folder>/log.csv is not a dataset: it is a file; pass...",
    ),
    data(
        lambda scene: FolderLog(scene.folder / "missing", MANIFEST), "...missing is no folder; make that of the log..."
    ),
    config(
        lambda scene: FolderLog(scene.folder, MANIFEST, incomplete_seconds=0),
        "...incomplete_seconds must be above 0...",
    ),
    log("...vocabulary_sizes must have item_id, they have action...", {"action": 3}),
    log("...vocabulary_sizes['item_id'] must be at least 1, got 0", {"item_id": 0}),
    log("...extra_events['dwell'] must be one of ..., got 'text'...", {"item_id": 3}, extra_events={"dwell": "text"}),
]
