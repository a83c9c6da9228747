"""Samples of MLPerf's recommender from Yambda's files, compared one by one with a plain reading of these files."""

import itertools
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pyarrow.parquet as pq
import pytest
import xxhash

from evenrank.dataloader import Cross, LoaderConfig, Pools, TimeWindows, build_loader
from evenrank.dataloader.balance import BalanceConfig, HSTUCost
from evenrank.preprocess import PreprocessConfig, preprocess
from tests.dataloader.batch_helpers import rows_of

DAY, SALT, HELD_OUT, WORDS = 86_400, 7, 0.9, 1 << 64
KINDS = ("listen", "like", "dislike", "unlike", "undislike")
LISTENS = "action in (1, 4)"
TRAINED, EVALUATED = (f"{LISTENS} and fraction(user_id, {SALT}) {sign} {HELD_OUT}" for sign in ("<", ">="))
CROSSES = {
    "user_x_artist": Cross(of=("user_id", "artist_id"), size=100_000_000),
    "user_x_album": Cross(of=("user_id", "album_id"), size=40_000_000),
    "user_x_hour": Cross(of=("user_id", "hour"), size=24_000_000),
    "item_x_hour": Cross(of=("item_id", "hour"), size=40_000_000, seed=3),
    "artist_x_hour": Cross(of=("artist_id", "hour"), size=32_000_000),
    "user_x_is_organic": Cross(of=("user_id", "is_organic"), size=2_000_000),
    "user_x_artist_x_hour": Cross(of=("user_id", "artist_id", "hour"), size=40_000_000, seed=1),
}
CONFIG = LoaderConfig(
    batch_size=32,
    max_history_length=12,
    max_num_candidates=1,
    user_id=True,
    extra_events=("timestamp_ms",),
    label="listen_plus",
    pools=Pools(values=(1, 2, 4), within=40),
    item_features=("artist_id", "album_id"),
    target_features={"hour": "timestamp_ms // 3600000 % 24"},
    crosses=CROSSES,
)
BALANCE = BalanceConfig(cost=HSTUCost(hidden=64, heads=2, head_dim=32, layers=2, interleave_actions=False))
Row = tuple[int, int, int, int, int | None, str]  # uid, timestamp, item_id, is_organic, played_ratio_pct, event_type
Sample = Mapping[str, list[int]]
Place = tuple[int, int]  # a user, and the place of a target among the events


class Event(NamedTuple):
    uid: int
    time: int
    item: int
    is_organic: int
    weight: int


def write_log(folder: Path, rows: Sequence[Row], mappings: Mapping[str, Sequence[tuple[int, int]]]) -> Path:
    """Write the files of Yambda, with artists and albums as (id, item)."""
    of_log, shared = folder / "yambda/raw/50m", folder / "yambda/shared_metadata"
    for path in (of_log, shared):
        path.mkdir(parents=True)
    names = ("uid", "timestamp", "item_id", "is_organic", "played_ratio_pct", "event_type")
    types = (pl.UInt32, pl.UInt32, pl.UInt32, pl.UInt8, pl.UInt16, pl.Enum(KINDS))
    frame = pl.DataFrame(rows, schema=dict(zip(names, types, strict=True)), orient="row")
    length = pl.when(pl.col("event_type") == "listen").then(200).cast(pl.UInt32)
    frame.with_columns(length.alias("track_length_seconds")).write_parquet(of_log / "multi_event.parquet")
    for name, pairs in mappings.items():
        mapping = pl.DataFrame(pairs, schema={f"{name}_id": pl.UInt32, "item_id": pl.UInt32}, orient="row")
        mapping.write_parquet(shared / f"{name}_item_mapping.parquet")
    return folder


def _preprocess(folder: Path, rows: Sequence[Row], mappings: Mapping[str, Sequence[tuple[int, int]]]) -> Path:
    write_log(folder, rows, mappings)
    preprocess(PreprocessConfig(dataset="yambda-50m", raw_dir=folder, out=folder / "out", split="none"))
    return folder


