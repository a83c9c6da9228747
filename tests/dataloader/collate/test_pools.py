"""Histories of kinds of events, features of items and of targets, compared with a plain reading of the columns."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import Cross, LoaderConfig, Pools, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, HSTUCost
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import DrawKey, group_by_store
from evenrank.dataloader.collate.item_features import read_item_features
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import SequenceStore
from evenrank.datasets.schema import DataFile, sha256_of
from evenrank.datasets.store import Slices
from evenrank.datasets.stream import StreamSource
from tests.dataloader.batch_helpers import rows_of
from tests.dataloader.collate.stores import STORE

NUM_ITEMS, HOUR_MS = 40, 3_600_000
ARTISTS = np.arange(NUM_ITEMS) * 7 % 23
COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)


def _rows(batch: SequenceBatch) -> dict[str, Any]:
    """Return the rows of each key."""
    fields = (batch.features, batch.float_features, batch.labels)
    return {key: rows_of(field, key) for field in fields if field is not None for key in list(field.keys())}


def _store(lengths: list[int], seed: int, folder: Path | None = None) -> SequenceStore:
    """Return a store with every event of each row but its first as a target, and a table of features of items."""
    rng, offsets = np.random.default_rng(seed), np.concatenate([[0], np.cumsum(lengths)])
    num_events, rows = int(offsets[-1]), len(lengths)
    columns: dict[str, Any] = {
        "user_id": rng.integers(0, 100, rows),
        "sex": rng.integers(0, 2, rows),
        "age": rng.integers(0, 90, rows),
        "item_id": rng.integers(0, NUM_ITEMS, num_events),
        "action": rng.choice([0, 1, 1, 1, 2, 4], num_events).astype(np.int32),
        "timestamp_ms": np.sort(rng.integers(0, 10**9, num_events)),
        "organic": rng.integers(0, 2, num_events),
    }
    file = None
    if folder is not None:
        table = {
            "item_id": np.arange(1, NUM_ITEMS),
            "artist": ARTISTS[1:],
            "tempo": (ARTISTS[1:] / 4).astype(np.float32),
        }
        pq.write_table(pa.table(table), folder / "features.parquet")
        file = DataFile(path="features.parquet", rows=NUM_ITEMS - 1, sha256=sha256_of(folder / "features.parquet"))
    sizes = {"item_id": NUM_ITEMS, "user_id": 100}
    manifest = replace(STORE.manifest, extra_events={"organic": "int64"}, vocabulary_sizes=sizes, item_features=file)
    store = replace(STORE, manifest=manifest, offsets=offsets, columns=columns, source=folder)
    ends = np.concatenate([np.arange(begin + 1, end) for begin, end in itertools.pairwise(offsets)]) + 1
    of_rows = np.searchsorted(offsets, ends - 1, side="right") - 1
    return store.sliced(Slices(of_rows, offsets[of_rows], ends), np.ones(len(ends), dtype=np.int32))


def _history(store: SequenceStore, index: int, config: LoaderConfig) -> list[int]:
    """Return the places of a history's events, read plainly."""
    assert config.pools is not None
    begin, target = int(store.begins[index]), int(store.ends[index]) - 1
    pools, kinds = config.pools, store.columns["action"]
    places = range(max(begin, target - pools.within), target)
    if not pools.each:
        kept = [place for place in places if kinds[place] in pools.values]
        return kept[len(kept) - min(len(kept), config.max_history_length) :]
    share = min(max(1, config.max_history_length // len(pools.values)), config.max_history_length)
    of_kinds = [[place for place in places if kinds[place] == value] for value in pools.values]
    newest = sorted(place for kept in of_kinds for place in kept[len(kept) - min(len(kept), share) :])
    return newest[len(newest) - min(len(newest), config.max_history_length) :]


def _sample(store: SequenceStore, index: int, config: LoaderConfig, artists: np.ndarray) -> dict[str, list[float]]:
    """Return the features of a sample, read plainly."""
    columns, history, target = store.columns, _history(store, index, config), int(store.ends[index]) - 1
    shown, row = [*history, target], int(store.rows_of(np.array([index]))[0])
    items, hour = columns["item_id"][shown], int(columns["timestamp_ms"][target]) // HOUR_MS % 24
    artist = int(artists[items[-1]])
    words = [int(columns["user_id"][row]), artist, hour, int(columns["organic"][target]), int(items[-1])]
    hashed = [xxhash.xxh64(np.array(words[:n], dtype="<i8").tobytes(), seed=9).intdigest() for n in (2, 5)]
    return {
        "hour": [hour],
        "is_late": [int(hour >= 12)],
        "pair": [hashed[0] % 1000],
        "five": [hashed[1] % 77],
        "item_id": items.tolist(),
        "artist": artists[items].tolist(),
        "action": columns["action"][history].tolist(),
        "timestamp_ms": columns["timestamp_ms"][shown].tolist(),
        "label": [int(columns["action"][target])],
    }


CONFIG = LoaderConfig(
    batch_size=5,
    max_history_length=6,
    max_num_candidates=1,
    num_tasks=1,
    context=(),
    order="rows",
    extra_events=("timestamp_ms",),
    item_features=("artist",),
    target_features={"hour": f"timestamp_ms // {HOUR_MS} % 24", "is_late": f"timestamp_ms // {HOUR_MS} % 24 >= 12"},
    crosses={
        "pair": Cross(of=("user_id", "artist"), size=1000, seed=9),
        "five": Cross(of=("user_id", "artist", "hour", "organic", "item_id"), size=77, seed=9),
    },
)
POOLS = st.builds(
    Pools, values=st.sampled_from([(1, 2, 4), (4, 1), (2,)]), each=st.booleans(), within=st.sampled_from([1, 5, 700])
)


@settings(max_examples=60)
@given(st.lists(st.integers(2, 30) | st.just(600), min_size=1, max_size=5), POOLS, st.integers(0, 9), st.integers(0, 9))
def test_batches_have_the_newest_events_of_each_kind_and_features_of_the_target(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], pools: Pools, limit: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("features")
    store = _store(lengths, seed, folder)
    config = replace(CONFIG, pools=pools, max_history_length=limit)
    collate, artists = Collate.create(config, store.manifest, [store]), np.where(np.arange(NUM_ITEMS), ARTISTS, 0)
    ids = np.random.default_rng(seed).permutation(len(store))[:5]
    groups = group_by_store([store], ids)
    (batch,) = collate(groups, ids, batch_size=len(ids) + 1)
    expected = [_sample(store, index, config, artists) for index in ids.tolist()]
    found = _rows(batch)
    for name, rows in found.items():
        assert rows == [*(sample[name] for sample in expected), []], name
    assert found.keys() == expected[0].keys()
    lengths_of = collate.lengths(groups, DrawKey(0, 0, ids)).of_keys
    for (_, name), of_key in lengths_of.items():
        assert of_key.tolist() == [len(sample[name]) for sample in expected], name


@pytest.mark.parametrize("mode", ["hash_roundrobin", "roundrobin"])
def test_key_maps_change_rows_of_tables_but_no_crosses(tmp_path: Path, mode: Any) -> None:
    store = _store([9, 30], 1, tmp_path)
    config = replace(CONFIG, pools=Pools(values=(1, 2)), user_id=True)
    sizes = {"item_id": NUM_ITEMS, "artist": 23, "user_id": 100, "pair": 1000}
    maps = {name: KeyMap(num_embeddings=size, world_size=2, mode=mode) for name, size in sizes.items()}

    def batches(**options: Any) -> list[SequenceBatch]:
        return list(build_loader(store, replace(config, **options), rank=0, world_size=1))

    for plain, mapped in zip(batches(), batches(key_maps=maps), strict=True):
        for name in list(plain.features.keys()):
            values, rows = (batch.features[name].values().numpy() for batch in (plain, mapped))
            assert (rows == (maps[name](values) if name in maps else values)).all(), name


def test_balanced_ranks_train_the_same_samples_as_one(tmp_path: Path) -> None:
    store, config = _store([40, 3, 9, 25], 2, tmp_path), replace(CONFIG, pools=Pools(values=(1, 2, 4)), num_workers=2)

    def samples(world_size: int, balance: BalanceConfig | None) -> dict[int, Any]:
        found = {}
        for rank in range(world_size):
            for batch in build_loader(store, config, rank=rank, world_size=world_size, balance=balance):
                rows = _rows(batch)
                for row, sample in enumerate(batch.sample_ids[: batch.num_real].tolist()):
                    assert sample not in found
                    found[sample] = {name: values[row] for name, values in rows.items()}
        return found

    expected = samples(1, None)
    assert len(expected) == len(store)
    assert samples(3, BalanceConfig(cost=COST)) == expected


def test_floats_of_items_are_float_features(tmp_path: Path) -> None:
    store = _store([5], 3, tmp_path)
    config = replace(CONFIG, item_features=("artist", "tempo"), target_features={"half": "tempo * 0.5"}, crosses={})
    (batch,) = build_loader(store, config, rank=0, world_size=1)
    found = _rows(batch)
    tempo = np.where(store.columns["item_id"], ARTISTS[store.columns["item_id"]] / 4, 0).tolist()
    assert found["tempo"][:4] == [tempo[: end + 1] for end in range(1, 5)]
    assert found["half"][:4] == [[each / 2] for each in tempo[1:]]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_num_candidates": 2}, "'hour' is a feature of one target, got max_num_candidates=2; set it to 1"),
        (
            {"pools": Pools(values=(1,), column="age")},
            "pools are of 'age', no column of events of integers; there are item_id, a",
        ),
        ({"item_features": ("genre",)}, "the dataset has no feature of items 'genre'; known: artist, tempo"),
        ({"crosses": {"c": Cross(of=("genre",), size=2)}}, "cross 'c' is of 'genre', which has no integers; there are"),
        (
            {"crosses": {"c": Cross(of=("hour",), size=2), "d": Cross(of=("c",), size=2)}},
            "cross 'd' is of 'c', which has no integers; there are user_id",
        ),
        ({"target_features": {"x": "genre > 1"}}, "'genre > 1' needs the column 'genre'; there are user_id"),
        ({"target_features": {"item_id": "organic"}}, "'item_id' is the name of two features of batches"),
    ],
)
def test_features_that_cannot_be_made_are_refused(tmp_path: Path, options: dict[str, Any], line: str) -> None:
    store = _store([5], 4, tmp_path)
    with pytest.raises(ConfigError) as caught:
        build_loader(store, replace(replace(CONFIG, crosses={}), **options), rank=0, world_size=1)
    assert line in str(caught.value)
    without = replace(store, manifest=replace(store.manifest, item_features=None))
    with pytest.raises(ConfigError, match="the dataset has no table of features of items; preprocess it with"):
        build_loader(without, CONFIG, rank=0, world_size=1)


def test_a_table_that_is_not_the_one_of_the_manifest_is_refused(tmp_path: Path) -> None:
    store = _store([5], 4, tmp_path)
    stream = StreamSource(manifest=store.manifest, split="train", files=fs.LocalFileSystem(), root=str(tmp_path))
    sources = (store, stream)
    artists = [read_item_features(source, ["artist"])["artist"].tolist() for source in sources]
    assert artists == [ARTISTS.tolist()] * 2
    pq.write_table(pa.table({"item_id": [1], "artist": [2]}), tmp_path / "features.parquet")
    message = r"features.parquet does not have the SHA-256 in its manifest; preprocess"
    for source in sources:
        with pytest.raises(DataError, match=message):
            read_item_features(source, ["artist"])