def draw_log(num_users: int, median: int, days: int) -> tuple[list[Row], dict[str, list[tuple[int, int]]]]:
    """Draw a log with the kinds and lengths of Yambda, but more likes; a third of the events have the time before."""
    draw, num_items, rows = random.Random(5), 9 * num_users, list[Row]()
    for user in draw.sample(range(3 * num_users), num_users):
        time = draw.randrange(0, DAY, 5)
        num_events = min(max(5, round(draw.lognormvariate(0, 1.067) * median)), 10 * median)
        for _ in range(num_events):
            time += draw.choice([0, 5, draw.randrange(0, 6 * days * DAY // num_events, 5)])
            kind = draw.choices(KINDS, (85, 11, 2, 1, 1))[0]
            ratio = draw.choice([*range(40, 60), 100, None]) if kind == "listen" else None
            item = min(int(num_items ** draw.random()), num_items - 1)
            rows.append((user, time, item, draw.randrange(2), ratio, kind))
    draw.shuffle(rows)
    artists = [(draw.randrange(num_items // 7), item) for item in range(num_items) if item % 5]
    albums = [(draw.randrange(num_items // 3), item % num_items) for item in range(2 * num_items)]
    return rows, {"artist": draw.sample(artists, len(artists)), "album": draw.sample(albums, len(albums))}


def fraction_of(user: int, salt: int) -> float:
    """Return the hash of a user and a salt, by the finalizer of SplitMix64."""
    word = (user + 0x9E3779B97F4A7C15 + salt) % WORDS
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORDS
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORDS
    return ((word ^ word >> 31) >> 11) / 2**53


@dataclass
class Reading:
    """The files, read plainly."""

    users: dict[int, list[Event]]
    """The events of each user, oldest first, in the order of the rows of the dataset."""
    tables: dict[str, dict[int, int]]
    config: LoaderConfig
    known: dict[tuple[int, tuple[int, ...]], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, config: LoaderConfig) -> "Reading":
        columns = pq.read_table(folder / "yambda/raw/50m/multi_event.parquet").to_pydict()
        users = defaultdict[int, list[Event]](list)
        for uid, time, item, is_organic, ratio, kind, _ in zip(*columns.values(), strict=True):
            played = 1 if (ratio or 0) >= 50 else 4
            weight = {"listen": played, "like": 2}.get(kind, 0)
            users[uid].append(Event(uid, time, item, is_organic, weight))
        tables: dict[str, dict[int, int]] = {}
        for name in ("artist", "album"):
            mapping = pq.read_table(folder / f"yambda/shared_metadata/{name}_item_mapping.parquet").to_pydict()
            tables[name] = {}
            for feature, item in zip(mapping[f"{name}_id"], mapping["item_id"], strict=True):
                tables[name].setdefault(item, feature)
        paths = sorted((folder / "out/train").glob("*.parquet"))
        order = [user for path in paths for user in pq.read_table(path)["user_id"].to_pylist()]
        assert sorted(order) == sorted(users)
        return cls({user: sorted(users[user], key=lambda event: event.time) for user in order}, tables, config)

    def targets(self, min_history: int) -> list[Place]:
        """Return all targets, user by user."""
        return [
            (user, place)
            for user, events in self.users.items()
            for place, event in enumerate(events)
            if place >= min_history and event.weight in (1, 4)
        ]

    def history(self, user: int, target: int) -> list[Event]:
        length, pools, newest = self.config.max_history_length, self.config.pools, list[int]()
        assert pools is not None
        groups = [(1,), (2,), (4,)] if pools.each else [(1, 2, 4)]
        for weights in groups:
            places = self.places(user, weights)
            first, end = bisect_left(places, target - pools.within), bisect_left(places, target)
            newest += places[max(first, end - length // len(groups)) : end]
        return [self.users[user][place] for place in sorted(newest)]

    def places(self, user: int, weights: tuple[int, ...]) -> list[int]:
        """Return the places of the events of a user that have one of these weights."""
        if (user, weights) not in self.known:
            events = enumerate(self.users[user])
            self.known[user, weights] = [place for place, event in events if event.weight in weights]
        return self.known[user, weights]

    def sample(self, user: int, target: int) -> Sample:
        event, history = self.users[user][target], self.history(user, target)
        shown = [*history, event]
        artists, albums = ([self.tables[name].get(each.item, 0) for each in shown] for name in ("artist", "album"))
        values = {"user_id": user, "item_id": event.item, "artist_id": artists[-1], "album_id": albums[-1]}
        values |= {"hour": event.time // 3600 % 24, "is_organic": event.is_organic}
        crosses = {}
        for name, cross in self.config.crosses.items():
            words = b"".join(values[column].to_bytes(8, "little") for column in cross.of)
            crosses[name] = [xxhash.xxh64_intdigest(words, seed=cross.seed) % cross.size]
        return {
            "user_id": [user],
            "hour": [values["hour"]],
            "item_id": [each.item for each in shown],
            "artist_id": artists,
            "album_id": albums,
            "action": [each.weight for each in history],
            "timestamp_ms": [1000 * each.time for each in shown],
            "label": [int(event.weight == 1)],
            **crosses,
        }


def _batches(loader: Any) -> Iterator[list[tuple[int, Sample]]]:
    """Return the samples of each batch, with their ids."""
    for batch in loader:
        ids, rows = batch.sample_ids[: batch.num_real].tolist(), dict[str, list[list[int]]]()
        for tensors in (batch.features, batch.labels):
            rows |= {key: rows_of(tensors, key) for key in list(tensors.keys())}
        yield [(sample, {key: of_key[row] for key, of_key in rows.items()}) for row, sample in enumerate(ids)]


def _check(
    reading: Reading, folder: Path, order: TimeWindows, window: int, targets: Sequence[Place], way: tuple[int, Any]
) -> None:
    """Compare the samples of a window, on some ranks, with those of its targets, which come in this order."""
    config, (ranks, balance) = replace(reading.config, order=order), way
    loaders = [build_loader(folder / "out", config, rank=r, world_size=ranks, balance=balance) for r in range(ranks)]
    for loader in loaders:
        loader.begin_at(window)
    first, size = 0, config.batch_size * ranks
    for step in zip(*map(_batches, loaders), strict=True):
        found = [sample for batch in step for sample in batch]
        ids = [sample for sample, _ in found]
        assert (ids if balance is None else sorted(ids)) == [*range(first, min(first + size, len(targets)))]
        for sample, values in found:
            assert values == reading.sample(*targets[sample])
        first += len(found)
    assert first == len(targets)


@pytest.mark.parametrize(
    ("num_users", "median", "days", "windows", "ways"),
    [
        (60, 40, 6, [0, 2, 5], [(1, None), (3, None), (1, BALANCE), (3, BALANCE)]),
        pytest.param(1000, 2695, 301, [0, 1, 150, 299], [(3, BALANCE)], marks=pytest.mark.long),
    ],
    ids=["60 users", "1,000 users"],
)
def test_samples_are_those_of_a_plain_reading(
    tmp_path: Path, num_users: int, median: int, days: int, windows: Sequence[int], ways: Sequence[tuple[int, Any]]
) -> None:
    """Of users that are trained, and of those that are held out, whose windows begin with the first target of all."""
    folder = _preprocess(tmp_path, *draw_log(num_users, median, days))
    within, length = (20_000, 4086) if num_users == 1000 else (40, 12)
    plain, lengths = Reading.of(folder, CONFIG), set[int]()
    order = TimeWindows(every="1d", start="first", where=LISTENS, min_history=5, within="user")
    everybody = build_loader(folder / "out", replace(CONFIG, order=order), rank=0, world_size=1)
    first = min(plain.users[user][place].time for user, place in plain.targets(5))
    assert everybody.window(0)[0].timestamp() == first
    of_windows = defaultdict[int, list[Place]](list)
    for user, place in plain.targets(5):
        of_windows[(plain.users[user][place].time - first) // DAY].append((user, place))
    held_out = {user for user in plain.users if fraction_of(user, SALT) >= HELD_OUT}
    assert 0.04 < len(held_out) / num_users < 0.2
    assert max(of_windows) < everybody.num_windows
    order = replace(order, start=everybody.window(0)[0].isoformat())
    for each, window, way in itertools.product((True, False), windows, ways):
        pools = Pools(values=(1, 2, 4), within=within, each=each)
        reading = replace(plain, config=replace(CONFIG, pools=pools, max_history_length=length))
        for where, is_held_out in ((TRAINED, False), (EVALUATED, True)):
            targets = [target for target in of_windows[window] if (target[0] in held_out) == is_held_out]
            assert targets
            lengths |= {len(reading.history(*target)) for target in targets[:50]}
            _check(reading, folder, replace(order, where=where), window, targets, way)
    assert len(lengths) > 5


def test_samples_come_by_time_or_shuffled_within_segments_of_users(tmp_path: Path) -> None:
    folder = _preprocess(tmp_path, *draw_log(30, 30, 3))
    reading, order = Reading.of(folder, CONFIG), TimeWindows(every="1w", start="first", where=LISTENS, min_history=5)
    targets = reading.targets(5)
    by_time = sorted(targets, key=lambda target: reading.users[target[0]][target[1]].time)
    assert by_time != targets
    _check(reading, folder, replace(order, within="time"), 0, by_time, (2, None))
    config = replace(CONFIG, order=replace(order, segment=0.1))
    shuffled = build_loader(folder / "out", config, rank=0, world_size=1)
    found = [sample for batch in _batches(shuffled) for sample in batch]
    size = round(0.1 * len(targets))
    for begin in range(0, len(targets), size):
        segment = sorted(found[begin : begin + size], key=lambda sample: sample[0])
        assert segment == [(index, reading.sample(*targets[index])) for index in range(begin, begin + len(segment))]
        assert len(segment) < 3 or segment != found[begin : begin + size]


# One user's events: time, item, is_organic, played_ratio_pct, kind; and the weights by the rules.
EVENTS: list[tuple[int, int, int, int | None, str]] = [
    (100, 3, 1, 80, "listen"),  # 1
    (100, 4, 0, 49, "listen"),  # 4
    (105, 5, 1, None, "like"),  # 2
    (105, 3, 0, None, "listen"),  # 4
    (200, 6, 1, 50, "listen"),  # 1
    (300, 5, 1, None, "dislike"),  # 0
    (3600, 4, 1, 100, "listen"),  # 1
    (7205, 3, 0, None, "like"),  # 2
    (86_500, 6, 1, 10, "listen"),  # 4
    (86_500, 4, 1, None, "unlike"),  # 0
    (90_000, 5, 0, 99, "listen"),  # 1
    (172_905, 6, 1, 0, "listen"),  # 4
]
# By window: each target's items, artists, albums, weights and seconds; label, hour, user_x_artist, and with the hour.
OF_EACH_KIND = [  # the newest 2 of each, among the 7 events before
    [
        "3 4 5 3|30 40 0 30|33 44 55 33|1 4 2|100 100 105 105|0 0 53696921 21416708",
        "3 4 5 3 6|30 40 0 30 60|33 44 55 33 0|1 4 2 4|100 100 105 105 200|1 0 81937895 9572897",
        "3 4 5 3 6 4|30 40 0 30 60 40|33 44 55 33 0 44|1 4 2 4 1|100 100 105 105 200 3600|1 1 26480639 24639445",
        "4 5 3 6 4 3 6|40 0 30 60 40 30 60|44 55 33 0 44 33 0|4 2 4 1 1 2|100 105 105 200 3600 7205 86500|"
        "0 0 81937895 9572897",
    ],
    ["3 6 4 3 6 5|30 60 40 30 60 0|33 0 44 33 0 55|4 1 1 2 4|105 200 3600 7205 86500 90000|1 1 60867216 23864458"],
    ["4 3 6 5 6|40 30 60 0 60|44 33 0 55 0|1 2 4 1|3600 7205 86500 90000 172905|0 0 81937895 9572897"],
]
TOGETHER = [  # the newest 4, among the 7 events before
    [
        "3 4 5 3|30 40 0 30|33 44 55 33|1 4 2|100 100 105 105|0 0 53696921 21416708",
        "3 4 5 3 6|30 40 0 30 60|33 44 55 33 0|1 4 2 4|100 100 105 105 200|1 0 81937895 9572897",
        "4 5 3 6 4|40 0 30 60 40|44 55 33 0 44|4 2 4 1|100 105 105 200 3600|1 1 26480639 24639445",
        "3 6 4 3 6|30 60 40 30 60|33 0 44 33 0|4 1 1 2|105 200 3600 7205 86500|0 0 81937895 9572897",
    ],
    ["6 4 3 6 5|60 40 30 60 0|0 44 33 0 55|1 1 2 4|200 3600 7205 86500 90000|1 1 60867216 23864458"],
    ["4 3 6 5 6|40 30 60 0 60|44 33 0 55 0|1 2 4 1|3600 7205 86500 90000 172905|0 0 81937895 9572897"],
]


@pytest.mark.parametrize(("each", "length", "windows"), [(True, 6, OF_EACH_KIND), (False, 4, TOGETHER)])
def test_samples_of_a_user_of_12_events(tmp_path: Path, each: bool, length: int, windows: list[list[str]]) -> None:
    of_user = [(7, *event) for event in EVENTS]
    rows = [*of_user[6:], (9, 5, 3, 0, 100, "listen"), *of_user[:6]]  # of one time, those first in the file come first
    artists, albums = [(40, 4), (30, 3), (60, 6), (41, 4), (70, 7)], [(33, 3), (44, 4), (55, 5), (56, 5)]
    folder = _preprocess(tmp_path, rows, {"artist": artists, "album": albums})
    order = TimeWindows(every="1d", start="first", where=LISTENS, min_history=2, within="user")
    pools = Pools(values=(1, 2, 4), within=7, each=each)
    config = replace(CONFIG, order=order, pools=pools, max_history_length=length)
    loader = build_loader(folder / "out", config, rank=0, world_size=1)
    assert (loader.num_windows, loader.window(0)[0].timestamp()) == (3, 105)
    for expected in windows:
        (found,) = _batches(loader)
        for line, (_, sample) in zip(expected, found, strict=True):
            values = [[*map(int, part.split())] for part in line.split("|")]
            seconds = [time // 1000 for time in sample["timestamp_ms"]]
            jagged = [sample[name] for name in ("item_id", "artist_id", "album_id", "action")]
            single = ("label", "hour", "user_x_artist", "user_x_artist_x_hour")
            assert [*jagged, seconds, [value for name in single for value in sample[name]]] == values
            assert sample["user_id"] == [7]
